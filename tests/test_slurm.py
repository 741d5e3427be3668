"""Apps in jobs of `plinth slurm`, run as SLURM runs them: two nodes, a recipe."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from plinth_testing import Slurm, network_hosts
from plinth_testing.network_hosts import is_available
from rl_data import build_tiny_model
from run_kit.cluster.slurm import submission
from run_kit.runs import list_runs

REPO = Path(__file__).resolve().parents[1]
TINY = (
    *("warm_start.steps=20", "task.num_val=16", "batch.train_batch_size=4", "batch.mini_batch_size=2", "sampling.n=4"),
    *("trainer.val_before_train=false", "trainer.val_after_train=false"),
)

pytestmark = [pytest.mark.e2e, pytest.mark.thorough, pytest.mark.timeout(1500)]


def job(folder: Path, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    return submission([*options, "grpo", *TINY, f"trainer.output_dir={folder / 'runs'}", *arguments])


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), *filter(None, sys.path)])}


@pytest.mark.skipif(not is_available(), reason="needs root and network namespaces")
def test_a_job_of_two_nodes_trains_on_one_and_samples_on_the_other(tmp_path: Path) -> None:
    arguments = ("trainer.num_ranks=1", "trainer.total_training_steps=2")
    command = job(tmp_path, *arguments, options=["--nodes=2", "--cpus-per-task=2"])
    small = {**environment(), "PLINTH_OBJECT_STORE_BYTES": "300000000"}
    with network_hosts(2) as hosts:
        done = Slurm(tmp_path / "slurm", hosts=hosts).run(command, env=small)
        assert (done.exit_code, done.num_starts, done.survivors) == (0, 1, []), done.output
        (run,) = list_runs(tmp_path / "runs")
        assert (run.state, run.step) == ("finished", 2)
        assert hosts[1].address in done.output


def test_a_recipe_is_one_job_after_the_other(tmp_path: Path) -> None:
    """prepare, sft and evaluate, each on what the job before it wrote."""
    rows, data, runs = tmp_path / "rows.jsonl", tmp_path / "data", tmp_path / "runs"
    sums = [(one, other) for one in range(20) for other in range(20)]
    rows.write_text(
        "".join(
            json.dumps({"question": f"{one}+{other}=", "answer": f"{one + other} #### {one + other}"}) + "\n"
            for one, other in sums
        )
    )
    model = build_tiny_model(tmp_path / "tiny")
    small = ("data.max_prompt_length=48", "supervised.max_length=96", "supervised.batch_size=8", "supervised.steps=12")
    slurm = Slurm(tmp_path / "slurm")

    def run(*arguments: str) -> None:
        done = slurm.run(submission(arguments), env=environment())
        assert (done.exit_code, done.num_starts, done.survivors) == (0, 1, []), done.output

    run("prepare", str(rows), "--out", str(data), "--validation", "0.1", "--duplicates", "exact")
    run(
        *("sft", "preset=demo", f"model.path={model}", f"supervised.files={data / 'train.parquet'}", *small),
        *("supervised.val_size=8", "supervised.sample_tokens=4", f"trainer.output_dir={runs}"),
    )
    (trained,) = list_runs(runs)
    run(
        *("evaluate", "preset=demo", f"model.path={runs / trained.name / 'model'}", f"data.val={data / 'val.parquet'}"),
        *("sampling.n=2", f"output_dir={tmp_path / 'evaluations'}"),
    )
    (evaluated,) = (tmp_path / "evaluations").iterdir()
    (summary,) = json.loads((evaluated / "summary.json").read_text())["models"]
    assert set(summary["metrics"]) >= {"pass@1", "mean@2"}
