"""What options of the command line take, and the sentence for what they do not."""

from collections.abc import Callable
from typing import Any

import pytest

from fedhm.cli import main
from fedhm.cli.options import number, one_of, whole_number, whole_number_or_auto
from fedhm.errors import FedhmError


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (whole_number("--n"), "12", 12),
        (whole_number("--n", 5), "5", 5),
        (whole_number_or_auto("--n"), "auto", "auto"),
        (whole_number_or_auto("--n"), "3", 3),
        (number("--n", "a number"), "-0.5", -0.5),
        (number("--n", "a share", above=0, below=1), "0.5", 0.5),
        (one_of("--n", "a", "b"), "b", "b"),
    ],
)
def test_what_fits_is_read(read: Callable[[str], Any], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "sentence"),
    [
        (whole_number("--n"), "0", "--n takes a whole number from 1 on, not '0'"),
        (whole_number("--n"), "", "--n takes a whole number from 1 on, not ''"),
        (whole_number("--n"), "1.5", "--n takes a whole number from 1 on, not '1.5'"),
        (whole_number("--n", 5), "6", "--n takes a whole number from 1 to 5, not '6'"),
        (whole_number_or_auto("--n"), "all", "--n takes a whole number from 1 on, or auto, not 'all'"),
        (number("--n", "a number"), "nan", "--n takes a number, not 'nan'"),
        (number("--n", "a number"), "inf", "--n takes a number, not 'inf'"),
        (number("--n", "a share", above=0, below=1), "1", "--n takes a share, not '1'"),
        (one_of("--n", "a", "b"), "c", "--n takes a or b, not 'c'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(read: Callable[[str], Any], text: str, sentence: str) -> None:
    with pytest.raises(FedhmError) as error:
        read(text)
    assert str(error.value) == sentence


def test_settings_without_their_option_are_told_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "digits", "train.rounds=1", "train.lr=2"])
    assert "(settings follow --set: --set train.rounds=1 train.lr=2)" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["run", "digits", "--lr=2"])
    assert "--set" not in capsys.readouterr().err
