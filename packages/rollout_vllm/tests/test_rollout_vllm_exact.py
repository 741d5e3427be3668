"""Operations of `servers/exact`: a row has the same bits beside any others, and the value of a reference in fp64."""

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from plinth_testing import raises, run_under_the_interpreter
from rollout_vllm import RolloutConfig, RolloutConfigError
from rollout_vllm.servers.command import server_arguments, server_environment
from rollout_vllm.servers.exact import operations
from rollout_vllm.servers.exact.install import match_transformers
from rollout_vllm.servers.exact.operations import attention
from rollout_vllm.servers.launch import _check_tested
from rollout_vllm.servers.model_folder import check_match
from rollout_vllm.servers.patch import FENCE

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


MIXTURE = (24, 6, 3)


def matrices(x: torch.Tensor, width: int, num_experts: int) -> list[torch.Tensor]:
    """Gate and up projections, down projections, and the router of a mixture."""
    generator, hidden = torch.Generator(x.device).manual_seed(3), x.shape[1]
    shapes = (num_experts, 2 * width, hidden), (num_experts, hidden, width), (num_experts, hidden)
    return [(torch.randn(s, generator=generator, device=x.device) / s[-1] ** 0.5).to(x.dtype) for s in shapes]


def mixture(x: torch.Tensor, width: int, num_experts: int, per_token: int) -> tuple[torch.Tensor, ...]:
    """(output, weights and experts of each token)"""
    up, down, router = matrices(x, width, num_experts)
    routes = operations.route(operations.linear(x, router), per_token, True)
    return operations.experts(x, up, down, *routes), *routes


def check_values(x: torch.Tensor, width: int, num_experts: int, per_token: int) -> None:
    """Compare with every expert of every token in fp64."""
    out, weights, index = mixture(x, width, num_experts, per_token)
    up, down, router = (each.double() for each in matrices(x, width, num_experts))
    probs = (x.double() @ router.T).softmax(-1).gather(-1, index)
    gates, ups = (up[index] @ x.double()[:, None, :, None]).chunk(2, dim=-2)
    terms = (down[index] @ (F.silu(gates) * ups))[..., 0] * weights[..., None]
    tolerance = {"rtol": TOLERANCE[x.dtype], "atol": TOLERANCE[x.dtype]}
    torch.testing.assert_close(weights.double(), probs / probs.sum(-1, keepdim=True), **tolerance)
    torch.testing.assert_close(out.double(), terms.sum(1), **tolerance)


@DTYPES
def test_a_mixture_is_the_weighted_sum_of_its_experts(dtype: torch.dtype) -> None:
    check_values(drawn(70, 96, dtype=dtype), *MIXTURE)


@DTYPES
@given(begin=st.integers(0, 69), num=st.integers(1, 70))
def test_a_row_has_the_same_bits_beside_any_others(dtype: torch.dtype, begin: int, num: int) -> None:
    x, weight, bias = drawn(70, 96, dtype=dtype), drawn(200, 96, dtype=dtype), drawn(200, dtype=dtype)
    part = slice(begin, begin + num)
    for rows in (
        lambda x: operations.linear(x, weight, bias),
        lambda x: operations.rms_norm(x, weight[0], 1e-6),
        lambda x: operations.silu_and_mul(x[:, :37], x[:, 1:38]),
        lambda x: mixture(x, *MIXTURE)[0],
        lambda x: operations.log_probs(operations.linear(x, weight)),
        lambda x: operations.token_log_probs(operations.linear(x, weight), torch.full((len(x),), 7)),
    ):
        assert torch.equal(rows(x[part]), rows(x)[part])


