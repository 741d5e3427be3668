"""Operations of `servers/exact`: a row has the same bits beside any others, and the value of a reference in fp64."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rollout_vllm_helpers import run_under_the_interpreter

from rollout_vllm import RolloutConfig
from rollout_vllm.servers.command import server_arguments, server_environment
from rollout_vllm.servers.exact import operations
from rollout_vllm.servers.exact.operations import attention

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEADS = [(4, 2, 16), (9, 3, 64), (2, 2, 32)]
"""Query heads, key heads, width."""


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def paged(keys: torch.Tensor, values: torch.Tensor, block: int, seed: int) -> tuple[torch.Tensor, ...]:
    """(cache of keys, cache of values, table) as vLLM keeps them: in scattered blocks, keys beside values."""
    length, heads, width = keys.shape
    num = -(-length // block)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(num + 3, generator=generator)[:num]
    cache = torch.full((num + 3, heads, block, 2 * width), 7.0, dtype=keys.dtype)  # others' tokens
    at = torch.arange(length)
    cache[table[at // block], :, at % block] = torch.cat((keys, values), dim=-1)
    return cache[..., :width], cache[..., width:], table.to(torch.int32)[None]


@DTYPES
@given(begin=st.integers(0, 69), num=st.integers(1, 70))
def test_a_row_has_the_same_bits_beside_any_others(dtype: torch.dtype, begin: int, num: int) -> None:
    x, weight, bias = drawn(70, 96, dtype=dtype), drawn(200, 96, dtype=dtype), drawn(200, dtype=dtype)
    part = slice(begin, begin + num)
    for rows in (
        lambda x: operations.linear(x, weight, bias),
        lambda x: operations.rms_norm(x, weight[0], 1e-6),
        lambda x: operations.log_probs(operations.linear(x, weight)),
        lambda x: operations.token_log_probs(operations.linear(x, weight), torch.full((len(x),), 7)),
    ):
        assert torch.equal(rows(x[part]), rows(x)[part])


@DTYPES
def test_columns_of_a_merged_product_are_those_of_the_single_ones(dtype: torch.dtype) -> None:
    x, q, k = drawn(3, 96, dtype=dtype), drawn(64, 96, dtype=dtype), drawn(24, 96, dtype=dtype, seed=1)
    merged = operations.linear(x, torch.cat((q, k)))
    assert torch.equal(merged, torch.cat((operations.linear(x, q), operations.linear(x, k)), dim=-1))


@DTYPES
@pytest.mark.parametrize(("heads", "key_heads", "width"), HEADS)
@given(begin=st.integers(0, 149), num=st.integers(1, 150), block=st.sampled_from([16, 32, 128]))
def test_queries_with_a_paged_cache_have_the_bits_of_the_whole_sequence(
    dtype: torch.dtype, heads: int, key_heads: int, width: int, begin: int, num: int, block: int
) -> None:
    length, scale = 150, width**-0.5
    q = drawn(length, heads, width, dtype=dtype)
    k, v = (drawn(length, key_heads, width, dtype=dtype, seed=n) for n in (1, 2))
    rows = torch.arange(length, dtype=torch.int32)[None]  # a trainer's: one token a block
    whole = attention(q, k[:, :, None], v[:, :, None], rows, ints(0, length), ints(length), scale, length)
    end = min(length, begin + num)
    cache = paged(k[:end], v[:end], block, seed=begin)
    part = attention(q[begin:end], *cache, ints(0, end - begin), ints(end), scale, end - begin)
    assert torch.equal(part, whole[begin:end])


@DTYPES
@pytest.mark.parametrize(("heads", "key_heads", "width"), HEADS)
def test_attention_of_several_sequences_is_the_softmax(
    dtype: torch.dtype, heads: int, key_heads: int, width: int
) -> None:
    lengths, queries, scale = [100, 37, 1], [100, 5, 1], width**-0.5
    q = drawn(sum(queries), heads, width, dtype=dtype)
    k, v = (drawn(sum(lengths), key_heads, width, dtype=dtype, seed=n) for n in (1, 2))
    table = torch.nn.utils.rnn.pad_sequence(
        list(torch.arange(sum(lengths), dtype=torch.int32).split(lengths)), batch_first=True
    )
    out = attention(q, k[:, :, None], v[:, :, None], table, ints(0, 100, 105, 106), ints(*lengths), scale, 100)
    for query, key, value, result in zip(
        *(x.split(n) for x, n in ((q, queries), (k, lengths), (v, lengths), (out, queries))), strict=True
    ):
        mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
        inputs = (x.double().transpose(0, 1)[None] for x in (query, key, value))
        expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=scale, enable_gqa=True)
        expected = expected[0].transpose(0, 1).to(dtype)
        torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


KERNELS = """
import torch
from rollout_vllm.servers.exact import kernels, operations

def drawn(*shape, seed=0):  # fp32: Triton's interpreter has no products in bf16
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
ints = lambda *values: torch.tensor(values, dtype=torch.int32)
x, weight, bias = drawn(70, 96), drawn(200, 96, seed=1), drawn(200)
close(kernels.matmul(x, weight, bias), operations.linear(x, weight, bias))
close(kernels.rms_norm(x, weight[0], 1e-6), operations.rms_norm(x, weight[0], 1e-6))
inside = drawn(70, 96).view(70, 3, 32)[:, :2]  # heads of a merged product
close(kernels.rms_norm(inside, weight[0, :32], 1e-6), operations.rms_norm(inside, weight[0, :32], 1e-6))
table = torch.cat((drawn(90, 1, 32), drawn(90, 1, 32, seed=1)), dim=1)
heads = drawn(70, 5, 32)
positions = torch.randint(90, (70,), generator=torch.Generator().manual_seed(0))
assert torch.equal(kernels.rotate(heads, table, positions), operations.rotate(heads, table, positions))
kernels._CHUNK = 16
for there in (True, False):
    kernels._same_bits.clear()
    kernels._library = (lambda x, weight, bias: kernels.matmul(x, weight, bias)) if there else operations.linear
    close(kernels.linear(x, weight, bias), kernels.matmul(x, weight, bias))
assert torch.equal(kernels.linear(x, weight, bias), kernels.matmul(x, weight, bias))
logits = drawn(3, 5000)
logits[0, :2500] = float("-inf")  # whole blocks of masked tokens
close(kernels.log_sum_exp(logits), logits.logsumexp(-1))
for heads, key_heads, width in ((9, 3, 64), (4, 2, 16)):
    cache = drawn(12, key_heads, 32, 2 * width)
    table = torch.randperm(12, generator=torch.Generator().manual_seed(0))[:10].to(torch.int32).view(2, 5)
    q = drawn(71, heads, width)
    case = (q, cache[..., :width], cache[..., width:], table, ints(0, 1, 71), ints(100, 137), width**-0.5)
    close(kernels.attention(*case, 70), operations.attention(*case, 70))
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_under_the_interpreter_compute_the_operations() -> None:
    assert "equal" in run_under_the_interpreter(KERNELS)


def test_a_matching_server_has_no_compiled_layers_and_no_other_invariance() -> None:
    config = RolloutConfig(match_trainer=True, deterministic=True)
    arguments = server_arguments(config, "model", port=1, device="cuda")
    assert {"--compilation-config.mode=0", "--compilation-config.cudagraph_mode=FULL_DECODE_ONLY"} <= set(arguments)
    environment = server_environment({}, config, device="cuda", api_key="k", num_cores=8)
    assert environment["PLINTH_ROLLOUT_EXACT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in environment
