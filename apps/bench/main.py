"""Benchmarks of whole runs: `plinth bench six_case|stage_gate [key=value ...]`.

`six_case` runs PPO under ZeRO-1, 2 and 3, without and with CPU offload; `stage_gate` runs ZeRO-1 and ZeRO-2 with the
same seeds and judges their differences. `overlay=tiny` runs either on two CPU cores, `overlay=smollm2`
with a pretrained model.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from apps.bench.config import BenchConfig, SixCaseConfig, StageGateConfig
from apps.bench.plan import Case, plan_gate, plan_six
from apps.tables import Row, cell_text, tsv_text
from run_kit import RunFolder, run_cli
from run_kit.cli import INVOKED_AS
from run_kit.config.redaction import yaml_without_secrets
from run_kit.tracking.metrics_table import atomic_write

BENCHMARKS: dict[str, tuple[type[Any], Callable[[Any], list[Case]]]] = {
    "six_case": (SixCaseConfig, plan_six),
    "stage_gate": (StageGateConfig, plan_gate),
}
SHOWN = ("status", "last_step", "avg_score_tail5", "avg_throughput_tail5", "avg_step_s_tail5", "wall_s")


def run(config: BenchConfig, *, plan: Callable[[Any], list[Case]], command: str) -> int:
    """Run the cases one after the other; return 0, or 1 if a case failed or a verdict is `fail`."""
    from apps.bench.report import write_report
    from apps.bench.results import compare_rows, overall_rows
    from apps.bench.runner import completed_row, earlier_folder, run_case

    cases = plan(config)
    folder = earlier_folder(config) or RunFolder.create(config.output_dir, config.run_tag).path
    (folder / "config.yaml").write_text(yaml_without_secrets(config))
    print(f"{folder}: {len(cases)} cases of {config.steps} steps", flush=True)
    summary: list[Row] = []
    overall: list[Row] = []
    for number, case in enumerate(cases, 1):
        print(f"{number} of {len(cases)}: {case.name}, output below {folder / 'attempts'}", flush=True)
        row = completed_row(case, folder) or run_case(case, folder, config)
        print(", ".join(f"{key}={cell_text(row[key], digits=4)}" for key in SHOWN if cell_text(row[key])), flush=True)
        summary.append(row)
        atomic_write(folder / "summary.tsv", tsv_text(summary))
        if isinstance(config, StageGateConfig):
            pairs = compare_rows(config, summary)
            overall = overall_rows(config, pairs)
            atomic_write(folder / "compare.tsv", tsv_text(pairs))
            atomic_write(folder / "overall.tsv", tsv_text(overall))
    write_report(config, summary, folder, command=command)
    print(folder / "report.md")
    for row in overall:
        print(f"step_each_micro={row['step_each_micro']}  {row['metric']:<22} {row['verdict']}")
    if failed := [row["case"] for row in summary if row["status"] == "failed"]:
        print(f"failed: {', '.join(failed)}; see their train.log, and `attempts/` for their output")
    return 1 if failed or any(row["verdict"] == "fail" for row in overall) else 0


def main(argv: Sequence[str] | None = None) -> None:
    """Run a benchmark from the command line; always raises SystemExit."""
    arguments = sys.argv[1:] if argv is None else argv
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help", "help"):
        print(f"{__doc__}\nKeys of each: plinth bench six_case --help")
        sys.exit(0)
    if name not in BENCHMARKS:
        print(f"error: benchmark {name!r}; allowed: {', '.join(BENCHMARKS)}; see plinth bench --help", file=sys.stderr)
        sys.exit(2)
    config_cls, plan = BENCHMARKS[name]
    app = f"{INVOKED_AS.get() or 'python -m apps.bench.main'} {name}"
    INVOKED_AS.set(app)  # help and errors name the benchmark too
    run_cli(
        config_cls,
        partial(run, plan=plan, command=" ".join([app, *arguments[1:]])),
        app_name=app,
        preset_dir=Path(__file__).parent / "presets",
        argv=arguments[1:],
        examples=("overlay=tiny steps=2", "overrides=[model.path=/models/Qwen3-0.6B]"),
    )


if __name__ == "__main__":
    main()
