"""Learning from scratch at several stalenesses: a 38M-parameter Qwen3, warm start and GRPO on generated sums.

`python -m benchmarks.staleness.from_scratch FOLDER` runs the cases one after the other (`--at-once`: together on the
first GPU, for their curves and not for their speed) and prints the held-out accuracy before and after and over the
seconds of each run. `--hidden 128 --layers 2` tries it on a CPU; `section.key=value` arguments go to every run.
"""

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.grpo_step.compare import Run
from rl_data import build_tiny_model, write_task

NUM_TRAIN, NUM_VAL, NUM_DEMONSTRATIONS = 4096, 512, 38_400
BFLOAT16 = ("actor.dtype=bfloat16", "rollout.dtype=bfloat16")


def write(folder: Path, *, hidden: int, layers: int, seed: int) -> None:
    """Model and task."""
    build_tiny_model(
        folder / "model",
        seed=seed,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=max(hidden // 64, 2),
        num_kv_heads=max(hidden // 128, 1),
        initializer_range=0.02 if hidden > 256 else 0.06,
    )
    write_task(folder / "task", num_train=NUM_TRAIN, num_val=NUM_VAL, num_demonstrations=NUM_DEMONSTRATIONS, seed=seed)


def start(folder: Path, staleness: int, steps: int, extra: Sequence[str]) -> Run:
    """The demo's preset with this model; weights learn at rates for its width."""
    name = f"staleness_{staleness}"
    command = [
        *(sys.executable, "-m", "apps.grpo.main", "preset=demo"),
        f"model.path={folder}/model",
        f"data.train={folder}/task/train.parquet",
        f"data.val={folder}/task/val.parquet",
        f"warm_start.files={folder}/task/demonstrations.parquet",
        "warm_start.optim.lr=5e-4",
        "warm_start.batch_size=128",
        "actor.optim.lr=2e-5",
        "batch.train_batch_size=32",
        "batch.mini_batch_size=32",
        f"trainer.max_staleness={staleness}",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=10",
        f"trainer.experiment={name}",
        f"trainer.output_dir={folder}/outputs",
        "trainer.export_model=false",
        *extra,
    ]
    run = Run(name, command, folder / f"{name}.log", "0")
    run.start()
    return run


def curve(folder: Path, name: str) -> list[Mapping[str, str]]:
    """The rows of metrics.tsv with a validation."""
    newest = max(folder.glob(f"outputs/{name}_*/metrics.tsv"), default=None)
    rows = [] if newest is None else csv.DictReader(newest.open(), delimiter="\t")
    return [row for row in rows if row.get("val/accuracy")]


def main() -> None:
    """Runs the cases and prints their curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--staleness", type=int, action="append", help="may be repeated; default: 0 and 1")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds of one run")
    args, extra = parser.parse_known_args()
    folder = args.folder.absolute()
    write(folder, hidden=args.hidden, layers=args.layers, seed=args.seed)
    extra = [f"trainer.seed={args.seed}", *(BFLOAT16 if args.hidden > 256 else ()), *extra]
    cases = args.staleness or [0, 1]
    runs = [start(folder, staleness, args.steps, extra) for staleness in cases] if args.at_once else []
    for staleness in cases:
        run = runs.pop(0) if runs else start(folder, staleness, args.steps, extra)
        code = run.end(args.timeout)
        text = run.log.read_text(errors="replace")
        print(f"\n## staleness {staleness}: exit code {code}")
        print("\n".join(line for line in text.splitlines() if "held-out" in line or "validation" in line))
        if code:
            print("\n".join(text.splitlines()[-15:]))
        for row in curve(folder, run.name):
            print({name: row[name] for name in ("step", "val/accuracy", "timing_s/step") if name in row})


if __name__ == "__main__":
    main()
