"""GRPO written as a program of the tinker SDK: samples, scores, two updates a step.

`python -m benchmarks.serve.rl_loop w|sums MODEL TRAIN OUT --steps N [--val FILE]` writes a JSON row a step to OUT. The
settings are those of workload W, or of the preset `smollm2`; `TINKER_BASE_URL` is the server.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch

from benchmarks.grpo_step.workload import MINI_BATCH, NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, SAMPLES, parity
from rl_core import group_advantages
from rl_data import DataConfig, Prompt, PromptSampler, load_prompts, load_tokenizer, reward_for
from rl_data.config import RewardConfig


def flexible(text: str, prompt: Prompt) -> float:
    """The score of `reward.method=flexible`."""
    return reward_for(prompt.data_source, RewardConfig(method="flexible"))(text, prompt)


class Workload:
    """Sizes of a step, its learning rate and its reward."""

    def __init__(self, kind: str) -> None:
        w = kind == "w"
        self.samples, self.new_tokens = (SAMPLES, NEW_TOKENS) if w else (8, 64)
        self.max_prompt, self.lr = (PROMPT_TOKENS + 7, 1e-6) if w else (96, 1e-5)
        self.reward: Callable[[str, Any], float] = parity if w else flexible


def datum(prompt: Sequence[int], sample: Any, advantage: float) -> tinker.Datum:
    """A sampled sequence; `advantage` is that of every token of its response, and the prompt has zeros."""
    tokens, pad = [*prompt, *sample.tokens], np.zeros(len(prompt) - 1, np.float32)
    inputs = {
        "target_tokens": np.array(tokens[1:], np.int64),
        "logprobs": np.concatenate([pad, np.array(sample.logprobs, np.float32)]),
        "advantages": np.concatenate([pad, np.full(len(sample.tokens), advantage, np.float32)]),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    """Trains, and evaluates before and after if there is a file for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("w", "sums"))
    for name in ("model", "train"):
        parser.add_argument(name)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--val")
    args = parser.parse_args()
    work, tokenizer = Workload(args.kind), load_tokenizer(args.model)
    data = DataConfig(max_prompt_length=work.max_prompt)
    prompts = load_prompts([args.train], tokenizer, data)
    order = PromptSampler(len(prompts), seed=1, shuffle=True)
    client = tinker.ServiceClient()
    [model] = tinker.RestClient().get_server_capabilities().result().supported_models
    training = client.create_lora_training_client(model.model_name, rank=8).result()
    adam = tinker.AdamParams(learning_rate=work.lr, beta1=0.9, beta2=0.999, eps=1e-8, grad_clip_norm=1.0)
    rows: list[dict[str, float]] = []

    def sample(asked: Sequence[Prompt], number: int, temperature: float) -> list[Any]:
        sampler = training.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=work.new_tokens, temperature=temperature)
        futures = [sampler.sample(tinker.ModelInput.from_ints(list(p.token_ids)), number, params) for p in asked]
        return [future.result().sequences for future in futures]

    def score(prompt: Prompt, sequence: Any) -> float:
        return work.reward(tokenizer.decode(sequence.tokens, skip_special_tokens=True), prompt)

    def evaluate() -> None:
        if args.val:
            asked = load_prompts([args.val], tokenizer, data)[:256]
            answers = sample(asked, 1, 0.0)
            add({"val": float(np.mean([score(p, a[0]) for p, a in zip(asked, answers, strict=True)]))})

    def add(row: dict[str, float]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        args.out.write_text(json.dumps(rows))

    evaluate()
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        asked = [prompts[index] for index in order.next(NUM_PROMPTS)]
        answers = sample(asked, work.samples, 1.0)
        sampled = time.perf_counter()
        scores = np.array([[score(p, a) for a in group] for p, group in zip(asked, answers, strict=True)], np.float32)
        groups = np.arange(NUM_PROMPTS).repeat(work.samples)
        advantages = group_advantages(torch.from_numpy(scores.ravel()), torch.from_numpy(groups)).view(scores.shape)
        learning, pending = time.perf_counter(), []
        for first in range(0, NUM_PROMPTS, MINI_BATCH):
            chosen = range(first, first + MINI_BATCH)
            tokens = sum(
                len(answer.tokens) for index in chosen for answer in answers[index]
            )  # the SDK sums over tokens
            batch = [
                datum(asked[index].token_ids, answer, float(advantages[index][number]) / tokens)
                for index in chosen
                for number, answer in enumerate(answers[index])
                if answer.tokens
            ]
            pending += [training.forward_backward(batch, "ppo"), training.optim_step(adam)]
        for future in pending:
            future.result()
        end = time.perf_counter()
        seconds = {"sample": sampled - began, "update": end - learning, "total": end - began}
        add({"step": step, "score": float(scores.mean())} | seconds)
    evaluate()
    client.close("success").result()


if __name__ == "__main__":
    main()
