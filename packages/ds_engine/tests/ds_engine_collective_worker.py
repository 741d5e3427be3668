"""What ranks send each other: recorded for tests that compare it with a plan, with DeepSpeed's own, or with nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils.z3_leaf_module import z3_leaf_module
from ds_engine_testkit import Sample, make_batch
from ds_engine_worker import build, weighted_loss

import ds_engine.zero.optimizer
from ds_engine import EngineConfig, ZeroEngine
from ds_engine.guard.collective_guard import record_collectives
from ds_engine.guard.collective_log import CollectiveRecord
from ds_engine.model.sequence_parallel import gather_heads, join_sequence_group, scatter_heads
from ds_engine.planning.transfer_plan import HookCall
from ds_engine.zero import zero3_gradients
from ds_engine.zero.optimizer import parameter_groups
from ds_engine.zero.zero3_gather import coalesce_gathers


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
    sizes: list[list[int]], dtype: torch.dtype, layers: list[int | None], staying: list[bool]
) -> tuple[bool, list[CollectiveRecord], list[CollectiveRecord], list[tuple[int, int]]]:
    """(parameters of these shapes gathered at once equal what was sharded, what DeepSpeed issues for it, and ours,
    the storage of each and the bytes before it there).

    Args:
        layers: which leaf each belongs to.
        staying: which are small enough to stay gathered.
    """
    torch.manual_seed(0)
    whole = [torch.randn(shape, dtype=dtype) for shape in sizes]
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in whole]
    module = torch.nn.ParameterList(parameters)
    deepspeed.zero.Init(module=module, dtype=dtype, config_dict_or_path={"train_batch_size": dist.get_world_size()})
    leaves: dict[int, torch.nn.Module] = {}
    for parameter, layer, stays in zip(parameters, layers, staying, strict=True):
        cast("Any", parameter).ds_persist = stays
        if layer is not None:
            cast("Any", parameter).ds_z3_leaf_module = leaves.setdefault(layer, torch.nn.Module())
    logs, equal = [], True
    places: list[tuple[int, int]] = []
    for ours in (False, True):
        if ours:
            coalesce_gathers(module, None)
        with record_collectives() as records:
            cast("Any", parameters[0]).all_gather_coalesced(reversed(parameters)).wait()
        logs.append(list(records))
        equal = equal and all(torch.equal(p, t) and p.shape == t.shape for p, t in zip(parameters, whole, strict=True))
        places = [(p.untyped_storage().data_ptr(), p.storage_offset() * p.element_size()) for p in parameters]
        for parameter in parameters:
            cast("Any", parameter).partition()
    return equal, logs[0], logs[1], places


def scattered_both_ways(sizes: list[int], dtype: torch.dtype, travel: torch.dtype) -> bool:
    """Whether this rank's shares of the mean gradients of these sizes are DeepSpeed's to the last bit."""
    torch.manual_seed(dist.get_rank())
    gradients = [torch.randn(size, dtype=dtype) for size in sizes]
    group = dist.group.WORLD
    params = [SimpleNamespace(grad=gradient.clone(), ds_process_group=group) for gradient in gradients]
    theirs = reduce_scatter_coalesced([gradient.to(travel) for gradient in gradients], group)
    ours = zero3_gradients._reduce_scatter(params, travel)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def swapped_heads(num_heads: tuple[int, int], lengths: list[int]) -> tuple[float, list[bool], int]:
    """Heads for tokens and back, compiled and not, rows of several lengths: (distance of outputs and gradients,
    whether the same collectives were issued, graphs)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    sp_group = join_sequence_group(dist.get_world_size())
    assert sp_group is not None

    def there_and_back(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads_first = (x.transpose(0, 1) for x in scatter_heads(query * 2, key.sin(), value, sp_group))
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return gather_heads(out.transpose(0, 1), sp_group).cos()

    compiled = torch.compile(there_and_back, dynamic=True, fullgraph=True, backend="aot_eager")
    farthest, same = 0.0, []
    for length in lengths:
        query, kv = (torch.randn(length, n, 8, requires_grad=True) for n in num_heads)
        results, logs = [], []
        for function in (there_and_back, compiled):
            with record_collectives() as records:
                out = function(query, kv, kv)
                results.append([out.detach(), *torch.autograd.grad(out.square().sum(), (query, kv))])
            logs.append([(r.operation, r.dtype, r.num_elements) for r in records])
        farthest = max(farthest, *(float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True)))
        same.append(logs[0] == logs[1] and len(logs[0]) == 4)
    dist.destroy_process_group(sp_group.group)
    return farthest, same, torch._dynamo.utils.counters["stats"]["unique_graphs"]


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


