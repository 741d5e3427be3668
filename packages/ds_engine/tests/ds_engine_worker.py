"""A rank: joins the group, then runs the functions below as the pool asks. Started by ds_engine_testkit.RankPool."""

from __future__ import annotations

import faulthandler
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent))

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils.z3_leaf_module import z3_leaf_module
from ds_engine_reshape_check import MemorySource, hand_over, state_of
from ds_engine_testkit import Sample, make_batch, make_samples, token_loss

import ds_engine
import ds_engine.loading
import ds_engine.optimizer
from ds_engine import EngineConfig, LossOutput, OptimConfig, TokenOutputs, ZeroConfig, ZeroEngine, dense_log_prob
from ds_engine.collective_guard import record_collectives
from ds_engine.collective_log import CollectiveRecord
from ds_engine.compilation import compile_layers
from ds_engine.loading import load_model
from ds_engine.optimizer import parameter_groups
from ds_engine.packed_model import install_packed_forward, packed_inputs
from ds_engine.quantised_base import Nf4Linear
from ds_engine.sequence_parallel import gather_heads, join_sequence_group, scatter_heads
from ds_engine.transfer_plan import Visit
from ds_engine.zero3_gather import batch_gathers

CPU = torch.device("cpu")


def weighted_loss(outputs: Any, batch: Any) -> LossOutput:
    loss = token_loss(outputs.log_probs_K, outputs.entropy_K, batch.columns["weights"])
    metrics = {"entropy_sum": outputs.entropy_K.sum(), "tokens": torch.tensor(float(outputs.log_probs_K.numel()))}
    return LossOutput(loss=loss, metrics=metrics)


def build(model_path: str, config: EngineConfig, **kwargs: Any) -> ZeroEngine:
    return ZeroEngine.from_pretrained(model_path, config, log_prob_fn=dense_log_prob, device=CPU, **kwargs)


def train(
    model_path: str,
    config: EngineConfig,
    steps: list[list[list[Sample]]],
    log_prob_samples: list[list[Sample]] | None = None,
    save_to: str | None = None,
    load_from: str | None = None,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Train on `steps` (of this rank: a list of micro batches each); everything a test may compare."""
    engine = build(model_path, config)
    try:
        if load_from is not None:
            engine.load_checkpoint(load_from, "tag")
        stats = [
            engine.train_mini_batch([make_batch(m) for m in micro], weighted_loss, temperature=temperature)
            for micro in steps
        ]
        outputs = None
        if log_prob_samples is not None:
            outputs = engine.log_probs([make_batch(m) for m in log_prob_samples], temperature=temperature)
        if save_to is not None:
            engine.save_checkpoint(save_to, "tag")
        weights = {name: tensor.clone() for name, tensor in engine.export_parameters(torch.float32)}
        return {"stats": stats, "weights": weights, "outputs": outputs, "memory": engine.memory_stats()}
    finally:
        engine.close()


def train_traced(**options: Any) -> tuple[dict[str, Any], int]:
    """(what `train` or, with lora, `train_adapters` gives; compiled graphs) with compile=True, and without a C++
    compiler: graphs run one operator after the other."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ds_engine.loading.compile_layers = partial(compile_layers, backend="aot_eager")
    try:
        result = (train_adapters if options["config"].lora else train)(**options)
    finally:
        ds_engine.loading.compile_layers = compile_layers
    return result, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train_alone(
    model_path: str, config: EngineConfig, steps: list[list[list[Sample]]], save_to: str | None, load_from: str | None
) -> dict[str, Any]:
    """One rank: `train` with log-probs between the steps, the collectives of all that, and whether every weight was a
    view of its shard after each pass."""
    engine = build(model_path, config)
    if load_from is not None:
        engine.log_probs([make_batch(steps[0][0])])  # weights are there when new ones are loaded
        engine.load_checkpoint(load_from, "tag")
    stats, views = [], []
    with record_collectives() as records:
        for micro in steps:
            stats.append(engine.train_mini_batch([make_batch(m) for m in micro], weighted_loss))
            engine.log_probs([make_batch(m) for m in micro])
            views += [p.data_ptr() == cast("Any", p).ds_tensor.data_ptr() for p in engine.module.parameters()]
    if save_to is not None:
        engine.save_checkpoint(save_to, "tag")
    weights = {name: tensor.clone() for name, tensor in engine.export_parameters(torch.float32)}
    engine.close()
    return {
        "stats": stats,
        "weights": weights,
        "operations": {r.operation for r in records if (r.num_elements or 0) > 8},
        "views": all(views),
    }


def gathered_both_ways(
    sizes: list[list[int]], dtype: torch.dtype
) -> tuple[bool, list[CollectiveRecord], list[CollectiveRecord]]:
    """(parameters of these shapes gathered at once equal what was sharded, what DeepSpeed issues for it, and ours)."""
    torch.manual_seed(0)
    whole = [torch.randn(shape, dtype=dtype) for shape in sizes]
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in whole]
    module = torch.nn.ParameterList(parameters)
    deepspeed.zero.Init(module=module, dtype=dtype, config_dict_or_path={"train_batch_size": dist.get_world_size()})
    logs, equal = [], True
    for ours in (False, True):
        if ours:
            batch_gathers(module, None)
        with record_collectives() as records:
            cast("Any", parameters[0]).all_gather_coalesced(reversed(parameters)).wait()
        logs.append(list(records))
        equal = equal and all(torch.equal(p, t) and p.shape == t.shape for p, t in zip(parameters, whole, strict=True))
        for parameter in parameters:
            cast("Any", parameter).partition()
    return equal, logs[0], logs[1]


