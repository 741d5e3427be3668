"""The examples at the root of the repository: each shows the figure that its docstring states."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[1]
EXAMPLES = REPO / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_dpo_in_the_hugging_face_trainer_needs_less_memory_for_the_same_losses() -> None:
    runs = load("hf_trainer_dpo").compare(num_steps=2)
    assert runs["rl_core"]["losses"] == pytest.approx(runs["logits"]["losses"], abs=1e-5)
    assert runs["rl_core"]["losses"][0] != runs["rl_core"]["losses"][1]
    assert runs["rl_core"]["peak_mib"] < 0.6 * runs["logits"]["peak_mib"]


@pytest.mark.slow
def test_the_loss_in_trls_trainer_equals_trls_own(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    example = load("trl_grpo")
    rows = example.compare(tmp_path, num_steps=2, vocab_size=4096, response_length=12)
    assert len(rows) == 2
    for ours, theirs in rows:
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
        assert example.relative_difference(ours.gradient, theirs.gradient) < 1e-5
    assert abs(rows[1][0].loss) > 1e-3  # the second update clips; the first one's loss is zero by construction
