"""Sizes and rates as people write them."""

import pytest

from fedhm.config.units import parse_rate, parse_size


def test_sizes_count_in_thousands_or_in_1024s() -> None:
    assert [parse_size(each) for each in ("128MB", "64 MiB", "1.5kB", "1B", 4096, "7", ".5GB", "1e3kB")] == [
        128_000_000,
        64 << 20,
        1500,
        1,
        4096,
        7,
        500_000_000,
        1_000_000,
    ]


def test_rates_are_bits_or_bytes_a_second() -> None:
    assert [parse_rate(each) for each in ("10Mbit", "10 Mbit/s", "2MB/s", "80bit", 5, "1Gbit")] == [
        1_250_000,
        1_250_000,
        2_000_000,
        10,
        5,
        125_000_000,
    ]


@pytest.mark.parametrize("given", ["-1MB", "0MB", "12 parsecs", "MB", "", "128MB/s", True, None, float("nan"), 0, -5])
def test_what_is_no_size_is_said(given: object) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["-1Mbit", "0bit", "3 furlongs", "", True, None, float("inf"), -5, "1e400"])
def test_what_is_no_rate_is_said(given: object) -> None:
    with pytest.raises(ValueError, match="is no rate"):
        parse_rate(given)  # type: ignore[arg-type]
