"""The examples at the root of the repository: each shows the figure that its docstring states."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from plinth_testing import run_script

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.thorough)])
def test_the_guard_names_both_calls_where_ranks_hang_or_die_without_it(kind: str) -> None:
    text = run_script(EXAMPLES / "collective_guard.py", "--kinds", kind, "--steps", 5, "--limit-s", 4)
    for rank in (0, 1):
        (guarded,) = [line for line in text.splitlines() if line.startswith(f"{kind}, guard, rank {rank}:")]
        assert "CollectiveMismatchError" in guarded
        assert "rank 1 called all_reduce of 1 float32 at" in guarded
        assert "rank 0 called all_" in guarded
        (plain,) = [line for line in text.splitlines() if line.startswith(f"{kind}, no guard, rank {rank}:")]
        assert "hangs" in plain or "ended with code" in plain or "RuntimeError" in plain
        assert "all_reduce of 1" not in plain


@pytest.mark.slow
def test_checkpoints_survive_kills_and_flipped_bits() -> None:
    text = run_script(EXAMPLES / "checkpoints_in_a_torch_loop.py", "--kills", 1, "--steps", 2, "--hidden", 256)
    plain, ours = text.splitlines()[-2:]
    assert "loaded step 2 of 2" in plain  # torch.load does not see the flipped bit
    assert "loads after 1 of 1 kills; after a flipped bit: loaded step 1 of 2" in ours


@pytest.mark.slow
@pytest.mark.thorough
def test_zero3_weights_pass_vllms_weight_source_in_one_collective() -> None:
    text = run_script(EXAMPLES / "zero3_weight_source.py", "--layers", 2)
    num_tensors = 2 + 11 * 2 + 1  # embedding, final norm and head, and the layers' parameters
    assert f"ModuleSource: {num_tensors} of {num_tensors} tensors are empty" in text
    assert f"one by one:  {num_tensors} collectives" in text
    assert "ZeroSource:  1 collectives" in text
    assert f"{num_tensors} of {num_tensors} tensors are equal" in text


@pytest.mark.slow
def test_the_engine_keeps_the_gradients_that_deepspeed_alone_loses() -> None:
    text = run_script(EXAMPLES / "ds_engine_own_loop.py")
    found = re.findall(r"^(.+?) +gradient norm ([\d.]+)$", text, re.MULTILINE)
    norms = {name: float(norm) for name, norm in found}
    true = norms["plain torch, one backward pass"]
    for stage in (1, 2, 3):
        assert norms[f"ds_engine, ZeRO-{stage}"] == pytest.approx(true, rel=1e-5)
    assert norms["DeepSpeed alone, ZeRO-3"] == pytest.approx(true, rel=1e-5)
    assert norms["DeepSpeed alone, ZeRO-2"] < 0.6 * true  # if this fails, DeepSpeed mended it: say so in the docstring
