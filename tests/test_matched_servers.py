"""actor.match_servers: ranks and servers give every token the same log-prob, to the last bit, after every update."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_model import write_random_model
from tests.run_folders import column, metrics_rows, only
from tests.small_mixture import mixture_keys

pytestmark = [pytest.mark.e2e, pytest.mark.long]
ROOT = Path(__file__).parents[1]


DENSE = (
    *("preset=demo", "batch.mini_batch_size=4", "batch.token_budget=512", "sampling.n=4", "warm_start.steps=12"),
    "algorithm.entropy_coef=0.05",  # a gradient even where all answers are equally wrong
    *("trainer.val_before_train=false", "trainer.val_after_train=false"),
)
SHARDED = ("actor.zero.stage=3", "actor.sequence_parallel=2")
WHOLE = ("actor.zero.stage=2", "actor.tiled_mlp=16")


@pytest.mark.parametrize(
    ("model", "dtype", "settings"),
    [
        pytest.param("dense", "float32", (*WHOLE, "actor.gradient_checkpointing=true"), marks=pytest.mark.thorough),
        pytest.param("dense", "bfloat16", SHARDED, marks=pytest.mark.thorough),
        pytest.param("mixture", "float32", WHOLE, marks=pytest.mark.thorough),
        ("mixture", "bfloat16", (*SHARDED, "actor.gradient_checkpointing=true")),
    ],
)
def test_mismatch_is_exactly_zero(
    model: str, dtype: str, settings: tuple[str, ...], tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    """Groups share their prompt in the server's prefix cache and on the ranks; micro batches are packed.

    The first of the mixture's three layers has no experts; each push is compared with the server's weights.
    """
    keys = DENSE if model == "dense" else (*mixture_keys(tmp_path), "sync.verify=true")
    app = start_app(
        tmp_path / "runs",
        *(*keys, "actor.match_servers=true", f"actor.dtype={dtype}", f"rollout.dtype={dtype}", *settings),
        *("batch.train_batch_size=8", "trainer.total_training_steps=3"),
    )
    assert app.finish() == 0, app.output
    run = only((tmp_path / "runs").iterdir())
    assert "started ahead: " in (run / "servers" / "server_0.log").read_text()
    rows = metrics_rows(run)
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert {float(row["rollout/log_prob_mismatch_max"]) for row in rows} == {0.0}
    assert all(float(row["actor/grad_norm"]) > 0 for row in rows)


@pytest.mark.thorough
def test_a_push_between_the_tokens_of_a_response_leaves_no_mismatch(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    """Tokens of the new weights are computed on a cache of the new weights."""
    app = start_app(
        tmp_path,
        *(*DENSE, "actor.match_servers=true", "trainer.num_ranks=1", "trainer.max_staleness=1"),
        "rollout.max_samples_in_flight=4",  # so that groups are in flight at every push
        *("batch.train_batch_size=4", "batch.mini_batch_size=2", "warm_start.steps=5"),
        *("warm_start.optim.warmup_steps=0", "trainer.total_training_steps=5"),
    )
    run = app.succeeded()
    assert "sync.running_requests=recompute" in app.output
    assert "do not have the same bits" not in app.output
    assert max(column(run, "rollout/stale_token_share")) > 0
    assert set(column(run, "rollout/log_prob_mismatch_max")) == {0.0}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-moe-tiny"])
def test_the_tool_finds_equal_bits_in_every_operation(name: str, tmp_path: Path) -> None:
    model = write_random_model(name, tmp_path / "model")
    command = [sys.executable, "-m", "benchmarks.bitwise.run", str(model), "--match"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count(": equal bits") == 3, done.stdout
    assert "mlp" in done.stdout, "operations of layers were compared"
