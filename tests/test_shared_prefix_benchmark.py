"""benchmarks/shared_prefix: jobs fail alone, and tables have a row for each."""

import sys
from typing import Any

from benchmarks.shared_prefix.parts import PARTS, split
from benchmarks.shared_prefix.run import records_of, tables


def test_a_job_that_ends_its_process_is_recorded_and_the_others_go_on() -> None:
    program = """
import json, sys
for job in sys.argv[sys.argv.index("--jobs") + 1 :]:
    if job == "b":
        sys.exit(7)
    print("noise")
    print(json.dumps({"job": job, "pass": "x"}), flush=True)
    print(json.dumps({"job": job, "job_seconds": 1}), flush=True)
"""
    records = list(records_of([sys.executable, "-c", program], "m", ["a", "b", "c"]))
    assert [record["job"] for record in records] == ["a", "a", "b", "c", "c"]
    assert records[2]["failed_with_exit_code"] == 7
    assert "m, b: exit code 7" in tables(records)


def test_a_kind_that_runs_out_of_memory_has_a_row_without_a_ratio() -> None:
    sizes = {"prompt": 9, "response": 2, "samples": 8, "sample_tokens": 88}
    unshared = {"computed_tokens": 88, "out_of_memory": True}
    shared = {"computed_tokens": 25, "seconds": 0.5, "rounds": 2, "peak_gib": 3.0}
    record = {"model": "m", "job": "W", "pass": "update", **sizes, "unshared": unshared, "shared": shared}
    assert "| 88 | 25 | 3.52 | out of memory | 0.500 (2) | - | - / 3.0 | - | - |" in tables([record])


def test_kernels_are_counted_by_the_operator_that_launched_them_and_gaps_as_idle() -> None:
    def operator(name: str, start: float, stop: float) -> dict[str, Any]:
        return {"cat": "cpu_op", "name": name, "ts": start, "dur": stop - start, "tid": 1}

    def kernel(name: str, launched: float, start: float, dur: float) -> list[dict[str, Any]]:
        ids = {"args": {"correlation": int(launched)}}
        launch = {"cat": "cuda_driver", "name": "cuLaunchKernel", "ts": launched, "dur": 1, "tid": 1}
        return [launch | ids, {"cat": "kernel", "name": name, "ts": start, "dur": dur} | ids]

    events = [
        operator("ds_engine::flash4", 0, 10),
        *kernel("kernel_flash_attn_fwd", 1, 1000, 1000),
        *kernel("_merge_kernel", 2, 2000, 500),
        operator("_LinearLogProb", 20, 30),
        *kernel("nvjet_product", 25, 2500, 2000),
        *kernel("nvjet_product", 35, 6500, 1000),  # after a gap of 2 ms
    ]
    parts, kernels = split(events)
    expected = {"attention": 1, "paths": 0.5, "head": 2, "products": 1, "idle": 2, "wall": 6.5}
    assert parts == dict.fromkeys(PARTS, 0.0) | expected
    assert kernels["head", "nvjet_product"] == 2