def test_equal_experts_are_chosen_in_their_order() -> None:
    """Logits in bf16 are often equal."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0, 1.0]]).repeat(50, 1)
    weights, index = operations.route(logits, 3, True)
    assert index.tolist() == [[1, 4, 0]] * 50
    expected = torch.tensor([2.0, 2.0, 1.0]).softmax(0).expand(50, 3)
    torch.testing.assert_close(weights, expected)
    alone = operations.route(logits, 3, False)[0]
    torch.testing.assert_close(alone, logits.softmax(-1)[:, [1, 4, 0]])


def test_a_mixture_chooses_and_adds_in_the_order_of_a_plain_loop() -> None:
    """128 experts with few different scores, 16 a token: torch's own topk and sum take other orders."""
    logits = drawn(50, 128, dtype=torch.float32).round()
    weights, index = operations.route(logits, 16, True)
    order = [sorted(range(128), key=lambda number, row=row: (-row[number], number))[:16] for row in logits.tolist()]
    assert index.tolist() == order
    probs, total = logits.softmax(-1).gather(-1, index), torch.zeros(50)
    rows, place = drawn(800, 24, dtype=torch.float32) * 10 ** drawn(800, 1, dtype=torch.float32), torch.arange(800)
    places, sums = place.view(50, 16), torch.zeros(50, 24)
    for number in range(16):
        total, sums = total + probs[:, number], sums + rows[places[:, number]]
    assert torch.equal(weights, probs / total[:, None])
    assert torch.equal(operations.collect(rows, places), sums)


@DTYPES
@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype, num_threads: int) -> None:
    x, weight = drawn(300, 257, dtype=dtype), drawn(200, 257, dtype=dtype)
    frequencies = drawn(17, dtype=torch.float32).abs()
    before, results = torch.get_num_threads(), []
    for threads in (1, num_threads):
        torch.set_num_threads(threads)
        products = operations.linear(x, weight)
        parts = operations.rms_norm(x, weight[0], 1e-6), operations.silu_and_mul(x, x), operations.log_probs(products)
        outs = mixture(x, *MIXTURE)
        results.append([products, *parts, *outs, operations.rotary_table(frequencies, 3000, dtype)])
    torch.set_num_threads(before)
    assert [torch.equal(one, other) for one, other in zip(*results, strict=True)] == [True] * 8


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
close(kernels.rms_norm(x, weight[0], 1e-6)[0], operations.rms_norm(x, weight[0], 1e-6))
inside = drawn(70, 96).view(70, 3, 32)[:, :2]  # heads of a merged product
close(kernels.rms_norm(inside, weight[0, :32], 1e-6)[0], operations.rms_norm(inside, weight[0, :32], 1e-6))
kernels._CHUNKS = (32, 16)
for there in (True, False):
    kernels._same_bits.clear(), kernels._plans.clear()
    product = kernels.matmul if there else operations.linear
    kernels._library = lambda x, weight, bias, out: out.copy_(product(x, weight, bias))
    close(kernels.linear(x, weight, bias), kernels.matmul(x, weight, bias))
assert torch.equal(kernels.linear(x, weight, bias), kernels.matmul(x, weight, bias))
logits = drawn(3, 5000)
logits[0, :2500] = float("-inf")  # whole blocks of masked tokens
close(kernels.log_sum_exp(logits)[0], logits.logsumexp(-1))
narrow = logits.bfloat16()
for given in (narrow.float(), narrow):  # a server's and a rank's
    log_sums, entropies = kernels.log_sum_exp(given, entropies=True)
    assert torch.equal(log_sums, kernels.log_sum_exp(narrow.float())[0])
    close(entropies, torch.distributions.Categorical(logits=narrow.float()).entropy())
for ends in (ints(0, 3, 3, 68, 70), ints(70, 70, 70, 70, 70), ints(0, 0, 0, 0, 70)):  # experts without rows
    matrices = drawn(5, 200, 96, seed=3)
    close(kernels.grouped_linear(x, matrices, ends), operations.grouped_linear(x, matrices, ends))
places = torch.randperm(70, generator=torch.Generator().manual_seed(0)).view(14, 5)
close(kernels.collect(x, places), operations.collect(x, places))
gate, up = drawn(70, 96).chunk(2, dim=-1)
close(kernels.silu_and_mul(gate, up), operations.silu_and_mul(gate, up))
summed = kernels.rms_norm(x, weight[0], 1e-6, x.flip(0))
for one, other in zip(summed, operations.add_rms_norm(x, x.flip(0), weight[0], 1e-6)):
    close(one, other)
places, angles = torch.arange(69, -1, -1), operations.rotary_table(drawn(16).abs(), 70, torch.float32)
for inverse in (False, True):
    turned = operations.rotate(inside, angles, places, inverse)
    close(kernels.rotate(inside, angles, places, inverse), turned)
    close(kernels.rotate(inside.transpose(0, 1).contiguous().transpose(0, 1), angles, places, inverse), turned)