def swapped_heads(num_heads: tuple[int, int], lengths: list[int]) -> tuple[float, list[bool], int]:
    """Heads for tokens and back, compiled and not, rows of several lengths: (distance of outputs and gradients,
    whether the same collectives were issued, graphs)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    sequence = join_sequence_group(dist.get_world_size())
    assert sequence is not None

    def there_and_back(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = scatter_heads(query * 2, key.sin(), value, sequence)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return gather_heads(out.transpose(1, 2), sequence).cos()

    compiled = torch.compile(there_and_back, dynamic=True, fullgraph=True, backend="aot_eager")
    farthest, same = 0.0, []
    for length in lengths:
        query, kv = (torch.randn(1, n, length, 8, requires_grad=True) for n in num_heads)
        results, logs = [], []
        for function in (there_and_back, compiled):
            with record_collectives() as records:
                out = function(query, kv, kv)
                results.append([out.detach(), *torch.autograd.grad(out.square().sum(), (query, kv))])
            logs.append([(r.operation, r.dtype, r.num_elements) for r in records])
        farthest = max(farthest, *(float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True)))
        same.append(logs[0] == logs[1] and len(logs[0]) == 4)
    dist.destroy_process_group(sequence.group)
    return farthest, same, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train_adapters(
    model_path: str,
    config: EngineConfig,
    steps: list[list[list[Sample]]],
    samples: list[Sample],
    save_to: str | None = None,
    load_from: str | None = None,
) -> dict[str, Any]:
    """With LoRA: log-probs with and without adapters between steps, what is exported, what a checkpoint holds."""
    engine = build(model_path, config)
    batch = [make_batch(samples)]
    try:
        if load_from is not None:
            engine.load_checkpoint(load_from, "tag")
        base = [engine.log_probs(batch, adapters=False)[0].log_probs_K]
        stats = []
        for micro in steps:
            stats.append(engine.train_mini_batch([make_batch(m) for m in micro], weighted_loss))
            base.append(engine.log_probs(batch, adapters=False)[0].log_probs_K)
        if save_to is not None:
            engine.save_checkpoint(save_to, "tag")
        return {
            "stats": stats,
            "base": base,
            "outputs": engine.log_probs(batch)[0],
            "merged": {name: tensor.clone() for name, tensor in engine.export_parameters()},
            "adapters": {name: tensor.clone() for name, tensor in engine.export_adapters()},
            "settings": engine.adapter_config(),
            "packed_bytes": sum(_held(m.weight) for m in engine.module.modules() if isinstance(m, Nf4Linear)),
            "num_states": sum(s["exp_avg"].numel() for s in engine._optimizer.state.values() if "exp_avg" in s),
        }
    finally:
        engine.close()


def _held(parameter: Any) -> int:
    """Bytes of what this rank keeps of a parameter between steps: its storage, and stage 3's shard."""
    held = [parameter.data, *([parameter.ds_tensor] if hasattr(parameter, "ds_tensor") else [])]
    return sum(tensor.untyped_storage().nbytes() for tensor in held if tensor.numel() > 0)


