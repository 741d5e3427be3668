"""Tables of metrics and files of rollouts."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_kit_testkit import read_events

from plinth_testing import raises
from run_kit import (
    MetricsTable,
    read_rollouts,
    summarize,
    tail_mean,
    write_curves,
    write_rollouts,
)
from run_kit.errors import TrackingError
from run_kit.tracking.writers import TensorBoardWriter


@pytest.fixture
def table(tmp_path: Path) -> MetricsTable:
    return MetricsTable(tmp_path / "m.tsv")


def test_table_appends_and_grows(table: MetricsTable) -> None:
    table.log(1, {"a": 1, "b": 0.1 + 0.2})
    table.log(2, {"b": np.float32(0.1), "a": np.int64(2)})
    table.log(3, {"a": True, "late/one": 5.0})
    table.log(4, {"late/one": math.nan})
    table.log(4, {"a": 9})
    assert table.path.read_text() == (
        "step\ta\tb\tlate/one\n1\t1\t0.3\t\n2\t2\t0.100000001\t\n3\t1\t\t5\n4\t9\t\tnan\n"
    )
    assert table.series("late/one") == ([3], [5.0])
    assert list(table.path.parent.iterdir()) == [table.path]


ROWS = st.dictionaries(st.sampled_from(["a", "b/c", "d e", "é"]), st.integers() | st.floats(width=32), min_size=1)


@given(st.lists(ROWS, min_size=1, max_size=6))
def test_nothing_logged_is_lost(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, float]]) -> None:
    path = tmp_path_factory.mktemp("t") / "m.tsv"
    table = MetricsTable(path)
    for step, row in enumerate(rows):
        table.log(step, row)
    again = MetricsTable(path)
    assert again.columns == table.columns
    for step, row in enumerate(rows):
        for name, value in row.items():
            assert np.float32(again.row(step)[name]) == np.float32(value) or math.isnan(value)


def test_an_existing_table_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "m.tsv"
    path.write_text("step\ta\n1\t1\n2\t2\n3\t0.")
    table = MetricsTable(path)
    assert table.steps == (1, 2)
    table.truncate_from(2)
    assert table.steps == (1,)
    table.log(2, {"a": 5})
    assert path.read_text() == "step\ta\n1\t1\n2\t5\n"


@pytest.mark.parametrize(
    ("step", "metrics", "fields"),
    [
        (1, {"a": 1}, {"field": "step", "value": 1}),
        (6, {"a": "x"}, {"field": "a", "allowed": "one number"}),
        (6, {"a": np.ones(2)}, {"field": "a", "allowed": "one number"}),
        (6, {"a\tb": 1}, {"field": "name", "value": "a\tb"}),
        (6, {"step": 1}, {"field": "name", "value": "step"}),
        (6.0, {"a": 1}, {"field": "step", "value": 6.0}),
    ],
)
def test_bad_metrics_are_refused(
    table: MetricsTable, step: int, metrics: dict[str, object], fields: dict[str, object]
) -> None:
    table.log(5, {"a": 1})
    with raises(TrackingError, **fields):
        table.log(step, metrics)


@pytest.mark.parametrize("text", ["a\tb\n", "step\ta\n1\tx\n", "step\ta\n1\n"])
def test_invalid_tables(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.tsv").write_text(text)
    with pytest.raises(TrackingError):
        MetricsTable(tmp_path / "m.tsv")


def test_summaries() -> None:
    values = [0.0, 0.0, 1.0, math.nan, 2.0, 3.0, 10.0]
    assert tail_mean(values, 2) == 6.5
    summary = summarize(values)
    assert (summary.first_mean, summary.last_mean) == pytest.approx((6 / 5, 16 / 5))
    numbers = (summary.change, summary.minimum, summary.maximum, summary.last)
    assert numbers == pytest.approx((2.0, 0.0, 10.0, 10.0))
    assert math.isnan(summarize([]).last_mean)


def test_values_that_are_not_finite_are_gaps(table: MetricsTable, tmp_path: Path) -> None:
    for step, value in enumerate([1.0, 2.0, math.nan, math.inf, 3.0, 4.0], start=1):
        table.log(step, {"actor/loss": value})
    steps, values = table.series("actor/loss", gaps=True)
    assert steps == [1, 2, 3, 4, 5, 6]
    assert values == pytest.approx([1.0, 2.0, math.nan, math.nan, 3.0, 4.0], nan_ok=True)
    assert write_curves(table, tmp_path / "curves.png") is not None
    writer = TensorBoardWriter(tmp_path / "tensorboard")
    writer.write(1, {"actor/loss": math.inf})
    writer.close()
    [(_, _, written)] = read_events(tmp_path / "tensorboard")
    assert math.isnan(written)


def record(index: int) -> dict[str, object]:
    return {"prompt": f"p{index}", "response": f"r{index}\u2028\n", "reward": np.float32(index)}


def test_rollouts_are_a_repeatable_sample(tmp_path: Path) -> None:
    records = [record(i) for i in range(20)]
    path = write_rollouts(tmp_path, 3, records, count=4)
    assert path.name == "step_000003.jsonl"
    first = read_rollouts(tmp_path)
    write_rollouts(tmp_path, 3, records, count=4)
    assert read_rollouts(tmp_path) == first
    assert len(first) == 4
    assert first[0]["step"] == 3
    assert first[0]["response"].endswith("\u2028\n")


def test_rollouts_need_their_three_keys(tmp_path: Path) -> None:
    with raises(TrackingError, field="reward"):
        write_rollouts(tmp_path, 1, [{"prompt": "p", "response": "r"}], count=1)
    with raises(TrackingError, field="step", value=1):
        write_rollouts(tmp_path, 1, [{"prompt": "p", "response": "r", "reward": object()}], count=1)
