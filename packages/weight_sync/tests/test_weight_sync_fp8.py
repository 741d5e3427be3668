"""Blockwise FP8: round trip, layout, and Fp8Source."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weight_sync import ModuleSource, dequantize_blocks, plan_buckets, quantize_blocks
from weight_sync.sources.fp8 import Fp8Source
from weight_sync.tensors import slot_view


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(-8, 8))
def test_round_trip_error_is_at_most_half_a_step(rows: int, columns: int, dtype: torch.dtype, power: int) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    weight = (torch.randn(rows, columns, generator=generator) * 2.0**power).to(dtype)
    fp8, scales = quantize_blocks(weight)
    assert fp8.dtype == torch.float8_e4m3fn
    assert fp8.shape == weight.shape
    assert fp8.is_contiguous()
    assert scales.dtype == torch.float32
    assert scales.shape == (-(-rows // 128), -(-columns // 128))
    # e4m3 has 3 mantissa bits: half a step is 1/16 of the value, and 2**-10 scales below the smallest normal number
    each = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    error = (dequantize_blocks(fp8, scales) - weight.float()).abs()
    assert bool((error <= weight.float().abs() / 16 * 1.001 + each * 2.0**-10).all())
    assert float(fp8.float().abs().max()) == 448.0


def test_each_scale_belongs_to_its_own_block() -> None:
    weight = torch.ones(256, 200)
    weight[128:, :128] = 4.0
    weight[:128, 128:] = 0.0
    fp8, scales = quantize_blocks(weight)
    torch.testing.assert_close(scales, torch.tensor([[1 / 448, 1.0], [4 / 448, 1 / 448]]))
    assert torch.equal(fp8.float(), torch.where(weight > 0, 448.0, 0.0))
    assert torch.allclose(dequantize_blocks(fp8, scales), weight)


@pytest.mark.parametrize("bound", [1, 1 << 30])
def test_source_quantizes_linear_weights_only(bound: int) -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"embed": nn.Embedding(5, 160), "up": nn.Linear(160, 300), "norm": nn.LayerNorm(160)})
    source = Fp8Source(ModuleSource(module, torch.bfloat16))
    got = {}
    for bucket in plan_buckets(source.manifest(), bound).buckets:
        out = torch.empty(bucket.nbytes, dtype=torch.uint8)
        source.fill(bucket, out)
        source.fill(bucket, None)
        got |= {slot.name: slot_view(out, slot).clone() for slot in bucket.slots}
    params = {name: param.detach().bfloat16() for name, param in module.named_parameters()}
    fp8, scales = quantize_blocks(params.pop("up.weight"))
    assert torch.equal(got.pop("up.weight").view(torch.uint8), fp8.view(torch.uint8))
    assert torch.equal(got.pop("up.weight_scale_inv"), scales)
    assert got.keys() == params.keys()
    assert all(torch.equal(got[name], param) for name, param in params.items())
