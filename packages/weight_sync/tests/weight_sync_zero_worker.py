"""Two ranks of a DeepSpeed job that trains a step and pushes. Run by test_weight_sync_zero.py."""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # with torch's compiler
import torch
import torch.distributed as dist
import transformers
from transformers.integrations import HfDeepSpeedConfig
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401  (once, before the fork, as all of these)

from plinth_testing import run_ranks
from weight_sync import WeightPusher, ZeroSource, plan_buckets
from weight_sync.tensors import slot_view


def build_engine(folder: str, stage: int, **settings: Any) -> tuple[Any, Any]:
    """An engine after one real optimizer step; keep the second value alive for stage 3."""
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 100, **settings}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    keep = HfDeepSpeedConfig(config) if stage == 3 else None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    ids = torch.arange(3, 35)[None] + dist.get_rank()
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return engine, keep


def full_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Reference weights: DeepSpeed's own gather, one parameter at a time."""
    weights = {}
    for name, param in engine.module.named_parameters():
        if hasattr(param, "ds_id"):
            with deepspeed.zero.GatheredParameters([param]):
                weights[name] = param.detach().clone()
        else:
            weights[name] = param.detach().clone()
    return weights


def check_source(engine: Any, rank: int) -> None:
    """Check that buckets of several sizes hold exactly the reference, in full precision and cast."""
    reference = full_weights(engine)
    for dtype, bound in ((None, 1 << 30), (None, 20_000), (torch.bfloat16, 50_000)):
        source = ZeroSource(engine.module, dtype)
        plan = plan_buckets(source.manifest(), bound)
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, plan.digest)
        assert len(set(digests)) == 1, "ranks disagree on the plan"
        seen = set()
        for bucket in plan.buckets:
            out = torch.full((bucket.nbytes,), 77, dtype=torch.uint8) if rank == 0 else None
            source.fill(bucket, out)
            for slot in bucket.slots if out is not None else ():
                want = reference[slot.name].to(dtype or torch.float32)
                assert torch.equal(slot_view(out, slot), want), slot.name
                seen.add(slot.name)
        assert rank or seen == set(reference)


class OuterProduct:
    """A low-rank update of a square weight, made of two other parameters."""

    def __init__(self, a: torch.nn.Parameter, b: torch.nn.Parameter) -> None:
        self.parts = [a, b]

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float() + 0.5 * torch.outer(*self.parts)


class Doubled:
    """A TensorPacking of fp32 parameters: twice their values, in another shape and dtype."""

    dtype = torch.float64

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return (2 * packed.to(self.dtype)).view(self.shape)


def check_updates_and_packings(engine: Any, rank: int) -> None:
    """Renamed parameters, one omitted, two with a low-rank update, two packed, one of these with an update: the sent
    tensors are merged and unpacked, and the module is unchanged."""
    reference = full_weights(engine)
    params = dict(engine.module.named_parameters())
    first, second = [name for name in params if name.endswith("layernorm.weight")][:2]
    squares = [name for name, value in reference.items() if value.shape == 2 * reference[first].shape]
    assert len(squares) >= 2
    table = "model.embed_tokens.weight"
    packings = {squares[0]: Doubled(*reference[squares[0]].shape), table: Doubled(reference[table].numel())}
    update = OuterProduct(params[first], params[second])
    named = [
        SimpleNamespace(
            name=f"sent.{name}",
            parameter=param,
            low_rank=update if name in squares else None,
            packed=packings.get(name),
        )
        for name, param in params.items()
        if name != second
    ]
    source = ZeroSource(named)
    seen = set()
    for bucket in plan_buckets(source.manifest(), 20_000).buckets:
        out = torch.full((bucket.nbytes,), 77, dtype=torch.uint8) if rank == 0 else None
        source.fill(bucket, out)
        for slot in bucket.slots if out is not None else ():
            name = slot.name.removeprefix("sent.")
            want = packings[name].unpack(reference[name]) if name in packings else reference[name]
            if name in squares:
                want = want + 0.5 * torch.outer(reference[first], reference[second])
            torch.testing.assert_close(slot_view(out, slot), want, rtol=1e-6, atol=1e-6)
            seen.add(slot.name)
    assert rank or seen == {f"sent.{name}" for name in reference if name != second}
    assert all(torch.equal(value, reference[name]) for name, value in full_weights(engine).items())


def main(rank: int) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--url")
    parser.add_argument("--api-key")
    parser.add_argument("--out")
    args = parser.parse_args()
    # Not needed, and a killed compiler leaves a lock that later processes wait for indefinitely.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", dist_init_required=True, verbose=False)
    settings: dict[str, Any]
    for stage, settings in ((2, {}), (3, {"offload_param": {"device": "cpu"}}), (3, {"zero_hpz_partition_size": 2})):
        engine, keep = build_engine(args.folder, stage, **settings)
        check_source(engine, rank)
        if "zero_hpz_partition_size" in settings:  # the secondary copies exist from a forward to the next step
            before = plan_buckets(ZeroSource(engine.module).manifest(), 20_000).digest
            engine(input_ids=torch.arange(3, 35)[None])
            assert any(p.ds_secondary_tensor is not None for p in engine.module.parameters())
            assert plan_buckets(ZeroSource(engine.module).manifest(), 20_000).digest == before
            check_source(engine, rank)
        check_updates_and_packings(engine, rank)
        engine.destroy()
        del engine, keep
    engine, _keep = build_engine(args.folder, 3)
    check_source(engine, rank)
    check_updates_and_packings(engine, rank)
    endpoint = SimpleNamespace(url=args.url, api_key=args.api_key)
    with WeightPusher(ZeroSource(engine.module), [endpoint], rank=rank) as pusher:
        report = pusher.push(5)
    assert report.version == 5
    assert report.total_s > 0
    assert report.transports == {args.url: "shm"}, "every rank knows what rank 0 chose"
    weights = full_weights(engine)
    if rank == 0:
        torch.save(weights, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(main)
