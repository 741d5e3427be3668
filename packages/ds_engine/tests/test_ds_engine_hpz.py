"""hpZ, ZeRO++'s second shard of each parameter within a node: four ranks as two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ds_engine_testkit import make_samples

from ds_engine import EngineConfig, EngineConfigError, LoraConfig, OffloadConfig, OptimConfig, ZeroConfig
from ds_engine.deepspeed_keys import HPZ
from ds_engine.planning.memory_plan import estimate_memory
from plinth_testing import RankPool, raises, write_tiny_model


def config(ranks: int, **extra: object) -> EngineConfig:
    zero = ZeroConfig(stage=3, param_persistence_elements=0, deepspeed={HPZ: ranks})
    return EngineConfig(**{"zero": zero, "optim": OptimConfig(lr=3e-3, eps=1e-4), "dtype": "float32"} | extra)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"gradient_checkpointing": True, "dtype": "bfloat16"},
        {"lora": LoraConfig(rank=4)},
        {"optim": OptimConfig(name="muon", lr=3e-3, eps=1e-4)},
    ],
    ids=["plain", "recomputed", "lora", "muon"],
)
def test_steps_are_those_without_second_shards_to_the_bit(
    four_ranks: RankPool, tiny_model: Path, extra: dict[str, object]
) -> None:
    samples = [make_samples(8, seed=s) for s in range(3)]
    per_rank = [{"steps": [[s[rank::8], s[rank + 4 :: 8]] for s in samples]} for rank in range(4)]
    function, given = ("train_adapters", {"samples": samples[0]}) if "lora" in extra else ("train", {})
    plain, second = (
        four_ranks.run(function, per_rank, model_path=str(tiny_model), config=config(n, **extra), **given)[0]
        for n in (1, 2)
    )
    assert second["stats"] == plain["stats"]
    trained = "adapters" if "lora" in extra else "weights"
    assert all(torch.equal(second[trained][name], weight) for name, weight in plain[trained].items())


@pytest.mark.slow
@pytest.mark.long
def test_second_shards_are_new_after_weights_are_loaded(four_ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    """Also after a frozen engine joins the process, which DeepSpeed itself refuses."""
    options = {"samples": make_samples(3, seed=1), "folder": str(tmp_path)}
    results = four_ranks.run("train_and_go_back", model_path=str(tiny_model), config=config(2), **options)
    log_probs = {name: log_probs_K for name, (log_probs_K, _) in results[0].items()}
    assert all(num_shards > 0 for result in results for _, num_shards in result.values())
    assert torch.equal(log_probs["loaded"], log_probs["start"])
    assert torch.equal(log_probs["returned"], log_probs["moved"])
    assert torch.equal(log_probs["second"], log_probs["start"])
    assert not torch.allclose(log_probs["moved"], log_probs["start"], atol=1e-3)
    assert not torch.allclose(log_probs["moved on"], log_probs["moved"], atol=1e-3)


@pytest.mark.slow
def test_groups_that_do_not_divide_the_ranks_are_refused(two_ranks: RankPool, tiny_model: Path) -> None:
    for error in two_ranks.run("train", model_path=str(tiny_model), config=config(4), steps=[]):
        assert isinstance(error, EngineConfigError)
        assert (error.field, error.value) == (f"zero.deepspeed.{HPZ}", 4)


def test_second_shards_are_planned_and_refused_where_they_save_nothing(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, hidden_size=64)

    def weights(ranks: int) -> int:
        return estimate_memory(model, config(ranks), dp=16, tokens_per_micro_batch=8).weights.device

    whole = 16 * weights(1)
    assert weights(8) - weights(1) == pytest.approx(whole / 8, rel=0.01)
    with raises(EngineConfigError, field=f"deepspeed.{HPZ}", value=2):
        ZeroConfig(stage=2, deepspeed={HPZ: 2})
    with raises(EngineConfigError, field=f"deepspeed.{HPZ}", value=2):
        ZeroConfig(stage=3, offload=OffloadConfig(optimizer="cpu", param="cpu"), deepspeed={HPZ: 2})
