"""What `import fedhm` gives, and what it does not cost."""

import subprocess
import sys

import pytest

import fedhm


def test_every_exported_name_is_there_and_has_its_own_words() -> None:
    for name in fedhm.__all__:
        assert getattr(fedhm, name).__doc__ is not None or name == "models", name
    for name in ("assemble", "resume", "run", "Method", "MethodConfig", "State", "ModelState", "Task", "Update"):
        assert name in fedhm.__all__
    for name in ("Participant", "Watcher", "Record", "Metric", "Metrics", "Objective", "Experiment", "Result"):
        assert name in fedhm.__all__


@pytest.mark.slow
def test_plots_and_flower_are_imported_by_those_who_need_them() -> None:
    code = "import sys, fedhm; print([m for m in ('matplotlib', 'flwr', 'sklearn', 'datasets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
