"""Benchmarks of whole runs: `plinth bench six_case|stage_gate|algorithms [key=value ...]`.

`six_case` runs PPO under ZeRO-1, 2 and 3, without and with CPU offload; `stage_gate` runs ZeRO-1 and ZeRO-2 with the
same seeds and judges their differences. `overlay=tiny` runs either on two CPU cores. `algorithms` runs every algorithm
preset on the built-in tasks with several seeds, on two CPU cores, and judges what each gains in held-out accuracy.
"""

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from apps.bench.config import AlgorithmsConfig, BenchConfig, SixCaseConfig, StageGateConfig
from apps.bench.plan import Case, plan_algorithms, plan_gate, plan_six
from run_kit import RunFolder, run_cli
from run_kit.cli import INVOKED_AS
from run_kit.config.redaction import yaml_without_secrets

BENCHMARKS: dict[str, tuple[type[Any], Callable[[Any], list[Case]]]] = {
    "six_case": (SixCaseConfig, plan_six),
    "stage_gate": (StageGateConfig, plan_gate),
    "algorithms": (AlgorithmsConfig, plan_algorithms),
}


def run(config: BenchConfig, *, plan: Callable[[Any], list[Case]], command: str) -> int:
    """Run the cases one after the other; return 0, or 1 if a case failed or a verdict is `fail`."""
    from apps.bench.live import LiveTable
    from apps.bench.report import write_report, write_tables
    from apps.bench.results import algorithm_rows, overall_rows
    from apps.bench.runner import finished, run_case
    from rl_runtime.app.resume import earlier_folder

    cases = plan(config)
    folder = earlier_folder(config, config.run_tag, what="a benchmark")
    folder = folder or RunFolder.create(config.output_dir, config.run_tag).path
    (folder / "config.yaml").write_text(yaml_without_secrets(config))
    print(f"{folder}: {len(cases)} cases of {config.steps} steps", flush=True)
    table = LiveTable(cases)
    for case in cases:
        reached = finished(case, folder) or run_case(
            case,
            folder,
            retries=config.retries,
            timeout_s=config.case_timeout_s,
            on_progress=partial(table.update, case.name),
        )
        table.update(case.name, reached)
        write_tables(config, cases, table.reached, folder)
    table.close()
    write_report(config, cases, table.reached, folder, command=command)
    print(folder / "report.md")
    verdicts = []
    if isinstance(config, StageGateConfig):
        for row in overall_rows(config, table.reached):
            print(f"step_each_micro={row['step_each_micro']}  {row['metric']:<22} {row['verdict']}")
            verdicts.append(row["verdict"])
    if isinstance(config, AlgorithmsConfig):
        for row in algorithm_rows(config, table.reached):
            print(f"{row['preset']:<22} gain {row['gain_mean']:+.3f}, least {row['gain_min']:+.3f}  {row['verdict']}")
            verdicts.append(row["verdict"])
    failed = [name for name, reached in table.reached.items() if reached.status != "completed"]
    if failed:
        print(f"failed: {', '.join(failed)}; see their train.log, and `attempts/` for their output")
    return 1 if failed or "fail" in verdicts else 0


def main(argv: Sequence[str] | None = None) -> None:
    """Run a benchmark from the command line; always raises SystemExit."""
    arguments = sys.argv[1:] if argv is None else argv
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help", "help"):
        print(f"{__doc__}\nKeys of each: plinth bench six_case --help")
        sys.exit(0)
    if name not in BENCHMARKS:
        near = get_close_matches(name, BENCHMARKS, n=1)
        hint = f"nearest: {near[0]}; " if near else ""
        what = f"unknown benchmark {name!r}" if name else "no benchmark is named"
        print(f"error: {what}; {hint}allowed: {', '.join(BENCHMARKS)}; see plinth bench --help", file=sys.stderr)
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
