"""Workload W on TRL's AsyncGRPOTrainer: vLLM on the second GPU, the trainer on the first, staleness 1.

`python -m benchmarks.staleness.trl_async FOLDER --steps 6` prints the seconds of each rollout step of two updates; the
folder is `benchmarks.grpo_step.workload`'s. TRL fetches its attention kernel from the Hugging Face Hub with the package
`kernels`, so the first run on a host needs the network. `--dry-run` makes TRL's configuration and starts nothing (the
trainer itself needs CUDA).
"""

import argparse
import os
import sys
from typing import Any

from benchmarks import trl_peer
from benchmarks.grpo_step.workload import MINI_BATCH, NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, SAMPLES, parity
from benchmarks.runs import Run, free_port, visible_gpus

PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The prompts of W are texts; TRL's are conversations."""
UPDATES = NUM_PROMPTS // MINI_BATCH


def score(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """W's reward."""
    return [parity(messages[-1]["content"], None) for messages in completions]


def server(args: argparse.Namespace, port: int) -> Run:
    """The vLLM server that TRL's trainer asks for, on the second GPU."""
    command = ["env", "VLLM_SERVER_DEV_MODE=1", sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    command += [str(args.folder / "model"), "--host=127.0.0.1", f"--port={port}", "--dtype=bfloat16"]
    command += [f"--max-model-len={PROMPT_TOKENS + NEW_TOKENS + 8}", "--logprobs-mode=processed_logprobs"]
    command += ['--weight-transfer-config={"backend": "nccl"}']
    return Run("vllm", command, args.folder / "trl_async_server.log", visible_gpus(1, first=1))


def config(args: argparse.Namespace, port: int) -> Any:
    """As many samples, updates and pushes as W, and otherwise TRL's defaults without recomputation."""
    from trl.experimental.async_grpo import AsyncGRPOConfig

    sizes = trl_peer.settings(
        args.folder,
        max_steps=args.steps * UPDATES,
        per_forward=args.per_forward,
        batch_size=MINI_BATCH * SAMPLES,
        cpu=args.cpu,
    )
    return AsyncGRPOConfig(
        **sizes,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        dtype="bfloat16",
        gradient_checkpointing=False,
        token_budget=0,  # `per_forward` sequences each, so that an update has W's 128
        max_staleness=1,
        max_inflight_tasks=NUM_PROMPTS * SAMPLES,
        weight_sync_steps=UPDATES,
        vllm_server_base_url=f"http://127.0.0.1:{port}",
        vllm_server_timeout=400.0,
        logging_strategy="no",
    )


def train(args: argparse.Namespace, port: int) -> None:
    """Trains for `args.steps` rollouts of two updates each."""
    import datasets
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    texts = datasets.Dataset.from_parquet(str(args.folder / "train.parquet"))["question"]
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "model", padding_side="left")
    tokenizer.chat_template = PLAIN_CHAT
    trainer = AsyncGRPOTrainer(
        model=str(args.folder / "model"),
        reward_funcs=score,
        args=config(args, port),
        train_dataset=datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts]),
        processing_class=tokenizer,
        callbacks=[trl_peer.step_clock(on_gpu=not args.cpu, updates=UPDATES)],
    )
    trainer.train()


def main() -> None:
    """Trains beside a server, which ends with it."""
    parser = trl_peer.parser(__doc__, steps=6, cpu="with --dry-run")
    parser.add_argument("--per-forward", type=int, default=32, help="sequences per forward and backward pass")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    port = free_port()
    run = server(args, port)
    if args.dry_run:
        print(*run.command, f"\n{config(args, port)}")
        return
    run.start()
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(1)  # before torch looks for GPUs
        train(args, port)
    finally:
        run.end(0.0)


if __name__ == "__main__":
    main()