def visited_both_ways(
    model_path: str, config: EngineConfig, steps: list[list[list[Sample]]], *, short: bool
) -> tuple[list[Any], dict[str, torch.Tensor], list[tuple[Any, ...]], list[int], list[int]]:
    """Train with the fast path (`short`) or without it: (stats, final weights, collectives of all steps; per step: the
    number of DeepSpeed's own fetches, the elements it counts as gathered at the end of the last backward pass)."""
    shorten = ds_engine.zero.optimizer.add_fetch_fast_path if short else lambda _: None
    with patch.object(ds_engine.zero.optimizer, "add_fetch_fast_path", shorten):
        engine = build(model_path, config)
    optimizer = engine.deepspeed.optimizer
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    look, end_step = coordinator._fetch_sub_module_impl, optimizer.step
    looks: list[int] = []
    live: list[int] = []

    def count(*arguments: Any) -> None:
        looks[-1] += 1
        look(*arguments)

    def note_and_step(*arguments: Any, **options: Any) -> None:
        live.append(coordinator._PartitionedParameterCoordinator__n_available_params)
        end_step(*arguments, **options)

    coordinator._fetch_sub_module_impl, optimizer.step = count, note_and_step
    stats = []
    with record_collectives() as records:
        for micro_batches in steps:
            looks.append(0)
            stats.append(engine.train_mini_batch([make_batch(m) for m in micro_batches], weighted_loss))
            engine.log_probs([make_batch(m) for m in micro_batches])
    weights = {name: tensor.clone() for name, tensor in engine.export_parameters(torch.float32)}
    engine.close()
    return stats, weights, [(r.operation, r.dtype, r.num_elements) for r in records], looks, live


def recorded_zero3_steps(
    model_path: str, config: EngineConfig, steps: list[list[list[Sample]]]
) -> tuple[list[list[CollectiveRecord]], list[list[HookCall]], list[int], list[list[int]]]:
    """(what each step issued, the hooks of each, sizes of the parameters, groups of the optimizer)."""
    logs, hook_calls, sizes, groups, _ = recorded_zero3_run(model_path, config, steps)
    return logs, hook_calls, sizes, groups


def recorded_zero3_run(model_path: str, config: EngineConfig, steps: list[list[list[Sample]]]) -> tuple[Any, ...]:
    """What `recorded_zero3_steps` returns, and the collectives of log-probs of the last step's micro batches."""
    engine = build(model_path, config)
    numbers = {id(p): i for i, p in enumerate(engine.module.parameters())}
    sizes = [p.ds_numel for p in engine.module.parameters()]
    logs, hook_calls = [], []
    for micro_batches in steps:
        with record_collectives() as records, recorded_hook_calls(engine) as noted:
            engine.train_mini_batch([make_batch(m) for m in micro_batches], weighted_loss)
        logs.append(list(records))
        hook_calls.append(list(noted))
    with record_collectives() as in_log_probs:
        engine.log_probs([make_batch(m) for m in steps[-1]])
    groups = [[numbers[id(p)] for p in g["params"]] for g in parameter_groups(engine.module, config.optim)]
    engine.close()
    return logs, hook_calls, sizes, groups, list(in_log_probs)


@contextmanager
def recorded_hook_calls(engine: ZeroEngine) -> Iterator[list[HookCall]]:
    """What DeepSpeed's hooks of stage 3 are called for inside, in order."""
    numbers = {id(p): i for i, p in enumerate(engine.module.parameters())}
    optimizer = engine.deepspeed.optimizer
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    hook_calls: list[HookCall] = []

    def note(kind: str, original: Any) -> Any:
        def hook(submodule: Any, *args: Any, **options: Any) -> Any:
            own = sorted({numbers[id(p)] for p in iter_params(submodule, recurse=z3_leaf_module(submodule))})
            hook_calls.append(HookCall(kind=kind, submodule=submodule.ds_id, parameters=tuple(own)))
            return original(submodule, *args, **options)

        return hook

    reduce = optimizer.reduce_ready_partitions_and_remove_grads

    def note_gradient(parameter: Any) -> None:
        hook_calls.append(HookCall(kind="gradient", parameters=(numbers[id(parameter)],)))
        reduce(parameter)

    optimizer.reduce_ready_partitions_and_remove_grads = note_gradient
    originals = {kind: getattr(coordinator, f"{kind}_sub_module") for kind in ("fetch", "release")}
    for kind, original in originals.items():
        setattr(coordinator, f"{kind}_sub_module", note(kind, original))
    yield hook_calls
    for kind, original in originals.items():  # the engine's own, not DeepSpeed's: those would come back by delattr
        setattr(coordinator, f"{kind}_sub_module", original)
    optimizer.reduce_ready_partitions_and_remove_grads = reduce
