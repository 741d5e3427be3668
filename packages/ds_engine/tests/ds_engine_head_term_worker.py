"""Two ranks train on a divergence to a teacher; run by test_ds_engine_head_term.py with the two models' folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from ds_engine_testkit import make_batch, make_samples
from torch import Tensor

from ds_engine import (
    EngineConfig,
    LmHead,
    LossOutput,
    OptimConfig,
    TokenOutputs,
    ZeroConfig,
    ZeroEngine,
    init_distributed,
)
from ds_engine.simple import SimpleBatch
from plinth_testing import run_ranks

LR, TEMPERATURE = 0.01, 0.7
SAMPLES = make_samples(6, seed=3)
CPU = torch.device("cpu")


def dense_log_prob(
    hidden_KH: Tensor, weight_VH: Tensor, targets_K: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    log_probs_KV = (hidden_KH @ weight_VH.T / temperature).log_softmax(-1)
    return log_probs_KV.gather(1, targets_K[:, None])[:, 0], -(log_probs_KV.exp() * log_probs_KV).sum(-1)


def reverse_kl(student_KV: Tensor, teacher_KV: Tensor) -> Tensor:
    return (student_KV.exp() * (student_KV - teacher_KV)).sum(-1)


def term(
    hidden_KH: Tensor, weight_VH: Tensor, columns: Mapping[str, Tensor], temperature: float, *, head: LmHead
) -> Tensor:
    of_teacher = (columns["hidden"] @ head.weight_VH.T / temperature).log_softmax(-1)
    return reverse_kl((hidden_KH @ weight_VH.T / temperature).log_softmax(-1), of_teacher)


def loss(outputs: TokenOutputs, batch: SimpleBatch) -> LossOutput:
    assert outputs.term_K is not None
    total = (batch.columns["weights"].abs() * outputs.term_K).sum() + 0.1 * outputs.log_probs_K.sum()
    return LossOutput(loss=total, metrics={"kl": outputs.term_K.sum().detach()})


def plain(folders: list[str]) -> tuple[dict[str, Tensor], float]:
    """Weights after one SGD-like step (AdamW) of one process with whole logits, and the sum of the divergences."""
    student, teacher = (transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in folders)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR, eps=1e-4, weight_decay=0.0)
    total, kl = torch.zeros(()), 0.0
    for sample in SAMPLES:
        rows, ids = slice(sample.num_prompt - 1, -1), torch.tensor([sample.ids])
        of_student = (student(ids).logits[0, rows] / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            of_teacher = (teacher(ids).logits[0, rows] / TEMPERATURE).log_softmax(-1)
        divergence_K = reverse_kl(of_student, of_teacher)
        total = total + abs(sample.weight) * divergence_K.sum()
        total = total + 0.1 * of_student.gather(1, ids[0, sample.num_prompt :, None]).sum()
        kl += float(divergence_K.sum().detach())
    total.backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    return {name: p.detach() for name, p in student.named_parameters()}, kl


def check(folders: list[str], rank: int, stage: Any, sp: int, expected: dict[str, Tensor], kl: float) -> None:
    config = EngineConfig(
        zero=ZeroConfig(stage=stage, param_persistence_elements=0),
        optim=OptimConfig(lr=LR, eps=1e-4, grad_clip=1.0, warmup_steps=0, schedule="constant"),
        dtype="float32",
        sequence_parallel=sp,
    )
    build = partial(ZeroEngine.from_pretrained, log_prob_fn=dense_log_prob, device=CPU)
    student, teacher = build(folders[0], config, total_steps=1), build(folders[1], config, trainable=False)
    parts = [SAMPLES[:2], SAMPLES[2:]]
    if sp == 1:  # rank 0 has the first three samples, rank 1 an empty micro batch and the others
        parts = [[SAMPLES[:1], SAMPLES[1:3]], [[], SAMPLES[3:]]][rank]
    batches = [make_batch(part) for part in parts]
    hidden = teacher.hidden_states(batches)
    batches = [
        SimpleBatch(**{**vars(batch), "columns": {**batch.columns, "hidden": states}})
        for batch, states in zip(batches, hidden, strict=True)
    ]
    stats = student.train_mini_batch(
        batches, loss, temperature=TEMPERATURE, head_term=partial(term, head=teacher.lm_head())
    )
    assert abs(stats.metrics["kl"] - kl) < 1e-3 * kl, (stage, sp, stats.metrics["kl"], kl)
    trained = dict(student.export_parameters())
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def main(folders: list[str], rank: int) -> None:
    init_distributed(
        rank=rank,
        world_size=2,
        master_addr=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
        device=CPU,
    )
    expected, kl = plain(folders)
    for stage, sp in ((2, 1), (3, 1), (3, 2)):
        check(folders, rank, stage, sp, expected, kl)


if __name__ == "__main__":
    run_ranks(partial(main, sys.argv[1:]))
