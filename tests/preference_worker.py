"""Two ranks: steps on preferences and scores of a reward model, against transformers and plain torch.

Run by test_preferences.py with the folder of a model, an empty folder and names of cases.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import apps.dpo.main as dpo
import apps.reward.main as reward
import rl_core
import rl_runtime
from apps.dpo.config import AlgorithmConfig, DpoConfig
from apps.reward.config import AlgorithmConfig as RewardAlgorithm
from apps.reward.config import RewardConfig
from ds_engine import EngineConfig, LoraConfig, OptimConfig, ZeroConfig
from plinth_testing import SpmdGroup, run_ranks
from rl_core import BatchConfig
from rl_data import Demonstration, LabeledResponse, PreferencePair
from rl_runtime.ranks.model_handle import ModelHandle
from rl_runtime.ranks.trainer_worker import TrainerWorker

OPTIM = OptimConfig(lr=3e-3, eps=1e-4, weight_decay=0.0, grad_clip=1.0)
NUM_STEPS = 3
# ZeRO stage, sequence parallelism, LoRA, loss
CASES: dict[str, tuple[int, int, LoraConfig | None, str]] = {
    "reward, stage 2": (2, 1, None, "reward"),
    "reward, stage 3": (3, 1, None, "reward"),
    "dpo, stage 2": (2, 1, None, "dpo"),
    "ipo, stage 3": (3, 1, None, "ipo"),
    "kto, stage 1, sequence parallelism": (1, 2, None, "kto"),
    "dpo, stage 2, LoRA": (2, 1, LoraConfig(rank=4, alpha=8), "dpo"),
}


def make_pairs(vocab: int) -> list[PreferencePair]:
    """Five pairs of different lengths and margins."""
    ids = torch.randint(3, vocab, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    made = []
    for start, (chosen, rejected) in enumerate(((4, 7), (9, 2), (3, 3), (12, 5), (1, 8))):
        prompt = tuple(ids[start : start + 3])
        both = (tuple(ids[50 * start : 50 * start + chosen]), tuple(ids[200 + start : 200 + start + rejected]))
        made.append(PreferencePair(*(Demonstration(prompt, one) for one in both), margin=start / 10))
    return made


def steps_of(kind: str, handle: ModelHandle, pairs: list[PreferencePair]) -> tuple[list[float], dict[str, float]]:
    """The losses of the steps, and what is measured after them, by the apps' own functions."""
    if kind == "reward":
        config = RewardConfig(algorithm=RewardAlgorithm(center_coef=0.05))
        losses = [reward.learn(handle, pairs, config=config).loss for _ in range(NUM_STEPS)]
        return losses, reward.measure(handle, pairs=pairs, config=config)
    preferences = to_labeled(pairs) if kind == "kto" else pairs
    settings: Any = DpoConfig(algorithm=AlgorithmConfig(loss=kind, beta=0.2))  # type: ignore[arg-type]
    ref = rl_runtime.ReferenceLogProbs(preferences, batch_size=3)
    ref.compute(handle)
    losses = [dpo.learn(handle, preferences, config=settings, ref=ref).loss for _ in range(NUM_STEPS)]
    return losses, dpo.measure(handle, preferences=preferences, config=settings, ref=ref)


def to_labeled(pairs: list[PreferencePair]) -> list[LabeledResponse]:
    """Every response with its label, and the same prompt with the next response."""
    flat = [(one, label) for pair in pairs for one, label in ((pair.chosen, True), (pair.rejected, False))]
    return [
        LabeledResponse(one, label, Demonstration(one.prompt_ids, flat[(i + 2) % len(flat)][0].response_ids))
        for i, (one, label) in enumerate(flat)
    ]


# ------------------------------------------------------------------- plain torch


def log_probs(model: Any, one: Demonstration) -> torch.Tensor:
    rows = model(torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0, len(one.prompt_ids) - 1 : -1]
    return rows.log_softmax(-1).gather(1, torch.tensor(one.response_ids)[:, None]).sum()


