"""Learning from scratch at several stalenesses: a 38M-parameter Qwen3, warm start and GRPO on generated sums.

`python -m benchmarks.staleness.from_scratch FOLDER` runs the cases one after the other (`--at-once`: together on the
first GPU, for their curves and not for their speed) and prints the held-out accuracy before and after and over the
seconds of each run. `--hidden 128 --layers 2` tries it on a CPU; `section.key=value` arguments go to every run.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.runs import Run, Steps, app, leave, parser, run_folder, table_header, table_row, visible_gpus
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
    keys = [
        "preset=demo",
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
        *extra,
    ]
    run = app(folder, f"staleness_{staleness}", visible_gpus(1), keys)
    run.start()
    return run


def main() -> None:
    """Runs the cases and prints their curves."""
    arguments = parser(__doc__, steps=60, timeout_s=240.0)
    arguments.add_argument("--staleness", type=int, action="append", help="may be repeated; default: 0 and 1")
    arguments.add_argument("--hidden", type=int, default=512)
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--at-once", action="store_true")
    args, extra = arguments.parse_known_args()
    write(args.folder, hidden=args.hidden, layers=args.layers, seed=args.seed)
    extra = [f"trainer.seed={args.seed}", *(BFLOAT16 if args.hidden > 256 else ()), *extra]
    cases = args.staleness or [0, 1]
    runs = [start(args.folder, staleness, args.steps, extra) for staleness in cases] if args.at_once else []
    codes = []
    for staleness in cases:
        run = runs.pop(0) if runs else start(args.folder, staleness, args.steps, extra)
        codes.append(run.end(args.timeout))
        print(run.report(codes[-1]))
        print("\n".join(run.matches(r".*(?:held-out|validation).*")))
        names = ("step", "val/accuracy", "timing_s/step")
        table = Steps(run_folder(args.folder, run.name)).table
        print(table_header(names))
        for row in ({"step": step, **table.row(step)} for step in table.steps) if table else ():
            if "val/accuracy" in row:
                print(table_row([row.get(name, "-") for name in names]), flush=True)
    leave(codes)


if __name__ == "__main__":
    main()
