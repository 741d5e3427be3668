"""Blockwise FP8: round trip, layout, and the source that sends it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weight_sync import ModuleSource, SyncConfig, plan_buckets, quantise_blocks, restore_blocks
from weight_sync.sources.base import slot_view
from weight_sync.sources.fp8 import Fp8Source


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(-8, 8))
def test_round_trip_is_within_half_a_step_of_eight_bits(
    rows: int, columns: int, dtype: torch.dtype, power: int
) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    weight = (torch.randn(rows, columns, generator=generator) * 2.0**power).to(dtype)
    eight_bits, scales = quantise_blocks(weight)
    assert eight_bits.dtype == torch.float8_e4m3fn
    assert eight_bits.shape == weight.shape
    assert eight_bits.is_contiguous()
    assert scales.dtype == torch.float32
    assert scales.shape == (-(-rows // 128), -(-columns // 128))
    # e4m3: 3 bits of mantissa, so half a step is 1/16 of the value; below the smallest normal number 2**-10 of 1
    each = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    error = (restore_blocks(eight_bits, scales) - weight.float()).abs()
    assert bool((error <= weight.float().abs() / 16 * 1.001 + each * 2.0**-10).all())
    assert float(eight_bits.float().abs().max()) == 448.0


def test_each_scale_belongs_to_its_own_block() -> None:
    weight = torch.ones(256, 200)
    weight[128:, :128] = 4.0
    weight[:128, 128:] = 0.0
    eight_bits, scales = quantise_blocks(weight)
    torch.testing.assert_close(scales, torch.tensor([[1 / 448, 1.0], [4 / 448, 1 / 448]]))
    assert torch.equal(eight_bits.float(), torch.where(weight > 0, 448.0, 0.0))
    assert torch.allclose(restore_blocks(eight_bits, scales), weight)


@pytest.mark.parametrize("bound", [1, 1 << 30])
def test_source_sends_linear_weights_in_eight_bits_and_the_rest_as_it_is(bound: int) -> None:
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
    eight_bits, scales = quantise_blocks(params.pop("up.weight"))
    assert torch.equal(got.pop("up.weight").view(torch.uint8), eight_bits.view(torch.uint8))
    assert torch.equal(got.pop("up.weight_scale_inv"), scales)
    assert got.keys() == params.keys()
    assert all(torch.equal(got[name], param) for name, param in params.items())


def test_the_key_takes_two_words() -> None:
    with pytest.raises(ValueError, match="quantise: 'int3'"):
        SyncConfig(quantise="int3")  # type: ignore[arg-type]
