"""Supervised fine-tuning: `plinth sft [preset=NAME] [section.key=value ...]`, `--help all` lists all keys.

Demonstrations are conversations, questions with answers, prompts with completions, or plain texts (docs/sft.md). A step
draws `supervised.batch_size` of them, packs them into micro batches without padding, and descends on the mean negative
log-likelihood of the tokens that the model is to write; the fused log-prob operator computes it without logits of the
whole vocabulary. Every `trainer.test_freq` steps the loss on held-out demonstrations is measured, and the model answers
some of their prompts. `trainer.resume=auto` continues a run from its newest checkpoint, bit for bit.

The trained model is written to `<run folder>/model` as a Hugging Face folder. Without a model and data the app runs the
preset `demo`: a tiny Qwen3 model learns to add.
"""

from functools import partial

import rl_runtime
from apps.sft.config import SftConfig


def check(config: SftConfig) -> "rl_runtime.JobPlan":
    """Refuses settings that cannot work before any process starts; plans the devices and the resume."""
    return rl_runtime.check_run(config)


def compose(run: "rl_runtime.SupervisedRun") -> "rl_runtime.Objective":
    """The objective: the response tokens of the demonstrations."""
    inputs = run.inputs
    held_out = rl_runtime.HeldOut(inputs.held_out, inputs.tokenizer, run.config.supervised) if inputs.held_out else None
    return rl_runtime.fine_tuning(held_out)


def main(config: SftConfig) -> None:
    """Trains on the demonstrations and writes the model, also when a signal stops it before the last step."""
    resolved = rl_runtime.resolve_supervised(config)
    rl_runtime.run_supervised(resolved, check(resolved.config), compose)


cli = partial(rl_runtime.run_job_cli, SftConfig, main)
"""Runs the app from its command line."""


if __name__ == "__main__":
    cli()