for heads, key_heads, width in ((9, 3, 64), (4, 2, 16)):
    cache = drawn(12, key_heads, 32, 2 * width)
    table = torch.randperm(12, generator=torch.Generator().manual_seed(0))[:10].to(torch.int32).view(2, 5)
    q = drawn(71, heads, width)
    case = (q, cache[..., :width], cache[..., width:], table, ints(0, 1, 71), ints(100, 137), width**-0.5)
    lse = torch.empty(heads, 71)
    close(kernels.attention(*case, 70, lse=lse), operations.attention(*case, 70))
    keys = case[1][table[1].long()].transpose(0, 1).flatten(1, 2)[0, :137]  # of the first head and the last token
    close(lse[0, 70], (width**-0.5 * keys @ q[70, 0]).logsumexp(0))
    assert lse.isfinite().all()
print("equal")
"""


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("model", "allowed"),
    [
        ({"model_type": "qwen3", "use_sliding_window": False}, None),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, None),
        ({"model_type": "qwen3_moe"}, None),
        ({"model_type": "mistral"}, "false but for model_type llama or qwen2 or qwen3 or qwen3_moe"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "false but for use_sliding_window None or False"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "yarn"}}, "false but for rope_type default or llama3"),
    ],
)
def test_models_with_other_layers_are_refused(model: dict[str, Any], allowed: str | None) -> None:
    check_match(RolloutConfig(), model)
    with raises(RolloutConfigError, field="match_trainer", allowed=allowed) if allowed else nullcontext():
        check_match(RolloutConfig(match_trainer=True), model)


@pytest.mark.parametrize(("field", "value"), [("tensor_parallel_size", 2), ("routes", True)])
def test_servers_that_compute_otherwise_cannot_match(field: str, value: Any) -> None:
    """Nothing records the routes of matching servers."""
    with raises(RolloutConfigError, field=field, value=value):
        RolloutConfig(match_trainer=True, **{field: value})


@pytest.mark.parametrize(("device", "key"), [("cuda", "match_trainer"), ("cpu", "match_trainer"), ("cpu", "routes")])
def test_an_untested_vllm_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch, device: Any, key: str) -> None:
    config = RolloutConfig(**{key: True})
    _check_tested(config, device)
    monkeypatch.setitem(FENCE.tested, "vllm", "<0.1")
    _check_tested(RolloutConfig(), device)
    with raises(RolloutConfigError, field=key):
        _check_tested(config, device)


@pytest.fixture(scope="module")
def layers() -> dict[str, Any]:
    """The functions that a matching GPU server puts in place of vLLM's, by class or module and name."""
    replaced: dict[str, Any] = {}

    def replace(target: Any, **values: Any) -> Callable[[], None]:
        replaced.update({f"{target.__name__.rpartition('.')[2]}.{name}": value for name, value in values.items()})
        return lambda: None

    match_transformers(replace, on_gpu=True)
    return replaced


@DTYPES
def test_layers_compute_what_those_of_transformers_compute(layers: dict[str, Any], dtype: torch.dtype) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import (
        LlamaMLP,
        LlamaRMSNorm,
        LlamaRotaryEmbedding,
        apply_rotary_pos_emb,
    )
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    config = LlamaConfig(hidden_size=96, num_attention_heads=3, max_position_embeddings=64, intermediate_size=48)
    x, residual = drawn(10, 96, dtype=dtype), drawn(10, 96, dtype=dtype, seed=1)
    norm = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.data.copy_(drawn(96, dtype=dtype, seed=2))
    out, total = layers["RMSNorm.forward_cuda"](norm, x, residual)
    assert torch.equal(total, residual + x)
    assert torch.equal(out, norm(residual + x))

    mlp = LlamaMLP(config).to(dtype)
    merged = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), dim=-1)
    expected = operations.silu_and_mul(mlp.gate_proj(x), mlp.up_proj(x))
    assert torch.equal(layers["SiluAndMul.forward_cuda"](None, merged), expected)
    torch.testing.assert_close(
        expected, mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
    )  # whose last elements may differ

    positions = torch.tensor([3, 0, 63, 5, 5, 1, 2, 40, 41, 42])
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    q, k = x[:, :64].reshape(1, 10, 2, 32).transpose(1, 2), x[:, 64:].reshape(1, 10, 1, 32).transpose(1, 2)
    expected_qk = [each[0].transpose(0, 1).flatten(1) for each in apply_rotary_pos_emb(q, k, cos, sin)]
    layer = SimpleNamespace(base=10000.0, rotary_dim=32, head_size=32, max_position_embeddings=64)
    layer._compute_inv_freq = partial(RotaryEmbeddingBase._compute_inv_freq, layer)
    rotated = layers["RotaryEmbedding.forward_cuda"](layer, positions, x[:, :64], x[:, 64:])
    assert [torch.equal(one, other) for one, other in zip(rotated, expected_qk, strict=True)] == [True, True]


