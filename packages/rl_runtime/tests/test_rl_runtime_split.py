"""The proposed split of GPUs between trainer and servers."""

from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given

from rl_runtime.app.split import describe_split, measured_sides, propose_split
from run_kit.tracking.metrics_table import MetricsTable

seconds = st.floats(0.01, 1000)


@given(seconds, seconds, st.integers(1, 8), st.integers(1, 8), st.integers(2, 12), st.integers(1, 4))
def test_no_other_split_is_faster(
    train_s: float, gen_s: float, train_gpus: int, gen_gpus: int, num_gpus: int, per_server: int
) -> None:
    work = train_s * train_gpus, gen_s * gen_gpus
    found = propose_split(*work, num_gpus=num_gpus, gpus_per_server=per_server, fits=lambda n: n % 3 != 2)
    times = {
        ranks: max(train_s * train_gpus / ranks, gen_s * gen_gpus / ((num_gpus - ranks) // per_server * per_server))
        for ranks in range(1, num_gpus)
        if ranks % 3 != 2 and (num_gpus - ranks) // per_server
    }
    if not times:
        assert found is None
        return
    assert found is not None
    assert found.step_s == min(times.values()) == times[found.num_ranks]
    assert found.num_ranks + found.num_servers * per_server <= num_gpus


def test_two_gpus_that_took_turns_work_at_the_same_time(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path / "metrics.tsv")
    for step, (whole, gen) in enumerate([(30.0, 5.0), (4.0, 2.6), (4.2, 2.6), (4.1, 2.7)], start=1):
        table.log(step, {"timing_s/step": whole, "timing_s/gen": gen})
    sides = measured_sides(table, is_ahead=False)
    assert sides is not None
    train_s, gen_s = sides
    assert (gen_s, round(train_s, 2)) == (2.6, 1.4)
    split = propose_split(train_s * 2, gen_s * 2, num_gpus=2)
    assert split is not None
    assert (split.num_ranks, split.num_servers, split.step_s) == (1, 1, 5.2)
    assert describe_split(split, step_s=4.1, max_staleness=0) == "", "slower than both on all GPUs, one after the other"
    line = describe_split(split, step_s=6.0, max_staleness=0)
    assert line.endswith("trainer.colocate=false trainer.num_ranks=1 rollout.num_servers=1 trainer.max_staleness=1")


def test_servers_that_generate_ahead_are_measured_by_their_own_time(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path / "metrics.tsv")
    for step in (1, 2, 3):
        table.log(step, {"timing_s/step": 4.0, "timing_s/gen": 1.0, "rollout/busy_s": 3.9})
    assert measured_sides(table, is_ahead=True) == (3.0, 3.9)
    assert measured_sides(MetricsTable(tmp_path / "none.tsv"), is_ahead=True) is None
