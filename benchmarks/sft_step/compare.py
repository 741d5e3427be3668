"""Tokens per second of supervised fine-tuning: the SFT app on the first GPU, TRL's SFTTrainer on the second, at once.

`python -m benchmarks.sft_step.compare FOLDER [--case full|lora|mixture] [--peer trl|none] [key=value ...]` needs two
GPUs and TRL (no TRL with `--peer none`), and prints the table of README.md. On a host with one GPU, `--one-gpu` runs
the two one after the other, each alone. Further keys go to the app.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import trl_peer
from benchmarks.flops import PEAK_FLOPS, forward_flops
from benchmarks.runs import Steps, app, leave, parser, run_folder, table_header, visible_gpus
from benchmarks.sft_step.trl_step import LORA_ALPHA, LORA_RANK
from benchmarks.sft_step.workload import BATCH_SIZE, MAX_TOKENS, lengths, write_workload
from ds_engine import ModelShape

SKIPPED = 2
"""Steps at the start that compile or tune kernels."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what is trained of it."""

    model: str
    app: Sequence[str] = ()
    trl: Sequence[str] = ()


CASES = {
    "full": Case(model="qwen3-0.6b"),
    "lora": Case(
        model="qwen2-7b",
        app=(f"engine.lora.rank={LORA_RANK}", f"engine.lora.alpha={LORA_ALPHA}"),
        trl=("--lora", "--recompute"),
    ),
    "mixture": Case(model="qwen3-30b-a3b-4-layers"),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tokens, time and memory of a step."""

    tokens: float
    """Prompt and response tokens, without padding."""
    seconds: float
    peak_gb: float
    """Reserved device memory in 1e9 bytes."""


def settings(folder: Path, case: Case, steps: int) -> list[str]:
    """The settings of S; no key tunes anything."""
    return [
        f"model.path={folder}/model",
        f"supervised.files={folder}/train.parquet",
        f"data.max_prompt_length={MAX_TOKENS}",
        f"supervised.steps={steps}",
        f"supervised.batch_size={BATCH_SIZE}",
        *case.app,
    ]


def sharded(ranks: int) -> tuple[list[str], list[str]]:
    """Keys of the app and the launcher of TRL for ZeRO-3 on so many GPUs."""
    words = f"--use_deepspeed --zero_stage 3 --mixed_precision bf16 --num_machines 1 --num_processes {ranks}"
    launcher = ["-m", "accelerate.commands.launch", *words.split(), "--dynamo_backend", "no"]
    return ["engine.zero.stage=3", f"trainer.num_ranks={ranks}"], launcher


def app_steps(folder: Path) -> list[Step]:
    """The steps of the app's newest run; none if it wrote no metrics."""
    steps = Steps(run_folder(folder, "sft_step"))
    names = ("perf/total_num_tokens", "timing_s/step", "perf/max_memory_reserved_gb")
    rows = zip(*(steps.series(name) for name in names), strict=True)
    return [Step(tokens=tokens, seconds=seconds, peak_gb=peak_gb) for tokens, seconds, peak_gb in rows]


def trl_steps(log: str) -> list[Step]:
    """The steps in the output of trl_step.py."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith('{"step"')]
    return [Step(tokens=line["tokens"], seconds=line["seconds"], peak_gb=line["peak_gb"]) for line in lines]


def operations_per_token(folder: Path, steps: int) -> float:
    """Operations of training all weights, a token: three times those of the forward pass."""
    config = json.loads((folder / "model" / "config.json").read_text())
    shape, experts, pairs = (
        ModelShape.read(folder / "model"),
        config.get("num_experts_per_tok", 1),
        lengths(steps * BATCH_SIZE),
    )
    total = sum(forward_flops(shape, *pair, experts_per_token=experts) for pair in pairs)
    return 3 * total / sum(map(sum, pairs))


def summary(name: str, steps: Sequence[Step], operations: float) -> str:
    """A line of the table: medians after the first steps, seconds of all steps with compilation, the peak, MFU."""
    measured = steps[SKIPPED:]
    if not measured:
        return f"| {name} | — | — | — | — | — |"
    speed = statistics.median(step.tokens / step.seconds for step in measured)
    median = statistics.median(step.seconds for step in measured)
    total, peak = sum(step.seconds for step in steps), max(step.peak_gb for step in steps)
    return (
        f"| {name} | {speed:,.0f} | {median:.2f} | {total:.1f} | {peak:.1f} | {speed * operations / PEAK_FLOPS:.1%} |"
    )


def main() -> None:
    """Runs both and prints the table."""
    arguments = parser(__doc__, steps=12, timeout_s=560.0)
    arguments.add_argument("--case", choices=sorted(CASES), default="full")
    arguments.add_argument("--ranks", type=int, default=1, help="GPUs of each, one after the other; ZeRO-3 above 1")
    trl_peer.add_arguments(arguments)
    args, extra = arguments.parse_known_args()
    args.one_gpu |= args.ranks > 1
    folder, case = args.folder, CASES[args.case]
    write_workload(folder, model=args.model or case.model, num_steps=args.steps)
    keys, launcher = ([], []) if args.ranks == 1 else sharded(args.ranks)
    keys = [*settings(folder, case, args.steps), *keys, *extra]
    ours = app(folder, "sft_step", visible_gpus(args.ranks), keys, kind="sft")
    trl = None
    if args.peer == "trl":
        trl = trl_peer.peer("benchmarks.sft_step.trl_step", folder, args, *case.trl, launcher=launcher)
    codes = trl_peer.run_beside([ours], trl, args)
    operations = math.nan if args.case == "lora" else operations_per_token(folder, args.steps) / args.ranks
    print(table_header(["", "tokens/s (median)", "seconds a step (median)", "all steps, s", "peak GB", "MFU"]))
    print(summary("app", app_steps(folder), operations))
    if trl:
        print(summary("TRL", trl_steps(trl.text), operations))
    leave(codes)


if __name__ == "__main__":
    main()
