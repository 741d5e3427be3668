"""benchmarks/shared_prefix: jobs fail alone, and tables have a row for each."""

import sys

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
