"""A mini batch of the engine equals one step of plain PyTorch, with a stand-in for DeepSpeed: no process, no ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_engine_testkit import distance, make_batch, make_samples, reference_training, token_loss
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_engine.engine
import ds_engine.micro_batch
from ds_engine import EngineConfig, LossOutput, OptimConfig, TokenOutputs, ZeroEngine, dense_log_prob
from ds_engine.model.loading import load_model
from ds_engine.zero.optimizer_step import _divisor
from ds_engine.zero.zero3_gather import _Bucket

CPU = torch.device("cpu")
NUM_RANKS = 3
STEPS = [make_samples(n, seed=s) for n, s in ((6, 1), (4, 2))]


class StandIn:
    """DeepSpeed's contract: gradients are averaged over ranks and kept up to the boundary; only a step there counts.

    Without boundaries each backward pass starts from zero, as in stages 1 and 2 of DeepSpeed.
    """

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer, config: EngineConfig) -> None:
        self.module, self._optimizer, self._clip = module, optimizer, config.optim.grad_clip
        self.is_boundary, self._is_complete, self.num_steps = True, True, 0

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.is_boundary = is_boundary

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool) -> None:
        assert not scale_wrt_gas
        if self._is_complete:
            self._optimizer.zero_grad()
        (loss / NUM_RANKS).backward()
        self._is_complete = self.is_boundary

    def step(self) -> None:
        if self.is_boundary:
            self._norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._clip or float("inf"))
            self._optimizer.step()
            self.num_steps += 1

    def get_global_grad_norm(self) -> float:
        return float(self._norm)

    def was_step_applied(self) -> bool:
        return True

    def destroy(self) -> None: ...


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process, in which the engine trains as one of several ranks that share every loss."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    start = lambda module, optimizer, config, _: StandIn(module, optimizer, config)  # noqa: E731
    monkeypatch.setattr(ds_engine.engine, "start_deepspeed", start)
    monkeypatch.setattr(ds_engine.micro_batch, "dist", SimpleNamespace(get_world_size=lambda: NUM_RANKS))
    yield
    dist.destroy_process_group()


def loss_fn(outputs: TokenOutputs, batch: Any) -> LossOutput:
    return LossOutput(loss=token_loss(outputs.log_probs_K, outputs.entropy_K, batch.columns["weights"]))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_mini_batches_take_the_steps_of_plain_pytorch(one_process: None, tiny_model: Path, temperature: float) -> None:
    """Several micro batches, one of them without targets, at a temperature; log-probs before the first step too."""
    optim = {"lr": 3e-3, "eps": 1e-4}
    expected, losses, norms = reference_training(tiny_model, STEPS, temperature=temperature, **optim)
    config = EngineConfig(optim=OptimConfig(**optim), dtype="float32")
    module = load_model(str(tiny_model), config, device=CPU, ds_config={})
    engine = ZeroEngine(module, config, log_prob_fn=dense_log_prob, device=CPU)
    seen: list[torch.Tensor] = []

    def noting(outputs: TokenOutputs, batch: Any) -> LossOutput:
        seen.append(outputs.log_probs_K.detach())
        return loss_fn(outputs, batch)

    before = engine.log_probs([make_batch(STEPS[0][::2])], temperature=temperature)
    batches = [[make_batch(part) for part in (samples[::2], [], samples[1::2])] for samples in STEPS]
    stats = [engine.train_mini_batch(micro, noting, temperature=temperature) for micro in batches]
    torch.testing.assert_close(seen[0], before[0].log_probs_K)
    assert [s.loss for s in stats] == pytest.approx(losses, rel=1e-5)
    assert [s.grad_norm for s in stats] == pytest.approx(norms, rel=1e-5)
    assert engine.deepspeed.num_steps == len(STEPS)
    for name, parameter in module.named_parameters():
        assert distance(parameter.detach(), expected[name]) < 1e-5, name
    engine.close()


def test_the_schedule_counts_mini_batches(one_process: None, tiny_model: Path) -> None:
    config = EngineConfig(optim=OptimConfig(lr=1.0, schedule="linear", warmup_steps=2), dtype="float32")
    module = load_model(str(tiny_model), config, device=CPU, ds_config={})
    engine = ZeroEngine(module, config, log_prob_fn=dense_log_prob, device=CPU, total_steps=4)
    batches = [make_batch(samples) for samples in STEPS]
    assert [engine.train_mini_batch(batches, loss_fn).lr for _ in range(4)] == [0.5, 1.0, 1.0, 0.5]
    engine.close()


def test_compiling_ahead_computes_no_more_than_it_needs(
    one_process: None, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers start on the same GPU meanwhile."""
    config = EngineConfig(dtype="float32")
    module = load_model(str(tiny_model), config, device=CPU, ds_config={})
    engine = ZeroEngine(module, config, log_prob_fn=dense_log_prob, device=CPU)
    engine.config = replace(config, compile=True)
    given: list[Any] = []
    for name in ("infer", "rehearse"):
        monkeypatch.setattr(engine._micro_batches, name, lambda batch, *_: given.append(batch))
    for wanted in (0, 4096, 10**9):
        engine.compile_ahead(wanted)
    computed = [each.input_ids_T.numel() for each in given[1::2]]
    length = min(512, module.config.max_position_embeddings)
    assert computed[:2] == [2 * length, 4096]
    assert 5e6 < computed[2] * module.config.hidden_size <= 6e6
    engine.close()


