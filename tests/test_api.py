"""What `import fedhm` gives, and what it does not cost."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fedhm


def test_every_exported_name_is_there_and_has_its_own_words() -> None:
    for name in fedhm.__all__:
        assert getattr(fedhm, name).__doc__ is not None or name == "models", name
    for name in ("assemble", "resume", "run", "Method", "MethodConfig", "State", "ModelState", "Task", "Update"):
        assert name in fedhm.__all__
    for name in ("Participant", "Watcher", "Record", "Metric", "Metrics", "Objective", "Experiment", "Result"):
        assert name in fedhm.__all__


TRAIN = """
import torch
from fedhm.measure.cost import training_memory
data = torch.randn(20, 6), torch.arange(20) % 3
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
settings = {"federation": {"participation": 1.0}, "train": {"rounds": 1}, "method": {"name": "fedavg"}}
fedhm.run(model, [data], data, settings)
training_memory(model, (6,), 2)
"""


@pytest.mark.slow
def test_plots_flower_and_the_compiler_are_imported_by_those_who_need_them() -> None:
    def imported(*modules: str) -> str:
        return f"print([module for module in {modules} if module in sys.modules])\n"

    code = "import sys, fedhm\n" + imported("matplotlib", "flwr", "sklearn", "datasets") + TRAIN
    code += imported("matplotlib", "torch._dynamo")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n[]\n"


def test_what_type_checkers_see_is_what_there_is() -> None:
    seen: set[str] = set()
    for node in ast.walk(ast.parse(Path(fedhm.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedhm"):
            for name in node.names:
                seen.add(name.name)
                assert getattr(fedhm, name.name) is getattr(import_module(node.module), name.name)
    assert seen == set(fedhm.__all__) <= set(dir(fedhm))
    assert re.match(r"\d+\.\d+", fedhm.__version__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fedhm.nothing  # noqa: B018
