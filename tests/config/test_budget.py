"""Sizes with units, budgets and their names: what is wrong with one is a sentence."""

import pytest

from fedhm.config.units import Kind, amount_text, parse_amount, parse_budget


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("128MB", "memory", 128_000_000),
        ("2MiB", "bytes", 2 * 2**20),
        ("1.5TB", "memory", 1_500_000_000_000),
        ("1.5GB", "memory", 1_500_000_000),
        (" 3 kb ", "bytes", 3000),
        (5000, "memory", 5000),
        ("300k", "macs", 300_000),
        ("1.5M", "parameters", 1_500_000),
        (2.5e6, "parameters", 2_500_000),
    ],
)
def test_sizes_are_read_and_written_as_the_same_amount(text: str | float, kind: Kind, amount: int) -> None:
    assert parse_amount(text, kind) == amount
    assert parse_amount(amount_text(amount, kind), kind) == amount


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        ("-3MB", "memory", "memory must be at least 1, not '-3MB'"),
        (0, "bytes", "bytes must be at least 1, not '0'"),
        ("3 parsec", "memory", "memory: there is no unit 'parsec', only B, kB, MB"),
        ("3MB", "parameters", "parameters: there is no unit 'MB', only k, M, G"),
        ("much", "macs", "macs takes a size such as 300k, 1.5M or a plain number, not 'much'"),
        ("1.2.3MB", "bytes", "bytes takes a size such as 128MB"),
        ("1e300GB", "memory", "more than any device has"),
        ("nan", "memory", "memory takes a size"),
        (True, "memory", "memory takes a size"),
    ],
)
def test_what_is_no_size_is_a_sentence(text: str | float, kind: Kind, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_amount(text, kind)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("memory:128MB", "memory:128MB"),
        ({"bytes": "2MiB"}, "bytes:2MiB"),
        ("memory: 0.128GB", "memory:128MB"),
        ({"bytes": 2_000_000, "memory": "1GB"}, "memory:1GB,bytes:2MB"),
        ({"parameters": "1/8"}, "parameters:1/8"),
    ],
)
def test_budgets_have_one_name_however_they_are_written(given: object, name: str) -> None:
    assert parse_budget(given).name == name
    assert parse_budget(name) == parse_budget(given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("much", "'much' is neither a rank ratio"),
        ({"time": 3}, "there is no budget of 'time', only of memory, bytes, macs, parameters"),
        ({}, "a budget is written"),
        ("bytes:2MB,bytes:3MB", "names one kind twice"),
        ({"parameters": "3/2"}, "those of a rank ratio above 0 and at most 1, not '3/2'"),
        ({"memory": [1]}, "memory takes a size such as 128MB, not a list"),
    ],
)
def test_what_is_no_budget_is_a_sentence(given: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_budget(given)
