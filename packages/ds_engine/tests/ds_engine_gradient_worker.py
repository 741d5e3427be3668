"""Gradients and the memory they take, measured before or in a step and compared with plain autograd's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from ds_engine_testkit import Sample, make_batch
from ds_engine_worker import CPU, build, weighted_loss, weights_of

import ds_engine.zero.optimizer
from ds_engine import EngineConfig, LossOutput, OptimConfig, TokenOutputs, ZeroConfig, ZeroEngine, dense_log_prob
from ds_engine.model.loading import load_model
from ds_engine.model.packed_model import install_packed_forward, packed_inputs
from ds_engine.model.parts import transformer_layers


def backward(engine: ZeroEngine, samples: list[Sample]) -> None:
    """The backward pass of one micro batch, without the step."""
    passes = engine._micro_batches
    inputs, batch = passes.to_device(make_batch(samples))
    passes.backward(passes._forward(inputs, 1.0), batch, weighted_loss, {}, inputs[0].entropy)


def gradient_error(model_path: str, micro_batches: list[list[Sample]], stage: int, fp32_reduce: bool) -> float:
    """Relative distance of the engine's bf16 gradient from the fp32 sum of all micro batches' own gradients."""
    truth = _true_gradient(model_path, "bfloat16", micro_batches)
    for tensor in truth.values():
        dist.all_reduce(tensor)
    zero = ZeroConfig(stage=stage, fp32_reduce=fp32_reduce, param_persistence_elements=0)
    engine = build(model_path, EngineConfig(zero=zero, dtype="bfloat16"))
    for index, samples in enumerate(micro_batches):
        engine._micro_batches.mark_boundary(index == len(micro_batches) - 1)
        backward(engine, samples)
    square = torch.zeros(2)
    for name, parameter in engine.module.named_parameters():
        gradient = deepspeed.utils.safe_get_full_grad(parameter)
        square += torch.stack(((gradient - truth[name]).square().sum(), truth[name].square().sum()))
    engine.close()
    return float((square[0] / square[1]).sqrt())


def naive_and_exact_norms(model_path: str, micro_batches: list[list[Sample]]) -> dict[int, dict[str, float]]:
    """By stage: DeepSpeed's norm without accumulation boundaries, the engine's, the true one, and the last batch's."""
    truth = _true_gradient(model_path, "float32", micro_batches)
    last = _true_gradient(model_path, "float32", micro_batches[-1:])
    norms = {}
    for stage in (1, 2, 3):
        zero = ZeroConfig(stage=stage, param_persistence_elements=0)
        config = EngineConfig(zero=zero, dtype="float32", optim=OptimConfig(lr=1e-6))
        engine = build(model_path, config)
        exact = engine.train_mini_batch([make_batch(m) for m in micro_batches], weighted_loss)
        engine.close()
        engine = build(model_path, config)
        for samples in micro_batches:
            backward(engine, samples)
        engine._deepspeed.step()
        # Both ranks ran the same batches, so sums are twice one process's.
        norms[stage] = {
            "naive": float(engine._deepspeed._global_grad_norm),
            "engine": exact.grad_norm,
            "true": 2 * _norm(truth),
            "last_alone": 2 * _norm(last),
        }
        engine.close()
    return norms


def train_with_loss(model_path: str, config: EngineConfig, micro_batches: list[list[Sample]], kind: str) -> Any:
    """One step whose loss uses log-probs only, or nothing of the model."""

    def loss_fn(outputs: Any, batch: Any) -> LossOutput:
        loss = (outputs.log_probs_K.square() * batch.columns["weights"]).sum()
        return LossOutput(loss=loss if kind == "log_prob_only" else torch.tensor(0.5))

    def with_norm(outputs: Any, batch: Any) -> LossOutput:
        result = loss_fn(outputs, batch)
        share = norm / len(micro_batches) if kind == "log_prob_only" else 0.0
        return LossOutput(loss=result.loss, metrics={"true_norm": torch.tensor(share, dtype=torch.float64)})

    norm = _norm(_true_gradient(model_path, "float32", micro_batches, loss_fn if kind == "log_prob_only" else None))
    engine = build(model_path, config)
    stats = engine.train_mini_batch([make_batch(m) for m in micro_batches], with_norm)
    engine.close()
    return stats


