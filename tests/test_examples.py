"""The examples at the root of the repository: each shows the figure that its docstring states."""

import asyncio
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from plinth_testing import run_script

# The packages' own tests cover what the examples show.
pytestmark = [pytest.mark.slow, pytest.mark.thorough]

REPO = Path(__file__).resolve().parents[1]
EXAMPLES = REPO / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dpo_in_the_hugging_face_trainer_needs_less_memory_for_the_same_losses() -> None:
    runs = load("hf_trainer_dpo").compare(num_steps=2)
    assert runs["rl_core"]["losses"] == pytest.approx(runs["logits"]["losses"], abs=1e-5)
    assert runs["rl_core"]["losses"][0] != runs["rl_core"]["losses"][1]
    assert runs["rl_core"]["peak_mib"] < 0.6 * runs["logits"]["peak_mib"]


def test_the_loss_in_trls_trainer_equals_trls_own(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    example = load("trl_grpo")
    rows = example.compare(tmp_path, num_steps=2, vocab_size=4096, response_length=12)
    assert len(rows) == 2
    for ours, theirs in rows:
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
        assert example.relative_difference(ours.gradient, theirs.gradient) < 1e-5
    assert abs(rows[1][0].loss) > 1e-3  # the second update clips; the first one's loss is zero by construction


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
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


def test_checkpoints_survive_kills_and_flipped_bits() -> None:
    text = run_script(EXAMPLES / "checkpoints_in_a_torch_loop.py", "--kills", 1, "--steps", 2, "--hidden", 256)
    plain, ours = text.splitlines()[-2:]
    assert "loaded step 2 of 2" in plain  # torch.load does not see the flipped bit
    assert "loads after 1 of 1 kills; after a flipped bit: loaded step 1 of 2" in ours


def test_zero3_weights_pass_vllms_weight_source_in_one_collective() -> None:
    text = run_script(EXAMPLES / "zero3_weight_source.py", "--layers", 2)
    num_tensors = 2 + 11 * 2 + 1  # embedding, final norm and head, and the layers' parameters
    assert f"ModuleSource: {num_tensors} of {num_tensors} tensors are empty" in text
    assert f"one by one:  {num_tensors} collectives" in text
    assert "ZeroSource:  1 collectives" in text
    assert f"{num_tensors} of {num_tensors} tensors are equal" in text


def test_the_engine_keeps_the_gradients_that_deepspeed_alone_loses() -> None:
    text = run_script(EXAMPLES / "ds_engine_own_loop.py")
    printed = re.findall(r"^(.+?) +gradient norm ([\d.]+)$", text, re.MULTILINE)
    norms = {name: float(norm) for name, norm in printed}
    true = norms["plain torch, one backward pass"]
    for stage in (1, 2, 3):
        assert norms[f"ds_engine, ZeRO-{stage}"] == pytest.approx(true, rel=1e-5)
    assert norms["DeepSpeed alone, ZeRO-3"] == pytest.approx(true, rel=1e-5)
    assert norms["DeepSpeed alone, ZeRO-2"] < 0.6 * true  # if this fails, DeepSpeed fixed it: say so in the docstring


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """(endpoint, model folder) of the server that two examples share."""
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("served")
    load("openai_server_rollout").write_model(folder / "model")
    with load("torch_trainer_to_vllm").running_server(folder / "model", folder) as endpoint:
        yield endpoint, folder / "model"


def test_the_rollout_client_returns_every_sampled_token_where_text_and_the_openai_client_lose_some(
    served: tuple[Any, Path],
) -> None:
    rows = asyncio.run(load("openai_server_rollout").compare(*served, num_prompts=16))
    row_of = {(row.case, row.way): row for row in rows}
    for case in ("as is", "one prompt too long", "connections cut"):
        ours, theirs = row_of[case, "rollout_vllm"], row_of[case, "openai"]
        assert ours.num_responses == 16 * 4
        assert ours.num_wrong == 0
        assert ours.largest < 1e-4
        assert theirs.num_wrong > 0.1 * theirs.num_responses
    assert not row_of["as is", "rollout_vllm"].failures
    too_long = row_of["one prompt too long", "rollout_vllm"].failures
    assert len(too_long) == 4
    assert all(failure.startswith("too_long: ") for failure in too_long)
    assert not row_of["connections cut", "rollout_vllm"].failures
    assert len(row_of["connections cut", "openai"].failures) == 2  # prompts 0 and 8: its retries end before the cuts do


def test_pushed_weights_are_the_trainers_from_a_torch_loop_and_from_a_callback(served: tuple[Any, Path]) -> None:
    """Leaves other weights in the server: the last test that uses it."""
    rows = {row.way: row for row in load("torch_trainer_to_vllm").compare(*served, num_steps=2)}
    for way in ("as started", "plain torch, push", "TRL callback, push", "push after it"):
        assert rows[way].difference < 1e-4, rows
    assert rows["trained, nothing sent"].difference > 1e-2
    # vLLM leaves a tied head's packed weights as they were. If this fails, it fixed that: say so in the docstring.
    assert rows["checkpoint, vLLM's reload_weights"].difference > 1e-3
