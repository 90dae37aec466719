"""The short form of the mutations in `make torture`: changed folders are read right, or refused in a sentence."""

import random
from pathlib import Path

import pytest

from small import no_figures
from torture.mutations import MUTATIONS, Reference, hit, make_reference

SHARE, COUNT = 5, 20  # tests, and mutations of each


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    with no_figures():
        return make_reference(tmp_path_factory.mktemp("mutations"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the report does without the layers")
@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("seed", range(SHARE))
def test_no_changed_file_is_read_wrong(seed: int, reference: Reference, tmp_path: Path) -> None:
    rng = random.Random(seed)
    found = [hit(reference, tmp_path / "mutated", rng) for _ in range(COUNT)]
    assert [each for each in found if each.problem] == []
    assert len({each.mutation for each in found}) > len(MUTATIONS) / 3
