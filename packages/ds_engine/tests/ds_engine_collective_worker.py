"""Collectives of ranks, recorded for tests that compare them between ranks, steps or with DeepSpeed's own."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from ds_engine_testkit import Sample, make_batch
from ds_engine_worker import build, weighted_loss, weights_of

import ds_engine.zero.optimizer
from ds_engine import EngineConfig, ZeroEngine, dense_log_prob
from ds_engine.guard.collective_guard import record_collectives
from ds_engine.guard.collective_log import CollectiveRecord
from ds_engine.model.attention import ATTENTION_NAME, register_packed_attention
from ds_engine.model.sequence_parallel import gather_heads, join_sequence_group, scatter_heads
from ds_engine.zero import zero3_gradients
from ds_engine.zero.zero3_gather import coalesce_gathers


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
    """True if this rank's shares of the mean gradients of these sizes are DeepSpeed's to the last bit."""
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
) -> tuple[list[list[CollectiveRecord]], list[int]]:
    """(collectives of each step, sizes of the parameters)."""
    engine = build(model_path, config)
    logs = []
    for micro_batches in steps:
        with record_collectives() as records:
            engine.train_mini_batch([make_batch(m) for m in micro_batches], weighted_loss)
        logs.append(list(records))
    sizes = [getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()]
    engine.close()
    return logs, sizes


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
    weights = weights_of(engine)
    engine.close()
    return stats, weights, [(r.operation, r.dtype, r.num_elements) for r in records], looks, live


class ListedExperts(torch.nn.ModuleList):
    """Experts as modules of their own, of which only those with tokens run: the layout of transformers 4."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        for gate_up, down in zip(stacked.gate_up_proj.detach(), stacked.down_proj.detach(), strict=True):
            weights = {"gate_proj": gate_up.chunk(2)[0], "up_proj": gate_up.chunk(2)[1], "down_proj": down}
            expert = torch.nn.Module()
            for name, weight in weights.items():
                linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
                linear.weight.data.copy_(weight)
                expert.add_module(name, linear)
            self.append(expert)

    def forward(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        out_TH = torch.zeros_like(hidden_TH)
        for number in index_TK.unique().tolist():
            expert: Any = self[number]
            rows, slots = (index_TK == number).nonzero(as_tuple=True)
            x = hidden_TH[rows]
            inner = torch.nn.functional.silu(expert.gate_proj(x)) * expert.up_proj(x)
            out_TH = out_TH.index_add(0, rows, expert.down_proj(inner) * weights_TK[rows, slots, None])
        return out_TH


def train_listed_experts(model_path: str, config: EngineConfig, steps: list[list[list[Sample]]]) -> dict[str, Any]:
    """`train` of a mixture whose experts are a ModuleList."""
    from transformers import AutoModelForCausalLM

    register_packed_attention()
    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation=ATTENTION_NAME)
    for layer in model.model.layers:
        layer.mlp.experts = ListedExperts(layer.mlp.experts)
    model._weight_conversions = []
    with closing(ZeroEngine(model, config, log_prob_fn=dense_log_prob, device=torch.device("cpu"))) as engine:
        stats = [engine.train_mini_batch([make_batch(m) for m in micro], weighted_loss) for micro in steps]
        return {"stats": stats, "weights": weights_of(engine)}
