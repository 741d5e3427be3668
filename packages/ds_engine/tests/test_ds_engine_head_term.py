"""A term of the loss that needs the LM head, and a frozen teacher's hidden states and head, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds_engine_testkit
import pytest
import torch
import transformers
from ds_engine_testkit import EPS, LR, make_samples
from ds_engine_worker import DIVERGENCE_TEMPERATURE, reverse_kl

from plinth_testing import RankPool, write_tiny_model

SAMPLES = make_samples(6, seed=3)


def plain(student: Any, teacher: Any) -> tuple[dict[str, torch.Tensor], float]:
    """Weights after one step of AdamW of one process with whole logits, and the sum of the divergences."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    total, kl = torch.zeros(()), 0.0
    for sample in SAMPLES:
        rows, ids = slice(sample.num_prompt - 1, -1), torch.tensor([sample.ids])
        of_student, of_teacher = (
            (model(ids).logits[0, rows] / DIVERGENCE_TEMPERATURE).log_softmax(-1) for model in (student, teacher)
        )
        divergence_K = reverse_kl(of_student, of_teacher.detach())
        total = total + abs(sample.weight) * divergence_K.sum()
        total = total + 0.1 * of_student.gather(1, ids[0, sample.num_prompt :, None]).sum()
        kl += float(divergence_K.sum().detach())
    total.backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    return {name: p.detach() for name, p in student.named_parameters()}, kl


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("stage", "sp"), [(2, 1), (3, 1), (3, 2)])
def test_the_divergence_to_a_teacher_trains_as_plain_pytorch_does(
    two_ranks: RankPool, untied_model: Path, tmp_path: Path, stage: int, sp: int
) -> None:
    """One rank with an empty micro batch, unless the ranks share sequences."""
    other = write_tiny_model(tmp_path, seed=1, hidden_size=48, tie_word_embeddings=False)
    models = [transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (untied_model, other)]
    expected, kl = plain(*models)
    parts = [[SAMPLES[:1], SAMPLES[1:3]], [[], SAMPLES[3:]]] if sp == 1 else [[SAMPLES[:2], SAMPLES[2:]]] * 2
    config = ds_engine_testkit.config(stage, sequence_parallel=sp, optim={"grad_clip": 1.0})
    paths = {"model_path": str(untied_model), "teacher_path": str(other)}
    (stats, weights), _ = two_ranks.run("train_on_a_teacher", [{"parts": own} for own in parts], config=config, **paths)
    assert stats.metrics["kl"] == pytest.approx(kl, rel=1e-3)
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=2e-5)