def test_only_entropies_that_the_loss_uses_have_a_gradient(one_process: None, tiny_model: Path) -> None:
    """Else every backward pass of the head would compute the gradient of entropies, of zeros."""
    config = EngineConfig(dtype="float32")
    module = load_model(str(tiny_model), config, device=CPU, ds_config={})
    used: list[bool] = []

    def spy(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs_K, entropy_K = dense_log_prob(*args)
        if entropy_K.requires_grad:
            used.append(False)
            entropy_K.register_hook(lambda grad: used.__setitem__(-1, grad is not None))
        return log_probs_K, entropy_K

    def loss_of(outputs: TokenOutputs, batch: Any) -> LossOutput:
        loss = -outputs.log_probs_K.sum()
        if "bonus" in batch.columns:
            loss = loss - outputs.entropy_K.sum()
        return LossOutput(loss=loss, metrics={"entropy": outputs.entropy_K.sum()})

    plain, with_bonus = (make_batch(samples) for samples in STEPS)
    with_bonus.columns["bonus"] = with_bonus.columns["weights"]
    engine = ZeroEngine(module, config, log_prob_fn=spy, device=CPU)
    engine.train_mini_batch([plain, with_bonus, plain], loss_of)
    assert used == [False, True, False]
    engine.close()


@given(
    gradients=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6).filter(any),
    loss_scale=st.sampled_from([1.0, 8.0, 65536.0]),
    max_norm=st.sampled_from([0.0, 0.1, 1.0, 50.0]),
)
@settings(deadline=None, derandomize=True)
def test_the_divisor_unscales_and_clips(gradients: list[float], loss_scale: float, max_norm: float) -> None:
    plain = torch.tensor(gradients, dtype=torch.float64)
    divisor = _divisor((plain * loss_scale).norm(), loss_scale, max_norm)
    result = plain * loss_scale / (1.0 if divisor is None else divisor)
    expected = plain * min(1.0, max_norm / float(plain.norm() + 1e-6)) if max_norm else plain
    torch.testing.assert_close(result, expected)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), world_size=st.integers(1, 4))
@settings(deadline=None, derandomize=True)
def test_shards_of_stage_3_are_joined_in_the_order_of_ranks(sizes: list[int], world_size: int) -> None:
    """The gathered memory has all shards of rank 0 first; a parameter has its own one after another, then padding."""
    params, shards = [], []
    for number, size in enumerate(sizes):
        shard = -(-size // world_size)
        whole = torch.arange(shard * world_size, dtype=torch.float32) + 100 * number
        shards.append(whole.view(world_size, shard))
        params.append(
            SimpleNamespace(
                ds_process_group=None,
                dtype=torch.float32,
                ds_tensor=SimpleNamespace(ds_numel=shard),
                ds_numel=size,
                ds_shape=torch.Size([size]),
                ds_persist=False,
                whole=whole,
            )
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda group: world_size)
        patch.setattr(dist, "get_rank", lambda group: 0)
        bucket = _Bucket(params, second=False)
    for param, joined in zip(params, bucket.assemble(torch.cat(shards, dim=1)), strict=True):
        assert torch.equal(joined, param.whole[: param.ds_numel])