def fp32_sums(model_path: str, config: EngineConfig, micro_batches: list[list[Sample]], *, ours: bool) -> Any:
    """This rank's parts of the sums of gradients at stage 2 or 3 (without `ours` DeepSpeed's own), the norm of all, the
    bytes of stage 3's sums before the first gradient, before the step, and after it, and the sizes of gradients that
    DeepSpeed finds then. The second step's, so that there was an earlier one."""
    methods = ("fuse_grad_accumulation", "fuse_zero3_gradients")
    with ExitStack() as stack:
        for name in methods if not ours else ():
            stack.enter_context(patch.object(ds_engine.zero.optimizer, name, lambda _: None))
        engine = build(model_path, config)
    engine.train_mini_batch([make_batch(micro_batches[0])], weighted_loss)
    optimizer = engine._deepspeed.optimizer
    flat = getattr(optimizer, "grad_partitions_flat_buffer", torch.empty(0))
    held = [flat.untyped_storage().nbytes()]
    for index, samples in enumerate(micro_batches):
        engine._micro_batches.mark_boundary(index == len(micro_batches) - 1)
        backward(engine, samples)
    groups = optimizer.averaged_gradients.values()
    sums = [flat.clone()] if config.zero.stage == 3 else [group.flat_partition.clone() for group in groups]
    assert all(p.grad is None for p in engine.module.parameters())
    held.append(flat.untyped_storage().nbytes())
    engine._deepspeed.step()
    held.append(flat.untyped_storage().nbytes())
    norm = float(engine._deepspeed._global_grad_norm)
    gradients = (
        [deepspeed.utils.safe_get_full_grad(p) for p in engine.module.parameters()] if config.zero.stage == 3 else []
    )
    engine.close()
    return sums, norm, held, sum(float(gradient.abs().sum()) for gradient in gradients)


def train_hooked(model_path: str, config: EngineConfig, micro_batches: list[list[Sample]], *, hooked: bool) -> Any:
    """The norm and the weights after a step of an engine whose first layer had (`hooked`) a full backward hook of its
    own, and how often that was called."""
    calls: list[Any] = []
    set_leaf_modules = ds_engine.zero.optimizer.set_leaf_modules

    def with_hook(model: Any) -> None:
        if hooked:
            transformer_layers(model)[0].register_full_backward_hook(lambda *arguments: calls.append(arguments[0]))
        set_leaf_modules(model)

    with patch.object(ds_engine.zero.optimizer, "set_leaf_modules", with_hook):
        engine = build(model_path, config)
    stats = engine.train_mini_batch([make_batch(m) for m in micro_batches], weighted_loss)
    weights = weights_of(engine)
    engine.close()
    return stats.grad_norm, weights, len(calls)


_SHARDS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")


def held_bytes(model_path: str, config: EngineConfig, micro_batches: list[list[Sample]]) -> dict[str, int]:
    """Bytes of storages by what they are for, the most after any backward pass of the second mini batch."""
    engine = build(model_path, config)
    engine.train_mini_batch([make_batch(m) for m in micro_batches], weighted_loss)
    assert engine._optimizer is not None
    zero, parameters = engine._deepspeed.optimizer, list(engine.module.parameters())
    most: dict[str, int] = {}
    for index, samples in enumerate(micro_batches):
        engine._micro_batches.mark_boundary(index == len(micro_batches) - 1)
        backward(engine, samples)
        kinds: dict[str, Any] = {
            "weights": [getattr(p, "ds_tensor", p.data) for p in parameters],
            "optimizer": [engine._optimizer.state, [[p.data for p in getattr(zero, name, [])] for name in _SHARDS]],
            "rest": [vars(zero), [p.grad for p in parameters], [vars(p) for p in parameters]],
        }
        seen: set[int] = set()
        for kind, roots in kinds.items():
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(roots, 6)}
            most[kind] = max(most.get(kind, 0), sum(n for pointer, n in storages.items() if pointer not in seen))
            seen |= set(storages)
    engine.close()
    return most


def _tensors(root: Any, depth: int) -> Iterator[torch.Tensor]:
    """Tensors of at least a kilobyte within `depth` containers; flags and step counters are smaller."""
    if isinstance(root, torch.Tensor):
        for tensor in (root.data, root.grad if root.is_leaf else None):
            if tensor is not None and tensor.untyped_storage().nbytes() >= 1024:
                yield tensor
    elif depth and isinstance(root, dict | list | tuple):
        for child in root.values() if isinstance(root, dict) else root:
            yield from _tensors(child, depth - 1)


def _true_gradient(
    model_path: str, dtype: str, micro_batches: list[list[Sample]], loss_fn: Any = weighted_loss
) -> dict[str, torch.Tensor]:
    """This rank's gradient by plain autograd, each micro batch's own, summed in fp32."""
    model = load_model(model_path, EngineConfig(dtype=dtype), device=CPU, ds_config={})
    install_packed_forward(model, dense_log_prob)
    total = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for samples in micro_batches if loss_fn else []:
        batch = make_batch(samples)
        log_probs_K, entropy_K = model(packed=packed_inputs(batch, device=CPU, kernel="sdpa")[0])
        model.zero_grad()
        loss_fn(TokenOutputs(log_probs_K=log_probs_K, entropy_K=entropy_K), batch).loss.backward()
        for name, parameter in model.named_parameters():
            total[name] += parameter.grad
    return total


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([t.square().sum() for t in tensors.values()]).sum().sqrt())
