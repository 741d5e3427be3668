"""Workload W on TRL's AsyncGRPOTrainer: vLLM on the second GPU, the trainer on the first, staleness 1.

`python -m benchmarks.staleness.trl_async FOLDER --steps 6` prints the seconds of each rollout step of two updates; the
folder is `benchmarks.grpo_step.workload`'s. TRL loads FlashAttention-3 from the Hugging Face Hub with the package
`kernels`. Here `kernels` gives it FlashAttention-4 instead, which our trainer uses too (`flash4_for_trl`): the same
attention, fast on the same GPUs, without network. The run begins with a comparison of TRL's attention on that kernel
with SDPA: output and gradients. `--hub-kernel` leaves TRL its own kernel. `--dry-run` makes TRL's configuration, looks
the kernel up and starts nothing (the trainer itself needs CUDA).
"""

import argparse
import contextlib
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import trl_peer
from benchmarks.grpo_step.workload import MINI_BATCH, NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, SAMPLES, parity
from benchmarks.runs import Run, free_port, visible_gpus
from benchmarks.staleness import flash4_for_trl

PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The prompts of W are texts; TRL's are conversations."""
PLAIN_RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\Z",
    "fields": {"content": {"content": "text"}},
}
"""The whole response is text. TRL's rollouts refuse a chat template that they do not know without one."""
UPDATES = NUM_PROMPTS // MINI_BATCH


def score(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """W's reward."""
    return [parity(messages[-1]["content"], None) for messages in completions]


def server(args: argparse.Namespace, port: int) -> Run:
    """The vLLM server that TRL's trainer asks for, on the second GPU: stock vLLM with the sampler of our servers."""
    command = ["env", "VLLM_SERVER_DEV_MODE=1", "VLLM_PLUGINS=", "VLLM_USE_FLASHINFER_SAMPLER=0"]
    command += [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={args.folder / 'model'}"]
    command += ["--host=127.0.0.1", f"--port={port}", "--dtype=bfloat16"]
    command += [f"--max-model-len={PROMPT_TOKENS + NEW_TOKENS + 8}", "--logprobs-mode=processed_logprobs"]
    command += ['--weight-transfer-config={"backend": "nccl"}']
    return Run("vllm", command, args.folder / "trl_async_server.log", visible_gpus(1, first=1))


def wait_until_ready(run: Run, port: int) -> None:
    """Waits until the server answers. TRL would wait for one that has ended, too."""
    while run.process and run.process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM's server ended:\n{run.text[-4000:]}")


def use_flash4(folder: Path) -> None:
    """Gives TRL FlashAttention-4 and compares it with SDPA at the sizes of the model's heads."""
    from transformers import AutoConfig

    flash4_for_trl.install(folder / "flash4_for_trl")
    shape = AutoConfig.from_pretrained(folder / "model")
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    measured = ", ".join(f"{name} {value:.4f}" for name, value in flash4_for_trl.differences(*heads).items())
    print(f"FlashAttention-4 under TRL's attention, relative difference from SDPA in float32: {measured}", flush=True)


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
        queue_maxsize=NUM_PROMPTS * SAMPLES,  # more would be too stale when their turn comes
        weight_sync_steps=UPDATES,
        vllm_server_base_url=f"http://127.0.0.1:{port}",
        logging_steps=UPDATES,  # TRL's own seconds of waiting, updates and pushes, and the samples it drops as stale
    )


def conversation_tokenizer(folder: Path) -> Any:
    """The model's tokenizer, for conversations that are plain texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    tokenizer.chat_template, tokenizer.response_template = PLAIN_CHAT, PLAIN_RESPONSE
    return tokenizer


def train(args: argparse.Namespace, run: Run, port: int) -> None:
    """Trains for `args.steps` rollouts of two updates each, when the server `run` is ready."""
    import datasets
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    texts = datasets.Dataset.from_parquet(str(args.folder / "train.parquet"))["question"]
    trainer = AsyncGRPOTrainer(
        model=str(args.folder / "model"),
        reward_funcs=score,
        args=config(args, port),
        train_dataset=datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts]),
        processing_class=conversation_tokenizer(args.folder),
        callbacks=[trl_peer.step_clock(on_gpu=not args.cpu, updates=UPDATES)],
    )
    wait_until_ready(run, port)
    trainer.train()


def main() -> None:
    """Trains beside a server, which ends with it."""
    parser = trl_peer.parser(__doc__, steps=6, cpu="with --dry-run")
    parser.add_argument("--per-forward", type=int, default=32, help="sequences per forward and backward pass")
    parser.add_argument("--hub-kernel", action="store_true", help="TRL's own FlashAttention-3, by network")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    os.environ["VLLM_HOST_IP"] = "127.0.0.1"  # the address of both sides of the weight transfer
    port = free_port()
    run = server(args, port)
    if args.dry_run:
        print(*run.command, f"\n{config(args, port)}")
        if not args.hub_kernel:
            flash4_for_trl.install(args.folder / "flash4_for_trl")
        return
    run.start()
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(1)  # before torch looks for GPUs
        if not args.hub_kernel:
            use_flash4(args.folder)
        train(args, run, port)
    finally:
        run.end(0.0)


if __name__ == "__main__":
    main()