@DTYPES
def test_a_mixture_of_a_server_is_that_of_transformers(layers: dict[str, Any], dtype: torch.dtype) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "moe_intermediate_size": 24}
    block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(hidden_size=96, **sizes)).to(dtype)
    for seed, parameter in enumerate(block.parameters()):
        parameter.data.copy_(0.1 * drawn(*parameter.shape, dtype=dtype, seed=seed))
    experts = SimpleNamespace(
        w13_weight=block.experts.gate_up_proj, w2_weight=block.experts.down_proj, top_k=3, renormalize=True
    )
    served = SimpleNamespace(gate=block.gate, experts=SimpleNamespace(routed_experts=experts))
    x = drawn(10, 96, dtype=dtype)
    out = layers["Qwen3MoeSparseMoeBlock.forward"](served, x)
    torch.testing.assert_close(out, block(x[None])[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("place", ["sampler", "prompt_logprob"])
def test_scores_of_sampled_tokens_are_those_of_the_operations(layers: dict[str, Any], place: str) -> None:
    logits, tokens = drawn(5, 300, dtype=torch.float32), torch.tensor([0, 7, 299, 1, 1])
    scores = layers[f"{place}.compute_topk_scores"](logits, 0, tokens, None, max_per_req_token_ids=0)
    assert torch.equal(scores.logprobs[:, 0], operations.token_log_probs(logits, tokens))
    assert scores.logprob_token_ids[:, 0].tolist() == tokens.tolist()
    assert scores.selected_token_ranks.tolist() == [
        int((row >= row[t]).sum()) for row, t in zip(logits, tokens, strict=True)
    ]


def test_scores_of_the_first_model_runner_are_those_of_the_operations(
    layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sampler of random tokens has log-probs of its own; it serves mixtures, for instance."""
    monkeypatch.setattr(operations, "log_probs", torch.zeros_like)
    sampler = SimpleNamespace(logprobs_mode="processed_logprobs", use_fp64_gumbel=False)
    logits = drawn(5, 300, dtype=torch.float32)
    tokens, log_probs = layers["TopKTopPSampler.forward_native"](sampler, logits, {}, None, None)
    assert torch.equal(log_probs, torch.zeros(5, 300))
    assert ((tokens >= 0) & (tokens < 300)).all()


def test_attention_of_a_server_reads_its_paged_cache(layers: dict[str, Any]) -> None:
    q = drawn(7, 4 * 16, dtype=torch.float32)
    k, v = (drawn(40, 2, 16, dtype=torch.float32, seed=n) for n in (1, 2))
    keys, values, table = paged(k, v, 16, seed=0)
    cache, output = torch.cat((keys, values), dim=-1), torch.full((7, 64), 9.0)
    step = SimpleNamespace(
        num_actual_tokens=5, block_table=table, query_start_loc=ints(0, 5), seq_lens=ints(40), max_query_len=5
    )
    layer = SimpleNamespace(head_size=16, num_heads=4, scale=0.25)
    layers["FlashAttentionImpl.forward"](layer, None, q, None, None, cache, step, output)
    expected = attention(q[:5].view(5, 4, 16), keys, values, table, ints(0, 5), ints(40), 0.25, 5)
    assert torch.equal(output[:5].view(5, 4, 16), expected)
    assert (output[5:] == 9.0).all(), "rows of padding are left alone"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_rows_have_the_same_bits_beside_any_others() -> None:
    def on_gpu(*shape: int, seed: int = 0) -> torch.Tensor:
        return drawn(*shape, dtype=torch.bfloat16, seed=seed).cuda()

    x, weight, bias = on_gpu(4100, 3072), 0.05 * on_gpu(1024, 3072, seed=1), on_gpu(1024)
    whole = operations.linear(x, weight, bias)  # cuBLAS computes most of it
    logits = operations.linear(x, weight).float()
    sevens = torch.full((len(x),), 7, device="cuda")
    for num in (1, 2, 3, 8, 17, 64, 100, 127, 128, 257, 1000, 2048, 3000):
        assert torch.equal(operations.linear(x[:num], weight, bias), whole[:num])
        normed = operations.rms_norm(x, weight[0], 1e-6)
        assert torch.equal(operations.rms_norm(x[:num], weight[0], 1e-6), normed[:num])
        gates = x.view(4100, 2, -1)
        gated = operations.silu_and_mul(gates[:, 0], gates[:, 1])
        merged = x[:num].chunk(2, dim=-1)  # as in a server
        assert torch.equal(operations.silu_and_mul(*merged), gated[:num])
        summed, total = operations.add_rms_norm(x[:num], x[:num].flip(0), weight[0], 1e-6)
        assert torch.equal(total, x[:num] + x[:num].flip(0))
        assert torch.equal(summed, operations.rms_norm(total, weight[0], 1e-6))
        assert torch.equal(operations.log_probs(logits[:num]), operations.log_probs(logits)[:num])
        scores = operations.scores(logits[:num].bfloat16(), sevens[:num])[0]  # a rank's logits are narrow
        assert torch.equal(scores, operations.token_log_probs(logits, sevens)[:num])
    few = on_gpu(3000, 259)  # a small vocabulary, whose logits are a part of padded ones in a server
    served = F.pad(few.float(), (0, 61))[:, :259]
    assert torch.equal(operations.scores(few, sevens[:3000])[0], operations.token_log_probs(served, sevens[:3000]))
    for heads, key_heads, width in ((9, 3, 64), (16, 8, 128), (28, 4, 128)):
        q = on_gpu(500, heads, width)
        table = operations.rotary_table(torch.rand(width // 2, device="cuda"), 500, torch.bfloat16)
        cos, sin = table[:, :, None].unbind(1)
        first, second = q.chunk(2, dim=-1)
        turned = operations.rotate(q, table, torch.arange(500, device="cuda"))
        assert torch.equal(turned, q * cos + torch.cat((-second, first), dim=-1) * sin)
        k, v = (on_gpu(500, key_heads, width, seed=n) for n in (1, 2))
        rows, scale = torch.arange(500, dtype=torch.int32, device="cuda")[None], width**-0.5
        starts, lengths = ints(0, 500).cuda(), ints(500).cuda()
        whole = attention(q, k[:, :, None], v[:, :, None], rows, starts, lengths, scale, 500)
        keys, values, table = (part.cuda() for part in paged(k.cpu(), v.cpu(), 16, seed=0))
        starts, lengths = (torch.arange(n, 501, dtype=torch.int32, device="cuda") for n in (0, 1))
        decoded = attention(q, keys, values, table.expand(500, -1).contiguous(), starts, lengths, scale, 1)
        assert torch.equal(decoded, whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("hidden", "sizes"), [(2048, (768, 128, 8)), (96, MIXTURE)])
def test_on_a_gpu_a_mixture_has_the_same_bits_beside_any_others(hidden: int, sizes: tuple[int, int, int]) -> None:
    """Also in a graph: nothing in it waits for the device."""
    x = drawn(4100, hidden, dtype=torch.bfloat16).cuda()
    whole = mixture(x, *sizes)
    check_values(x[:5], *sizes)
    for num in (1, 2, 3, 8, 64, 129, 1000, 3000):
        for begin in (0, 1000):
            part = slice(begin, begin + num)
            for one, other in zip(mixture(x[part], *sizes), whole, strict=True):
                assert torch.equal(one, other[part])
    up, down, _ = matrices(x, *sizes[:2])
    given, graph = [each[:64].clone() for each in (x, *whole[1:])], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = operations.experts(given[0], up, down, *given[1:])
    for fixed, new in zip(given, (x, *whole[1:]), strict=True):
        fixed.copy_(new[500:564])
    graph.replay()
    assert torch.equal(out, whole[0][500:564])
