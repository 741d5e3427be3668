"""Value heads on real ranks against plain transformers: a critic's numbers and its gradient."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import ds_engine_testkit
import pytest
import torch
import transformers
from ds_engine_testkit import EPS, LR, Sample, make_samples

from ds_engine import EngineError, ZeroEngine
from ds_engine.model.loading import load_model
from plinth_testing import RankPool, raises, write_tiny_model

STEPS = [make_samples(n, seed=s) for n, s in ((7, 1), (5, 2), (6, 3))]


config = partial(ds_engine_testkit.config, seed=5)


def plain_values(model: transformers.PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Values at the positions that predict the sample's response, by transformers' own forward pass."""
    hidden = model.model(input_ids=torch.tensor([sample.ids])).last_hidden_state[0]
    return model.score(hidden)[sample.num_prompt - 1 : -1, 0]


def reference(folder: Path) -> tuple[dict[str, torch.Tensor], list[float], list[torch.Tensor]]:
    """(weights, losses, values of the first step's samples before training) of one fp32 process."""
    model = load_model(str(folder), config(1), device=torch.device("cpu"), ds_config={}, head="value")
    model.set_attn_implementation("eager")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    before = [plain_values(model, sample).detach() for sample in STEPS[0]]
    losses = []
    for samples in STEPS:
        loss = sum((plain_values(model, s) - s.weight).square().sum() for s in samples)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return {name: p.detach() for name, p in model.named_parameters()}, losses, before


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "offload"), [(2, "cpu"), (3, "none")])
def test_three_steps_equal_one_fp32_process(two_ranks: RankPool, tiny_model: Path, stage: int, offload: str) -> None:
    expected, losses, before = reference(tiny_model)
    per_rank = [
        {
            "steps": [[samples[rank::4], samples[rank + 2 :: 4], []] for samples in STEPS],
            "value_samples": [STEPS[0][rank::2], []],
        }
        for rank in range(2)
    ]
    results = two_ranks.run(
        "train_values", per_rank, model_path=str(tiny_model), config=config(stage, optimizer=offload)
    )
    assert list(results[0]["weights"]) == list(expected)
    assert "score.weight" in expected
    assert not any("lm_head" in name for name in expected)
    for name, weight in results[0]["weights"].items():
        assert float((weight - expected[name]).norm() / expected[name].norm()) < 1e-5, name
    assert [s.loss for s in results[0]["stats"]] == pytest.approx(losses, rel=1e-5)
    for rank, result in enumerate(results):
        assert result["refused"].startswith("log_probs needs an engine built with head='lm'")
        torch.testing.assert_close(result["before"][0], torch.cat(before[rank::2]), rtol=1e-5, atol=1e-6)
        assert result["before"][1].shape == (0,)
        assert not torch.equal(result["before"][0], result["after"][0])
        assert result["before"][0].dtype == torch.float32


@pytest.mark.slow
def test_stages_start_with_the_same_head_in_bf16(two_ranks: RankPool, tiny_model: Path) -> None:
    samples = [make_samples(4, seed=8)]
    values = [
        two_ranks.run(
            "train_values",
            model_path=str(tiny_model),
            steps=[],
            value_samples=samples,
            config=config(stage, dtype="bfloat16"),
        )[1]["before"][0]
        for stage in (2, 3)
    ]
    assert torch.equal(*values)
    assert values[0].abs().max() < 1


def test_a_trained_head_is_read_from_the_folder(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "lm")
    device = torch.device("cpu")
    model = load_model(str(tmp_path / "lm"), config(1), device=device, ds_config={}, head="value")
    with torch.no_grad():
        model.score.weight.fill_(0.25)
    model.save_pretrained(tmp_path / "critic")
    again = load_model(str(tmp_path / "critic"), config(1), device=device, ds_config={}, head="value")
    assert torch.equal(again.score.weight, torch.full_like(again.score.weight, 0.25))


def test_an_lm_head_needs_a_log_prob_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with raises(EngineError, field="log_prob_fn"):
        ZeroEngine(torch.nn.Linear(1, 1), config(1), device=torch.device("cpu"))
