"""Devices in a config: what is wrong with them is one sentence."""

from pathlib import Path
from typing import Any

import pytest

from fedhm.config.loading import parse
from fedhm.config.schema import read_profile
from fedhm.errors import FedhmError


def federation(*devices: dict[str, Any], **more: Any) -> Any:
    return parse({"federation": {"clients": 4, "devices": list(devices), **more}}, "test").federation


def test_shares_are_dealt_out_in_the_order_of_the_list() -> None:
    found = federation({"name": "a", "share": 0.4}, {"name": "b", "share": "1/4"}, {"name": "c", "share": 0.35})
    assert [device.name for device in found.device_of] == ["a", "a", "b", "c"]


def test_numbers_name_clients() -> None:
    found = federation({"name": "a", "clients": [3, 0]}, {"name": "b", "clients": [1, 2]})
    assert [device.name for device in found.device_of] == ["a", "b", "b", "a"]


@pytest.mark.parametrize(
    ("devices", "more", "sentence"),
    [
        ([{"name": "a", "share": 0.5}, {"name": "b", "share": 0.4}], {}, r"shares add up to 0\.9, not to 1"),
        ([{"name": "a", "share": 0.99}, {"name": "b", "share": 0.01}], {}, "'b' has a share .* none of 4 clients"),
        ([{"name": "a", "clients": [0, 1, 2]}, {"name": "b", "clients": [2, 3]}], {}, "client 2 is listed twice"),
        ([{"name": "a", "clients": [0, 1, 2, 4]}], {}, "lists client 4, but there are 4, from 0"),
        ([{"name": "a", "clients": [0, 1, 2, -1]}], {}, "greater than or equal to 0"),
        ([{"name": "a", "clients": [0, 1, 2]}], {}, "client 3 has no device"),
        ([{"name": "a", "share": 0.5}, {"name": "b", "clients": [2, 3]}], {}, "either every device has a share"),
        ([{"name": "a"}], {}, "either every device has a share"),
        ([{"name": "a", "share": 0.5}, {"name": "a", "share": 0.5}], {}, "two devices have the same name"),
        ([{"name": "a", "share": 1, "memory": "-3MB"}], {}, r"devices\.0\.memory: '-3MB' is no size"),
        ([{"name": "a", "share": 1, "memory": "3 sacks"}], {}, "is no size: units are"),
        ([{"name": "a", "share": 1, "up": "3MB/h"}], {}, r"devices\.0\.up: '3MB/h' is no rate"),
        ([{"name": "a", "share": 1, "speed": 0}], {}, "greater than 0"),
        ([{"name": "a", "share": 1, "speed": 1, "file": "x.json"}], {}, "a speed and a file"),
        ([{"name": "a", "share": 1}], {"heterogeneity": "dynamic"}, "set heterogeneity to 'fixed'"),
        ([{"name": "a", "share": 1}], {"assignment": ["full"] * 4}, "leave assignment empty"),
        ([], {"deadline": 3}, "follow from devices: list some"),
        ([], {"plan": ["full"] * 4}, "leave it empty"),
    ],
)
def test_what_is_wrong_is_one_sentence(devices: list[dict[str, Any]], more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence) as caught:
        federation(*devices, **more)
    assert "\n" not in str(caught.value)


def test_a_damaged_or_missing_device_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    with pytest.raises(FedhmError, match="cannot read the device file"):
        read_profile(file)
    for text in ("", "{", '{"version": 2}', '{"name": "x"}', "[]"):
        file.write_text(text)
        with pytest.raises(FedhmError, match="is no device file of 'fedhm profile', or damaged"):
            read_profile(file)
