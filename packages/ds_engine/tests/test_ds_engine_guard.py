"""The collective guard: pure comparison, and real ranks that fall out of step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine import EngineConfigError
from ds_engine.guard.collective_guard import CollectiveGuard
from ds_engine.guard.collective_log import CollectiveRecord, GroupLog, RankDump, describe_call, diagnose
from plinth_testing import raises, run_script

LEGITIMATE = ("agreeing", "destroyed_group", "one_leaves_first")
HANGING = {
    "stalled_rank": "rank 1 has issued none",
    "never_began": "rank 1 has issued none",
    "dead_rank": "rank 1 no longer answer(s)",
    "hanging_pair": "rank 1 called broadcast of 440467 float32",
}
"""Programs that would wait indefinitely over NCCL, and what the guard says of each."""
OPERATIONS = st.tuples(
    st.sampled_from(["all_reduce", "broadcast", "barrier"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(0, 10**9),
    st.sampled_from(["a.py:1 in f", "b.py:2 in g"]),
)


def dump(rank: int, calls: list[tuple[str, str, int, str]], *, keep: int = 512) -> RankDump:
    log = GroupLog(keep=keep)
    for call in calls:
        log.append(*call)
    return RankDump(rank=rank, count=log.count, records=tuple(log.recent), idle_s=1.0, position="x.py:5 in wait")


@given(calls=st.lists(OPERATIONS, min_size=1, max_size=30), place=st.integers(0, 29), other=OPERATIONS)
@settings(deadline=None, derandomize=True)
def test_first_difference_is_found(calls, place, other) -> None:
    place %= len(calls)
    changed = [*calls[:place], other, *calls[place + 1 :]]
    dumps = {0: dump(0, calls), 1: dump(1, changed)}
    num_compared = 3 if other[0] == "broadcast" else 4  # the source line of a collective with a root may differ
    same = calls[place][:num_compared] == other[:num_compared]
    text, diverged = diagnose("world", [0, 1], dumps)
    assert diverged == (not same)
    if diverged:
        assert f"at collective {place}:" in text
        assert str(dumps[0].records[place]) in text
        assert str(dumps[1].records[place]) in text


@given(calls=st.lists(OPERATIONS, max_size=40), keep=st.integers(1, 50), at=st.integers(0, 40))
@settings(deadline=None, derandomize=True)
def test_hash_of_a_prefix_is_that_of_the_shorter_log(calls, keep, at) -> None:
    long, short = GroupLog(keep=keep), GroupLog()
    at = min(at, len(calls))
    for call in calls:
        long.append(*call)
    for call in calls[:at]:
        short.append(*call)
    assert long.hash_at(at) in (None, short.hash_at(at))
    if len(calls) - at < min(keep, len(calls)):
        assert long.hash_at(at) is not None
    assert long.hash_at(len(calls) + 1) is None


def test_rooted_operations_are_compared_without_call_sites() -> None:
    one = CollectiveRecord(0, "broadcast", "float32", 3, "a.py:1 in f")
    assert one.signature == replace(one, site="b.py:9 in g").signature
    one = replace(one, operation="all_reduce")
    assert one.signature != replace(one, site="b.py:9 in g").signature


def test_stalled_and_silent_ranks_are_named() -> None:
    call = ("all_reduce", "float32", 4, "a.py:1 in f")
    text, diverged = diagnose("world", [0, 1], {0: dump(0, [call] * 3), 1: dump(1, [call] * 2)})
    assert not diverged
    assert "rank 1 has issued none for 1 s after collective 1" in text
    assert "is at x.py:5 in wait" in text
    assert "rank 0 waits in collective 2: all_reduce of 4 float32" in text
    text, diverged = diagnose("world", [0, 1], {0: dump(0, [call])})
    assert not diverged
    assert "rank 1 no longer answer(s)" in text


def test_dumps_survive_json() -> None:
    original = dump(3, [("all_reduce", "float32", 4, "a.py:1 in f")])
    assert RankDump.from_json(json.loads(json.dumps(asdict(original)))) == original


def test_only_sizes_that_all_ranks_share_are_compared() -> None:
    pair = [torch.empty(2), torch.empty(3)]
    assert describe_call("allreduce", ([torch.empty(4, dtype=torch.bfloat16)],)) == ("all_reduce", "bfloat16", 4)
    assert describe_call("allgather", ([pair], [torch.empty(2)])) == ("all_gather", "float32", 5)
    assert describe_call("_allgather_base", (torch.empty(8), torch.empty(4)))[2] == 4
    assert describe_call("alltoall_base", (torch.empty(8), torch.empty(4)))[2] == 0
    assert describe_call("barrier", ()) == ("barrier", "", 0)


def test_bad_settings() -> None:
    with raises(EngineConfigError, field="mode"):
        CollectiveGuard(mode="sometimes")
    with raises(EngineConfigError, field="stall_timeout_s"):
        CollectiveGuard(stall_timeout_s=0)


Played = tuple[list[dict[str, Any]], list[int], list[str]]
GLOO = (
    *(f"{scenario}:{mode}" for scenario in LEGITIMATE for mode in ("lockstep", "watch")),
    *("uneven_ranks:auto", "stalled_rank:lockstep", "dead_rank:lockstep", "hanging_pair:watch", "never_began:watch"),
)
NCCL = tuple(f"{scenario}:auto" for scenario in (*LEGITIMATE, *HANGING))


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Played]:
    """`play(scenario, mode, backend="gloo")`: reports, exit codes and stderr of two real ranks.

    One process plays all scenarios of a backend, some at a time, when the first is asked for.
    """

    @cache
    def played(backend: str) -> dict[str, Played]:
        out = tmp_path_factory.mktemp(backend)
        script = Path(__file__).with_name("ds_engine_guard_worker.py")
        codes = json.loads(run_script(script, out, backend, *(GLOO if backend == "gloo" else NCCL)).splitlines()[-1])
        worlds = {}
        for world, exit_codes in codes.items():
            texts = [
                [(out / f"{world.replace(':', '-')}-{rank}.{kind}").read_text() for rank in range(2)]
                for kind in ("out", "err")
            ]
            worlds[world] = [json.loads(text) for text in texts[0] if text], exit_codes, texts[1]
        return worlds

    return lambda scenario, mode, backend="gloo": played(backend)[f"{scenario}:{mode}"]


@pytest.mark.slow
def test_document_5_is_caught_on_both_ranks_before_anything_is_issued(play: Callable[..., Played]) -> None:
    """A scalar all-reduce on one rank, a gradient all-reduce on the other: without the guard gloo kills the process."""
    reports, codes, _ = play("uneven_ranks", "auto")
    assert codes == [0, 0]
    for report in reports:
        assert report["error"] == "CollectiveMismatchError"
        assert report["seconds"] < 10
        assert "collective 3:" in report["text"]
        assert "rank 0 called all_reduce of 1 float32" in report["text"]
        assert "rank 1 called all_reduce of 440467 float32" in report["text"]
        assert "in grad_norm_all_reduce during step 3" in report["text"]
        assert report["restored"]


@pytest.mark.slow
def test_stalled_rank_is_named_with_its_line(play: Callable[..., Played]) -> None:
    reports, codes, _ = play("stalled_rank", "lockstep")
    assert codes == [0, 0]
    for report in reports:
        assert report["error"] == "RankStalledError"
        assert "rank 1 has issued none" in report["text"]
        assert "in stalled_rank" in report["text"]
    assert reports[0]["seconds"] < 10


@pytest.mark.slow
def test_dead_rank_is_named(play: Callable[..., Played]) -> None:
    reports, _, _ = play("dead_rank", "lockstep")
    assert [report["rank"] for report in reports] == [0]
    assert reports[0]["error"] == "RankStalledError"
    assert "rank 1 no longer answer(s)" in reports[0]["text"]


@pytest.mark.slow
def test_watch_mode_ends_ranks_that_would_wait_indefinitely(play: Callable[..., Played]) -> None:
    """Without the guard this pair waits until the group's timeout, half an hour by default."""
    reports, codes, errors = play("hanging_pair", "watch")
    # The rank that ends second may see its peer's connection close before its own time is up.
    assert 71 in codes
    assert codes == [71, 71] or [r["error"] for r in reports] == ["RuntimeError"]
    for error in errors:
        assert "rank 0 called all_reduce of 1 float32" in error
        assert "rank 1 called broadcast of 440467 float32" in error


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", LEGITIMATE)
@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        ("lockstep", "gloo"),
        ("watch", "gloo"),
        pytest.param("auto", "nccl", marks=[pytest.mark.gpu, needs_two_gpus]),
    ],
)
def test_legitimate_programs_pass(play: Callable[..., Played], scenario: str, mode: str, backend: str) -> None:
    """A destroyed group is no failure, and a rank that leaves first does not end the others."""
    reports, codes, errors = play(scenario, mode, backend)
    assert codes == [0, 0], errors
    assert len(reports) == 2
    assert all(report["error"] is None and report["restored"] for report in reports), reports


@pytest.mark.slow
def test_a_rank_that_never_began_is_named(play: Callable[..., Played]) -> None:
    """Gloo's abort does not release a waiting rank, so in watch mode both processes end."""
    _, codes, errors = play("never_began", "watch")
    assert 71 in codes
    assert any("rank 1 has issued none" in error and "before its first" in error for error in errors), errors


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("scenario", HANGING)
def test_ranks_that_would_hang_over_nccl_are_named(play: Callable[..., Played], scenario: str) -> None:
    _, _, errors = play(scenario, "auto", "nccl")
    assert HANGING[scenario] in errors[0], errors
