"""ZeRO-3 weights behind vLLM's own trainer-side weight transfer: `ZeroSource` as a `WeightSource`.

    python examples/zero3_weight_source.py

vLLM's trainer engines (`WeightTransferTrainerFactory`, vLLM 0.26 or newer) read a `WeightSource`: `metadata()` without
transferring anything, then an iterator of full tensors. vLLM's own `ModuleSource` sees only empty tensors under ZeRO-3.

What it buys: any trainer on ZeRO-3 can use these engines, and a bucket of parameters is gathered at once instead of one
collective per parameter. The script trains two DeepSpeed ranks on the CPU, reads all weights in vLLM's order both ways,
and compares bits, number of collectives and time.

Measured with this command (two ranks, gloo, 135 parameters, 11 MB): 1 collective and 45 ms instead of 135 and 240 ms,
135 of 135 tensors bit-equal. All 135 tensors of `ModuleSource` are empty.

Only `root` receives tensors, which suits engines in which rank 0 sends (NCCL); on the other ranks the iterator takes
part in the collectives and yields tensors without storage. The engines themselves need GPUs: sending was not run here.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource

from ds_engine import record_collectives
from plinth_testing import run_ranks
from weight_sync import ZeroSource, plan_buckets


class ZeroWeightSource(WeightSource):
    """A module trained by DeepSpeed (ZeRO-1, 2 or 3), for vLLM's trainer engines. Collective: iterate on all ranks.

    At most two buckets are in memory on the root while an engine holds no tensor longer than the next one.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 256 << 20,
        root: int = 0,
    ) -> None:
        self._source = ZeroSource(module, dtype, root=root)
        self._manifest = self._source.manifest()
        self._plan = plan_buckets(self._manifest, bucket_bytes)
        self._device = device
        self._is_root = dist.get_rank() == root

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(e.name, getattr(torch, e.dtype), tuple(e.shape)) for e in self._manifest.entries]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._plan.buckets:
            bytes_N = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device) if self._is_root else None
            self._source.fill(bucket, bytes_N)
            for slot in bucket.slots:
                dtype = getattr(torch, slot.dtype)
                if bytes_N is None:
                    yield slot.name, torch.empty(slot.shape, dtype=dtype, device="meta")
                else:
                    flat = bytes_N[slot.offset : slot.offset + slot.nbytes].view(dtype)
                    yield slot.name, flat.view(slot.shape)


class GatheringSource(WeightSource):
    """The same without weight_sync: DeepSpeed gathers one parameter after the other, on every rank."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def metadata(self) -> list[ParamMeta]:
        parameters: list[tuple[str, Any]] = list(self._module.named_parameters())
        return [ParamMeta(name, p.dtype, tuple(p.ds_shape)) for name, p in parameters]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                weight = parameter.data.clone()  # the view would be gone after the block
            yield name, weight


def train_a_step(num_layers: int) -> torch.nn.Module:
    """A small model after one step of ZeRO-3."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=4096,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        )
    )
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine: Any = deepspeed.initialize(model=model, config=settings)[0]
    ids = torch.randint(4096, (1, 16))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    module: torch.nn.Module = engine.module
    return module


def read(source: WeightSource) -> tuple[dict[str, Tensor], int, float]:
    """(tensors, collectives, seconds), in vLLM's groups: `iter_groups` checks the order against the metadata."""
    start = time.perf_counter()
    with record_collectives() as calls:
        tensors = {
            name: tensor for names, group in source.iter_groups() for name, tensor in zip(names, group, strict=True)
        }
    return tensors, len(calls), time.perf_counter() - start


def rank_main(rank: int) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not needed, and its compilation takes minutes
    dist.init_process_group("gloo")
    module = train_a_step(options().layers)
    empty = sum(not weight.numel() for _, weight in ModuleSource(module))
    bucketed = ZeroWeightSource(module, torch.device("cpu"))
    one_by_one = GatheringSource(module)
    assert bucketed.metadata() == one_by_one.metadata()
    for source in (bucketed, one_by_one):
        read(source)  # warm-up
    ours, our_calls, our_s = read(bucketed)
    theirs, their_calls, their_s = read(one_by_one)
    if rank == 0:
        equal = sum(torch.equal(ours[name], weight) for name, weight in theirs.items())
        size_mb = sum(weight.nbytes for weight in theirs.values()) / 1e6
        print(f"{size_mb:.1f} MB; vLLM's ModuleSource: {empty} of {len(theirs)} tensors are empty under ZeRO-3")
        print(f"one by one:  {their_calls} collectives, {1000 * their_s:.0f} ms")
        print(
            f"ZeroSource:  {our_calls} collectives, {1000 * our_s:.0f} ms; {equal} of {len(theirs)} tensors are equal"
        )
    else:
        assert all(weight.is_meta for weight in ours.values())
    dist.barrier()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    return parser.parse_args()


if __name__ == "__main__":
    options()
    run_ranks(rank_main)
