"""Steps of on-policy distillation, a 4B teacher and a 0.6B student: the distillation app beside TRL's trainer.

`python -m benchmarks.distill_step.compare FOLDER` runs the app on the first GPU and TRL's DistillationTrainer on the
second, at once; with `--one-gpu` one after the other, each alone on the first. `--case full --case sampled` are runs of
the app; TRL does what `full` does. Prints the table of README.md. Further `section.key=value` arguments go to the app.
"""

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import trl_peer
from benchmarks.distill_step.trl_step import BATCH_SIZE
from benchmarks.grpo_step.workload import NEW_TOKENS, PROMPT_TOKENS, write_prompts
from benchmarks.random_model import CONFIGS, ensure_random_model
from benchmarks.runs import Steps, app, leave, parser, run_folder, table_header, table_row, visible_gpus

CASES = {
    "full": ("teacher.on=ranks", "teacher.signal=full", "teacher.divergence=reverse"),
    "sampled": ("teacher.on=ranks", "teacher.signal=sampled"),
}
"""Name -> what the student learns from: the KL over the vocabulary, or the log-probs of its own tokens."""
PHASES = ("step", "gen", "old_log_prob", "teacher", "update_actor", "sync")


def settings(folder: Path, case: str, steps: int) -> list[str]:
    """Models, data, batch and lengths; no key tunes anything."""
    return [
        f"model.path={folder}/student",
        f"teacher.model={folder}/teacher",
        *CASES[case],
        f"data.train={folder}/train.parquet",
        f"data.max_prompt_length={PROMPT_TOKENS + 7}",
        "reward.function=benchmarks.grpo_step.workload:parity",
        f"batch.train_batch_size={BATCH_SIZE}",
        f"batch.mini_batch_size={BATCH_SIZE}",
        "sampling.n=1",
        f"sampling.max_tokens={NEW_TOKENS}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.val_after_train=false",
    ]


def row(name: str, steps: Sequence[float], peak_gb: float, phases: Sequence[float] = ()) -> str:
    """A line of the table: the first step, the median after it, the peak of torch, and the phases."""
    cells = [steps[0], statistics.median(steps[1:])] if len(steps) > 1 else [math.nan, math.nan]
    return table_row([name, *cells, f"{peak_gb:.1f}", *(phases or [math.nan] * (len(PHASES) - 1))])


def app_row(folder: Path, case: str) -> str:
    """A run of the app."""
    steps = Steps(run_folder(folder, case))
    phases = [steps.median(f"timing_s/{phase}") for phase in PHASES[1:]]
    peak = max(steps.series("perf/max_memory_reserved_gb"), default=0.0)
    return row(f"app, {case}", steps.series("timing_s/step"), peak, phases)


def trl_row(log: str) -> str:
    """The run of TRL, from its log."""
    measured = re.findall(r"^trl step \d+: ([\d.]+) s, ([\d.]+) GB", log, re.MULTILINE)
    return row(
        "TRL, full", [float(seconds) for seconds, _ in measured], max((float(gb) for _, gb in measured), default=0.0)
    )


def main() -> None:
    """Runs everything and prints the table."""
    arguments = parser(__doc__, model="qwen3-0.6b", steps=4, timeout_s=300.0)
    arguments.add_argument("--teacher", choices=sorted(CONFIGS), default="qwen3-4b", help="`--model` is the student")
    arguments.add_argument("--case", action="append", choices=sorted(CASES), help="may be repeated; default: full")
    trl_peer.add_arguments(arguments)
    args, extra = arguments.parse_known_args()
    cases, folder = args.case or ["full"], args.folder
    folder.mkdir(parents=True, exist_ok=True)
    for role, model in (("student", args.model), ("teacher", args.teacher)):
        ensure_random_model(model, folder / role)
    write_prompts(folder, BATCH_SIZE * args.steps)
    apps = [
        app(folder, case, visible_gpus(1), [*settings(folder, case, args.steps), *extra], kind="distill")
        for case in cases
    ]
    trl = trl_peer.peer("benchmarks.distill_step.trl_step", folder, args) if args.peer == "trl" else None
    codes = trl_peer.run_beside(apps, trl, args)
    print(table_header(["", "first step", "median after it", "peak GB", *PHASES[1:]]))
    print("\n".join(app_row(folder, case) for case in cases))
    if trl:
        print(trl_row(trl.text))
    leave(codes)


if __name__ == "__main__":
    main()