def plain_loss(kind: str, model: Any, pairs: list[PreferencePair], ref: dict[Any, torch.Tensor]) -> torch.Tensor:
    """The loss of all pairs by transformers, one sequence at a time."""
    if kind == "reward":
        score = {
            one: model(torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0, 0]
            for pair in pairs
            for one in (pair.chosen, pair.rejected)
        }
        chosen = torch.stack([score[pair.chosen] for pair in pairs])
        rejected = torch.stack([score[pair.rejected] for pair in pairs])
        margins = torch.tensor([pair.margin for pair in pairs])
        return (-(chosen - rejected - margins).sigmoid().log() + 0.05 * (chosen + rejected).square()).mean()
    if kind == "kto":
        labeled = to_labeled(pairs)
        with torch.no_grad():
            kl = torch.stack([log_probs(model, one.unrelated) - ref[one.unrelated] for one in labeled]).mean().clamp(0)
        ratios = torch.stack([log_probs(model, one.response) - ref[one.response] for one in labeled])
        signs = torch.tensor([1.0 if one.is_desirable else -1.0 for one in labeled])
        return (1 - (0.2 * signs * (ratios - kl)).sigmoid()).mean()
    h = torch.stack(
        [
            log_probs(model, pair.chosen) - ref[pair.chosen] - log_probs(model, pair.rejected) + ref[pair.rejected]
            for pair in pairs
        ]
    )
    return (h - 2.5).square().mean() if kind == "ipo" else -(0.2 * h).sigmoid().log().mean()


def plain_steps(kind: str, model: Any, pairs: list[PreferencePair]) -> list[float]:
    """The losses of the same steps by torch's AdamW on one process, and the loss after them."""
    every = [one for pair in pairs for one in (pair.chosen, pair.rejected)]
    every += [one.unrelated for one in to_labeled(pairs)]
    with torch.no_grad():
        ref = {} if kind == "reward" else {one: log_probs(model, one) for one in every}
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr or 0, eps=OPTIM.eps, weight_decay=0.0)
    losses = []
    for _ in range(NUM_STEPS):
        loss = plain_loss(kind, model, pairs, ref)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return [*losses, plain_loss(kind, model, pairs, ref).item()]


def check(worker: TrainerWorker, folder: str, out: Path, name: str) -> None:
    import transformers

    stage, sp, lora, kind = CASES[name]
    is_reward = kind == "reward"
    config = EngineConfig(
        dtype="float32",
        zero=ZeroConfig(stage=stage, param_persistence_elements=0),
        sequence_parallel=sp,
        lora=lora,
        optim=OPTIM,
    )
    handle = ModelHandle(SpmdGroup(worker), "actor", BatchConfig(token_budget=30))  # type: ignore[arg-type]
    handle.build(folder, config, total_steps=NUM_STEPS, head="value" if is_reward else "lm")
    cls: Any = transformers.AutoModelForSequenceClassification if is_reward else transformers.AutoModelForCausalLM
    first = out / "first"
    handle.export(str(first), folder)
    dist.barrier()
    plain = cls.from_pretrained(first, dtype=torch.float32)
    pairs = make_pairs(plain.config.vocab_size)
    losses, measured = steps_of(kind, handle, pairs)
    if lora is None:
        expected = plain_steps(kind, plain, pairs)
        torch.testing.assert_close(
            torch.tensor([*losses, measured["loss"]]), torch.tensor(expected), rtol=2e-4, atol=2e-5
        )
    else:
        assert losses[-1] < losses[0], (name, losses)
    handle.export(str(out / "last"), folder)
    dist.barrier()
    if is_reward:
        classifier = cls.from_pretrained(out / "last", dtype=torch.float32)
        responses = rl_runtime.responses_of(pairs)
        ours = rl_runtime.scores(handle, responses, batch_size=4)
        with torch.no_grad():
            rows = [torch.tensor([[*one.prompt_ids, *one.response_ids]]) for one in responses]
            theirs = torch.stack([classifier(row).logits[0, 0] for row in rows])
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert rl_core.bradley_terry_loss(*rl_runtime.of_pairs(ours)).mean() < 0.69
    worker.drop("actor")
    dist.barrier()


def main(folder: str, out: str, names: list[str], rank: int) -> None:
    worker = TrainerWorker(rank, 2, device="cpu", num_threads=1)
    worker.connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    for name in names:
        check(worker, folder, Path(out) / name.replace(" ", "_"), name)


if __name__ == "__main__":
    # Before the fork: otherwise every rank imports them.
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    run_ranks(partial(main, sys.argv[1], sys.argv[2], sys.argv[3:]))
