"""The test support itself: tables cover all pairs, ranks meet, fail and end as documented."""

from __future__ import annotations

import importlib.util
import signal
import sys
from itertools import combinations, product
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing import (
    RankPool,
    RankServer,
    covering_table,
    launch_ranks,
    peak_memory,
    run_script,
    run_under_the_interpreter,
    start_process,
    stop_process,
    wait_until,
)

MEET = """
import os
import torch, torch.distributed as dist
from plinth_testing import record_calls
dist.init_process_group("gloo")
total = torch.tensor(float(os.environ["RANK"]) + 1)
with record_calls() as calls:
    dist.all_reduce(total)
    dist.barrier()
print(total.item(), calls)
dist.destroy_process_group()  # gloo's threads must end before the interpreter does
"""
FORKED = """
import os, sys
from plinth_testing import run_ranks
def job(rank):
    os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']}\\n".encode())  # whole, beside the other rank
    if len(sys.argv) > 1 and rank == 1:
        raise ValueError("bad rank")
run_ranks(job)
"""
SERVED = """
import os, sys, time
from plinth_testing import serve_ranks
def double(x): return 2 * x, os.environ["RANK"]
def refuse(): raise KeyError("passed on")
def crash(): raise ValueError("not passed on")
def hang(): time.sleep(60)
def end(): print("last words", flush=True); os._exit(3)
if __name__ == "__main__":
    serve_ranks([sys.modules["__main__"]], join=lambda *_: None, leave=lambda: None, passed_on=(KeyError,))
"""


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
@settings(deadline=None, max_examples=30)
def test_a_covering_table_holds_every_pair(sizes: list[int]) -> None:
    values = {f"p{i}": list(range(size)) for i, size in enumerate(sizes)}

    def allowed(row: dict[str, int]) -> bool:
        return not row["p0"] == row["p1"] == 1

    def pairs(rows: list[dict[str, int]]) -> set[object]:
        return {pair for row in rows for pair in combinations(row.items(), 2)}

    table = covering_table(values, allowed=allowed)
    assert all(allowed(row) for row in table)
    whole = [
        row for row in (dict(zip(values, each, strict=True)) for each in product(*values.values())) if allowed(row)
    ]
    assert pairs(table[:-1]) < pairs(table) == pairs(whole), "the last row is needed"


def test_a_process_group_ends_as_a_whole(tmp_path: Path) -> None:
    sleep = "import time; time.sleep(60)"
    code = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {sleep!r}]).pid, flush=True); {sleep}"
    )
    process = start_process([sys.executable, "-c", code], tmp_path / "log")
    wait_until(lambda: (tmp_path / "log").read_text().strip(), 30)
    text = (tmp_path / "log").read_text()
    stop_process(process)
    assert process.returncode == -signal.SIGTERM
    wait_until(lambda: not is_alive(int(text)), 10)


def test_forked_ranks_and_a_failing_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FORKED)
    text = run_script(tmp_path / "script.py", timeout_s=60)
    assert sorted(text.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    with pytest.raises(AssertionError, match=r"(?s)script\.py: 1.*bad rank.*ranks \[1\] of 2 failed"):
        run_script(tmp_path / "script.py", "fail", timeout_s=60)
    (tmp_path / "slow.py").write_text("import time; print('began', flush=True); time.sleep(60)")
    with pytest.raises(AssertionError, match=r"(?s)stopped after 2 s.*began"):
        run_script(tmp_path / "slow.py", timeout_s=2)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_scripts_under_the_interpreter_share_imports_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "only_there.py").write_text("import sys; sys.left = 'behind'")
    assert run_under_the_interpreter("import only_there, sys; print(sys.left)", str(tmp_path)) == "behind\n"
    for script, error in (("import sys; print(sys.left)", "AttributeError"), ("import only_there", "only_there")):
        with pytest.raises(AssertionError, match=error):
            run_under_the_interpreter(script)


@pytest.mark.slow
def test_launched_ranks_meet(tmp_path: Path) -> None:
    (tmp_path / "meet.py").write_text(MEET)
    for rank in launch_ranks(tmp_path / "meet.py", num_ranks=2):
        assert rank.output.strip().endswith("3.0 ['all_reduce', 'barrier']")
    (tmp_path / "fails.py").write_text("import os; raise SystemExit(int(os.environ['RANK']))")
    assert [rank.code for rank in launch_ranks(tmp_path / "fails.py", check=False)] == [0, 1]
    with pytest.raises(AssertionError, match=r"exit codes \[0, 1\]"):
        launch_ranks(tmp_path / "fails.py")


@pytest.mark.slow
def test_a_pool_runs_functions_passes_errors_on_and_names_the_rank_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED)
    (tmp_path / "other").mkdir()
    with RankServer(tmp_path / "served.py", tmp_path) as server:
        with RankPool(server, 2, tmp_path) as pool, RankPool(server, 1, tmp_path / "other") as other:
            assert pool.run("double", [{"x": 1}, {"x": 2}]) == [(2, "0"), (4, "1")]
            assert other.run("double", x=3) == [(6, "0")]
            assert [str(error) for error in pool.run("refuse")] == ["'passed on'"] * 2
            with pytest.raises(RuntimeError, match=r"(?s)rank 0 failed.*not passed on"):
                pool.run("crash")
            with pytest.raises(RuntimeError, match=r"(?s)rank 0 ended.*last words"):
                other.run("end")
            pool.timeout_s = 1.0
            with pytest.raises(TimeoutError, match=r"(?s)rank 0 did not answer.*in hang"):
                pool.run("hang")
        wait_until(lambda: not any(map(is_alive, [*pool.pids, *other.pids])), 10)
        with RankPool(server, 1, tmp_path / "other") as another:
            assert another.run("double", x=4) == [(8, "0")]
    wait_until(lambda: not any(map(is_alive, another.pids)), 10)


def test_a_rank_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(RuntimeError, match=r"(?s)rank server ended.*nothing_of_this_name"):
        RankServer(tmp_path / "broken.py", tmp_path)


def test_peak_memory_sees_what_is_freed_again() -> None:
    size = 96 << 20

    def allocate() -> int:
        bytearray(b"x") * size
        return 7

    result, peak = peak_memory(allocate)
    assert result == 7
    assert 0.95 * size < peak < 1.3 * size
    assert peak_memory(lambda: None)[1] < size // 4
