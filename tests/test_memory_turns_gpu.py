"""Memory in turns on a GPU: real servers sleep and wake up, states move, and the weights of every step are intact."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.grpo_step.workload import prompts
from benchmarks.random_model import write_random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
StartApp = Callable[..., Any]
ADAPTERS = ("actor.lora.rank=8", "rollout.max_lora_rank=8")


def rows_of(tmp_path: Path, start_app: StartApp, name: str, *overrides: str) -> list[dict[str, float]]:
    """The metrics of three steps, the second with a checkpoint."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"question": prompts(32)}), tmp_path / "train.parquet")
    app = start_app(
        tmp_path,
        f"model.path={tmp_path / 'model'}",
        f"data.train={tmp_path / 'train.parquet'}",
        *("data.max_prompt_length=304", "reward.function=benchmarks.grpo_step.workload:parity"),
        *("batch.train_batch_size=8", "batch.mini_batch_size=4", "sampling.n=4", "sampling.max_tokens=64"),
        "algorithm.kl_coef=0.01",  # a reference model, whose weights move too
        f"trainer.experiment={name}",
        *("trainer.num_ranks=1", "trainer.total_training_steps=3", "trainer.save_freq=2"),
        *("trainer.val_before_train=false", "trainer.val_after_train=false"),
        *overrides,
    )
    assert app.finish() == 0, app.output
    [metrics] = tmp_path.glob(f"{name}_*/metrics.tsv")
    rows = list(csv.DictReader(metrics.open(), delimiter="\t"))
    return [{key: float(value) for key, value in row.items() if value} for row in rows]


@pytest.mark.parametrize("extra", [(), ADAPTERS], ids=["level 2", "level 1"])
def test_turns_keep_the_weights_of_trainer_and_servers(
    tmp_path: Path, start_app: StartApp, extra: tuple[str, ...]
) -> None:
    write_random_model("qwen3-0.6b", tmp_path / "model")
    turns = {
        name: rows_of(tmp_path, start_app, name, f"trainer.take_turns={name}", *extra)
        for name in ("never", "servers", "both")
    }
    assert {name: len(rows) for name, rows in turns.items()} == {"never": 3, "servers": 3, "both": 3}
    for name, rows in turns.items():
        for step, row in enumerate(rows):
            print(
                name, step, {key: value for key, value in row.items() if key.startswith(("timing_s", "turns", "perf"))}
            )
            # Servers that sample from other weights than the trainer's differ by more than 1.
            assert row["rollout/log_prob_mismatch"] < 0.05, (name, step)
            assert row["rollout/num_restarts"] == 0
            assert ("timing_s/sleep" in row) == (name != "never")
            assert ("timing_s/reload" in row) == (name == "both")
    for row in turns["both"][1:]:
        assert row["turns/moved_gb"] > (1.0 if not extra else 0.01)
    assert all(row["turns/moved_gb"] == 0 for row in turns["servers"])