def train_with_overflow(
    model_path: str,
    config: EngineConfig,
    steps: list[list[list[Sample]]],
    factors: list[float],
    window: int,
    upstream_window: int | None = None,
) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """(stats, weights after it) of each step, the loss of step i multiplied by factors[i].

    The scale rises after `window` good steps between steps, as the engine does it; after `upstream_window` as DeepSpeed
    does it.
    """
    # torch computes in fp16 on any CPU, only slowly, which is why DeepSpeed asks for instructions this one may lack.
    get_accelerator().is_fp16_supported = lambda: True
    engine = build(model_path, config)
    engine._loss_scale._window = window
    if upstream_window is not None:
        engine._deepspeed.optimizer.loss_scaler.scale_window = upstream_window
    stats, weights = [], []
    for micro_batches, factor in zip(steps, factors, strict=True):

        def loss_fn(outputs: Any, batch: Any, factor: float = factor) -> LossOutput:
            return LossOutput(loss=weighted_loss(outputs, batch).loss * factor)

        stats.append(engine.train_mini_batch([make_batch(m) for m in micro_batches], loss_fn))
        weights.append({name: tensor.clone() for name, tensor in engine.export_parameters(torch.float32)})
    engine.close()
    return stats, weights


def squared_error(outputs: Any, batch: Any) -> LossOutput:
    """Pulls each value towards the weight of its token."""
    loss = (outputs.values_K - batch.columns["weights"]).square().sum()
    return LossOutput(loss=loss, metrics={"values_sum": outputs.values_K.detach().sum()})


def train_values(
    model_path: str, config: EngineConfig, steps: list[list[list[Sample]]], value_samples: list[list[Sample]]
) -> dict[str, Any]:
    """The same for a value head: values before and after training, and what does not work."""
    engine = build(model_path, config, head="value")
    batches = [make_batch(m) for m in value_samples]
    before = engine.values(batches)
    stats = [engine.train_mini_batch([make_batch(m) for m in micro], squared_error) for micro in steps]
    weights = {name: tensor.clone() for name, tensor in engine.export_parameters(torch.float32)}
    try:
        engine.log_probs(batches)
        refused = ""
    except ds_engine.EngineError as error:
        refused = str(error)
    after = engine.values(batches)
    engine.close()
    return {"before": before, "after": after, "stats": stats, "weights": weights, "refused": refused}


def backward(engine: ZeroEngine, samples: list[Sample]) -> None:
    """One micro batch without the step."""
    passes = engine._micro_batches
    passes.backward(passes.ready(make_batch(samples)), weighted_loss, 1.0, {})


def naive_and_exact_norms(model_path: str, micro_batches: list[list[Sample]]) -> dict[int, dict[str, float]]:
    """Per stage: DeepSpeed's norm when borders are not marked, the engine's, the true one, the last batch's alone."""
    truth = _true_gradient(model_path, "fp32", micro_batches)
    last = _true_gradient(model_path, "fp32", micro_batches[-1:])
    norms = {}
    for stage in (1, 2, 3):
        zero = ZeroConfig(stage=stage, param_persistence_elements=0)
        config = EngineConfig(zero=zero, dtype="fp32", optim=OptimConfig(lr=1e-6))
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

    norm = _norm(_true_gradient(model_path, "fp32", micro_batches, loss_fn if kind == "log_prob_only" else None))
    engine = build(model_path, config)
    stats = engine.train_mini_batch([make_batch(m) for m in micro_batches], with_norm)
    engine.close()
    return stats


_SHARDS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")


def held_bytes(model_path: str, config: EngineConfig, micro_batches: list[list[Sample]]) -> dict[str, int]:
    """Bytes of storages by what they are for, the most after any backward pass of the second mini batch."""
    engine = build(model_path, config)
    engine.train_mini_batch([make_batch(m) for m in micro_batches], weighted_loss)
    assert engine._optimizer is not None
    zero, parameters = engine._deepspeed.optimizer, list(engine.module.parameters())
    most: dict[str, int] = {}
    for index, samples in enumerate(micro_batches):
        engine._micro_batches.mark_border(index == len(micro_batches) - 1)
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
    """Everything of a kilobyte or more within `depth` containers; flags and step counters are smaller."""
    if isinstance(root, torch.Tensor):
        for tensor in (root.data, root.grad if root.is_leaf else None):
            if tensor is not None and tensor.untyped_storage().nbytes() >= 1024:
                yield tensor
    elif depth and isinstance(root, dict | list | tuple):
        for child in root.values() if isinstance(root, dict) else root:
            yield from _tensors(child, depth - 1)


def gradient_distance(model_path: str, config: EngineConfig, micro_batches: list[list[Sample]]) -> dict[str, float]:
    """Of each parameter, relative distance of the engine's gradient from that of plain autograd in one process."""
    truth = _true_gradient(model_path, config.dtype, micro_batches)
    engine = build(model_path, config)
    for index, samples in enumerate(micro_batches):
        engine._micro_batches.mark_border(index == len(micro_batches) - 1)
        backward(engine, samples)
    distance = {}
    for name, parameter in engine.module.named_parameters():
        expected = truth[name]
        dist.all_reduce(expected)
        expected = expected / config.sequence_parallel  # ranks that share a micro batch counted it once each
        distance[name] = float((deepspeed.utils.safe_get_full_grad(parameter) - expected).norm() / expected.norm())
    engine.close()
    return distance


