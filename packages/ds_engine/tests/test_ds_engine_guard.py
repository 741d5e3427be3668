"""The collective guard: pure comparison, and real ranks that fall out of step."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine import EngineConfigError
from ds_engine.guard.collective_guard import CollectiveGuard
from ds_engine.guard.collective_log import GroupLog, RankDump, describe_call, diagnose
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
@pytest.mark.parametrize(
    ("world", "error", "words"),
    [
        (
            "uneven_ranks:auto",
            "CollectiveMismatchError",
            ("collective 3:", "rank 0 called all_reduce of 1 float32", "in grad_norm_all_reduce during step 3"),
        ),
        ("stalled_rank:lockstep", "RankStalledError", ("rank 1 has issued none", "in stalled_rank")),
        ("dead_rank:lockstep", "RankStalledError", ("rank 1 no longer answer(s)",)),
    ],
)
def test_what_goes_wrong_is_raised_on_every_rank_that_lives(
    play: Callable[..., Played], world: str, error: str, words: tuple[str, ...]
) -> None:
    """Document 5's case (a scalar all-reduce beside one of gradients) before anything is issued: gloo would end the
    process."""
    reports, codes, _ = play(*world.split(":"))
    assert codes == [0, 0]
    assert [report["rank"] for report in reports] == ([0] if "dead" in world else [0, 1])
    for report in reports:
        assert report["error"] == error
        assert all(word in report["text"] for word in words), report["text"]
        assert report["restored"]
    assert reports[0]["seconds"] < 10


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["hanging_pair", "never_began"])
def test_watch_mode_ends_ranks_that_would_wait_indefinitely(play: Callable[..., Played], scenario: str) -> None:
    """Without the guard they wait until the group's timeout; gloo's abort does not release them, so processes end."""
    reports, codes, errors = play(scenario, "watch")
    # The rank that ends second may see its peer's connection close before its own time is up.
    assert 71 in codes
    assert codes == [71, 71] or scenario == "never_began" or [r["error"] for r in reports] == ["RuntimeError"]
    assert any(HANGING[scenario] in error for error in errors), errors


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


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("scenario", HANGING)
def test_ranks_that_would_hang_over_nccl_are_named(play: Callable[..., Played], scenario: str) -> None:
    _, _, errors = play(scenario, "auto", "nccl")
    assert HANGING[scenario] in errors[0], errors
