"""Ranks and servers over the nodes of a Ray cluster, each node on a host of its own (a network namespace)."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_data import build_tiny_model
from tests.run_folders import TINY_STEPS, exact_metrics, only

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

SMALL = (*TINY_STEPS, "trainer.num_ranks=2", "rollout.num_servers=2", "rollout.deterministic=true")
CASES = {
    "zero2": ["actor.zero.stage=2", "trainer.total_training_steps=3"],
    "sp": ["actor.zero.stage=3", "trainer.num_ranks=4", "actor.sequence_parallel=2", "trainer.total_training_steps=3"],
}


def routes(cluster: Any) -> str:
    """The line that says how rank 0, on the first host, reaches the servers; a pattern."""
    here, there = (re.escape(host.address) for host in cluster.hosts)
    return rf"weights: rank 0 -> http://{here}:\d+: shm; http://{there}:\d+: tcp"


@pytest.mark.parametrize("case", list(CASES))
def test_two_hosts_train_to_the_digit_as_one(
    case: str, tmp_path: Path, start_app: Callable[..., Any], start_cluster: Callable[..., Any]
) -> None:
    """A rank (or a sequence-parallel pair) and a server on each host; weights go over shared memory and TCP."""
    arguments = [*SMALL, *CASES[case]]
    per_node = 2 if case == "sp" else 1
    cluster = start_cluster(2)
    two = start_app(tmp_path / "two", *arguments, f"trainer.ranks_per_node={per_node}", cluster=cluster)
    actual = two.succeeded()
    assert re.search(routes(cluster), two.output), two.output

    expected = start_app(tmp_path / "one", *arguments).succeeded()
    assert exact_metrics(expected)
    assert exact_metrics(actual) == exact_metrics(expected)
    weights = only((expected / "model").glob("*.safetensors"))
    assert weights.read_bytes() == (actual / "model" / weights.name).read_bytes()


def test_what_a_node_lacks_is_said_before_anything_starts(
    tmp_path: Path, start_app: Callable[..., Any], start_cluster: Callable[..., Any]
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    cluster = start_cluster(2, num_cpus=1, local_folder=local)
    there = cluster.hosts[1].address

    def refused(*arguments: str, output_dir: Path = tmp_path / "shared") -> str:
        app = start_app(output_dir, *SMALL, "rollout.num_servers=1", *arguments, cluster=cluster)
        assert app.finish() == 2, app.output
        assert "run folder" not in app.output
        return str(app.output)

    has = "; ".join(f"{host.address}: 1 CPU 0 GPU" for host in cluster.hosts)
    error = refused()
    assert "error: rollout.num_servers: got 1" in error
    assert f"room for 0 servers: {has}" in error
    error = refused("trainer.num_ranks=1", output_dir=local)
    assert f"error: trainer.output_dir: got '{local}'; Ray node {there}" in error
    model = build_tiny_model(local / "model")
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1", "answer": "#### 2"}\n')
    data = f"data.train={tmp_path / 'train.jsonl'}"
    error = refused("trainer.num_ranks=1", f"model.path={model}", data, "warm_start.steps=0")
    assert "error: model.path: got" in error
    assert f"Ray node {there}" in error