def gradient_error(model_path: str, micro_batches: list[list[Sample]], stage: int, fp32_reduce: bool) -> float:
    """Relative distance of the engine's bf16 gradient from the fp32 sum of all micro batches' own gradients."""
    truth = _true_gradient(model_path, "bf16", micro_batches)
    for tensor in truth.values():
        dist.all_reduce(tensor)
    zero = ZeroConfig(stage=stage, fp32_reduce=fp32_reduce, param_persistence_elements=0)
    engine = build(model_path, EngineConfig(zero=zero, dtype="bf16"))
    for index, samples in enumerate(micro_batches):
        engine._micro_batches.mark_border(index == len(micro_batches) - 1)
        backward(engine, samples)
    square = torch.zeros(2)
    for name, parameter in engine.module.named_parameters():
        gradient = deepspeed.utils.safe_get_full_grad(parameter)
        square += torch.stack(((gradient - truth[name]).square().sum(), truth[name].square().sum()))
    engine.close()
    return float((square[0] / square[1]).sqrt())


def fp32_sums(model_path: str, config: EngineConfig, micro_batches: list[list[Sample]], *, ours: bool) -> Any:
    """This rank's parts of the sums of gradients at stage 2 (without `ours` DeepSpeed's own) and the norm of all."""
    as_is = ds_engine.optimizer.sum_gradients_in_place
    try:
        if not ours:
            ds_engine.optimizer.sum_gradients_in_place = lambda _: None
        engine = build(model_path, config)
    finally:
        ds_engine.optimizer.sum_gradients_in_place = as_is
    optimizer = engine._deepspeed.optimizer
    for index, samples in enumerate(micro_batches):
        engine._micro_batches.mark_border(index == len(micro_batches) - 1)
        backward(engine, samples)
    sums = [group.flat_partition.clone() for group in optimizer.averaged_gradients.values()]
    assert all(p.grad is None for p in engine.module.parameters())
    engine._deepspeed.step()
    norm = float(engine._deepspeed._global_grad_norm)
    engine.close()
    return sums, norm


def recorded_steps(
    model_path: str, config: EngineConfig, steps: list[list[list[Sample]]]
) -> tuple[list[list[CollectiveRecord]], list[int], list[int], list[list[int]]]:
    """(what each step issued, sizes of the parameters, order in which their gradients become ready, their groups)."""
    engine = build(model_path, config)
    parameters = list(engine.module.parameters())
    sizes = [getattr(p, "ds_numel", p.numel()) for p in parameters]
    ready: list[int] = []
    hooks = [p.register_post_accumulate_grad_hook(lambda _, i=i: ready.append(i)) for i, p in enumerate(parameters)]
    logs = []
    for micro_batches in steps:
        with record_collectives() as records:
            engine.train_mini_batch([make_batch(m) for m in micro_batches], weighted_loss)
        logs.append(list(records))
    for hook in hooks:
        hook.remove()
    engine.close()
    numbers = {id(p): i for i, p in enumerate(parameters)}
    groups = [[numbers[id(p)] for p in g["params"]] for g in parameter_groups(engine.module, config.optim)]
    return logs, sizes, ready[: len(parameters)], groups


@contextmanager
def noted_visits(engine: ZeroEngine) -> Iterator[list[Visit]]:
    """What DeepSpeed's hooks of stage 3 are called for inside, in order."""
    numbers = {id(p): i for i, p in enumerate(engine.module.parameters())}
    optimizer = engine.deepspeed.optimizer
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    visits: list[Visit] = []

    def note(kind: str, original: Any) -> Any:
        def hook(submodule: Any, *args: Any, **options: Any) -> Any:
            own = sorted({numbers[id(p)] for p in iter_params(submodule, recurse=z3_leaf_module(submodule))})
            visits.append(Visit(kind=kind, submodule=submodule.ds_id, parameters=tuple(own)))
            return original(submodule, *args, **options)

        return hook

    reduce = optimizer.reduce_ready_partitions_and_remove_grads

    def note_gradient(parameter: Any) -> None:
        visits.append(Visit(kind="gradient", parameters=(numbers[id(parameter)],)))
        reduce(parameter)

    optimizer.reduce_ready_partitions_and_remove_grads = note_gradient
    for kind, name in (("fetch", "fetch_sub_module"), ("release", "release_sub_module")):
        setattr(coordinator, name, note(kind, getattr(coordinator, name)))
    yield visits
    for name in ("fetch_sub_module", "release_sub_module"):
        delattr(coordinator, name)
    optimizer.reduce_ready_partitions_and_remove_grads = reduce


