"""The code in the README and the examples."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = Path(__file__).resolve().parents[1]


def load(name: str) -> ModuleType:
    path = PACKAGE / "examples" / f"{name}.py"
    if not path.exists():
        pytest.skip(f"{path.name} is not in this sandbox")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_code_runs() -> None:
    readme = PACKAGE / "README.md"
    if not readme.exists():
        pytest.skip("README.md is not in this sandbox")
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.S)
    assert blocks
    for block in blocks:
        names: dict[str, object] = {}
        exec(block, names)
        assert bool(names["log_probs"].grad.abs().sum() > 0)  # type: ignore[attr-defined]


def test_plain_torch_loop_learns() -> None:
    history = load("plain_torch_loop").train(num_steps=30)
    assert history[0] < 0.25
    assert sum(history[-3:]) / 3 > 0.6


def test_hugging_face_log_probs_agree() -> None:
    pytest.importorskip("transformers")
    differences = load("hugging_face_log_probs").compare()
    assert differences["log_probs"] < 1e-5
    assert differences["entropy"] < 1e-5
    assert differences["gradient"] < 1e-5


def test_shared_prompts_change_neither_loss_nor_gradients() -> None:
    pytest.importorskip("transformers")
    results = load("shared_prompts").compare()
    assert results["loss"] < 1e-6
    assert results["gradient"] < 1e-6
    assert results["token ratio"] == 8 * (96 + 32) / (96 + 8 * 32)