def recorded_zero3_steps(
    model_path: str, config: EngineConfig, steps: list[list[list[Sample]]]
) -> tuple[list[list[CollectiveRecord]], list[list[Visit]], list[int], list[list[int]]]:
    """(what each step issued, the hooks of each, sizes of the parameters, groups of the optimizer)."""
    engine = build(model_path, config)
    parameters = list(engine.module.parameters())
    logs, visits = [], []
    for micro_batches in steps:
        with record_collectives() as records, noted_visits(engine) as noted:
            engine.train_mini_batch([make_batch(m) for m in micro_batches], weighted_loss)
        logs.append(list(records))
        visits.append(list(noted))
    numbers = {id(p): i for i, p in enumerate(parameters)}
    groups = [[numbers[id(p)] for p in g["params"]] for g in parameter_groups(engine.module, config.optim)]
    engine.close()
    return logs, visits, [p.ds_numel for p in parameters], groups


def frozen_log_probs(
    model_path: str, config: EngineConfig, samples: list[Sample]
) -> tuple[TokenOutputs, list[str], int]:
    """(outputs, what refuses to work, number of exported tensors) of a reference model."""
    engine = build(model_path, config, trainable=False)
    batch = make_batch(samples)
    outputs = engine.log_probs([batch])[0]
    refused = []
    for call in (
        lambda: engine.train_mini_batch([batch], weighted_loss),
        lambda: engine.save_checkpoint("/nowhere", "tag"),
        lambda: engine.load_checkpoint("/nowhere", "tag"),
    ):
        try:
            call()
        except ds_engine.EngineError as error:
            refused.append(str(error))
    engine.offload()
    engine.reload()
    assert not any(p.requires_grad for p in engine.module.parameters())
    num_exported = len(list(engine.export_parameters()))
    engine.close()
    return outputs, refused, num_exported


def train_steps(engine: ZeroEngine, steps: range) -> list[list[float]]:
    """(loss, norm) of each step on samples of this rank's own."""
    stats = [
        engine.train_mini_batch([make_batch(make_samples(3, seed=10 * step + dist.get_rank()))], weighted_loss)
        for step in steps
    ]
    return [[each.loss, each.grad_norm] for each in stats]


def hand_over_state(model_path: str, first: EngineConfig, second: EngineConfig) -> dict[str, Any]:
    return hand_over(lambda: build(model_path, first), lambda: build(model_path, second), train_steps)


def refuse_state(model_path: str, config: EngineConfig) -> dict[str, Any]:
    engine = build(model_path, config)
    train_steps(engine, range(1))
    before = state_of(engine)
    source = MemorySource(state=before, adam_steps=7, client_state={"num_steps": 7})

    def fail() -> None:
        raise OSError("the disk is gone")

    if dist.get_rank() == 1:
        source.check = fail
    error = None
    try:
        engine.load_state(source)
    except ds_engine.CheckpointError as raised:
        error = raised
    after = state_of(engine)
    unchanged = all(torch.equal(after[n][kind], t) for n, kinds in before.items() for kind, t in kinds.items())
    unchanged = unchanged and engine._num_steps == 1
    engine.close()
    return {"error": error, "unchanged": unchanged}


def offload_cycle(model_path: str, config: EngineConfig) -> Any:
    engine = build(model_path, config)
    report = engine.offload()
    engine.reload()
    stats = engine.memory_stats()
    engine.close()
    return report, stats


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


def main() -> None:
    address, rank, size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    faulthandler.register(signal.SIGUSR1)  # the pool asks for a traceback before it gives up on a rank
    torch.set_num_threads(1)
    ds_engine.init_distributed(
        rank, size, "127.0.0.1", port, CPU, timeout_s=float(sys.argv[5]) if len(sys.argv) > 5 else 300.0
    )
    with Client(address) as connection:
        connection.send_bytes(pickle.dumps(rank))
        while (request := pickle.loads(connection.recv_bytes())) is not None:
            function, kwargs = request
            try:
                result = globals()[function](**kwargs)
            except ds_engine.EngineError as error:
                result = error
            except Exception:
                result = ("crash", traceback.format_exc())
            connection.send_bytes(pickle.dumps(result))
    ds_engine.shutdown_distributed()


if __name__ == "__main__":
    main()
