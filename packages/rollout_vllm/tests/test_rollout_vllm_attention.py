"""Attention of decoding steps: the kernels under Triton's interpreter, in a process of its own, and on a GPU."""

import dataclasses
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_vllm_helpers import FAST_PATHS

from plinth_testing import run_under_the_interpreter
from rollout_vllm.servers.patch import ATTENTION

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
CASES = """
import dataclasses
import itertools
from types import SimpleNamespace
import torch
import attention

torch.manual_seed(0)
WIDTH, BLOCK, BLOCKS, SCALE = 64, 16, 400, 0.2


def compare(heads, key_heads, together, heads_first, lengths, shared):
    if heads_first:
        cache = torch.randn(BLOCKS, key_heads, BLOCK, 2 * WIDTH)
    else:
        cache = torch.randn(BLOCKS, BLOCK, key_heads, 2 * WIDTH).transpose(1, 2)
    cache[0] = float("nan")  # the block of padding
    keys, values = cache.transpose(1, 2).split(WIDTH, -1)
    free = iter((1 + torch.randperm(BLOCKS - 1)).tolist())
    table = torch.zeros(len(lengths), 144, dtype=torch.int32)
    for row, length in enumerate(lengths):
        if row % 4 == 0:
            prompt = [next(free) for _ in range(shared)]
        table[row, :shared] = torch.tensor(prompt, dtype=torch.int32)  # also of a request without tokens
        for block in range(-(-length // BLOCK)):
            whole = block < shared and (block + 1) * BLOCK <= length
            table[row, block] = prompt[block] if whole else next(free)
    q = torch.randn(len(lengths), heads, WIDTH)
    out = torch.full_like(q, 7.0)
    lengths_tensor = torch.tensor(lengths, dtype=torch.int32)
    tile = 32 if max(lengths) < 1000 else 128  # the interpreter takes as long for a small tile as for a large one
    attention.decode(out, q, keys, values, table, lengths_tensor, SCALE, together=together, tile=tile)
    torch.testing.assert_close(out, plain(q, keys, values, table, lengths, SCALE), rtol=1e-5, atol=1e-5)


def plain(q, keys, values, table, lengths, scale):
    out = torch.zeros_like(q)
    for row, length in enumerate(lengths):
        blocks = table[row, : -(-length // keys.shape[1])].long()
        k, v = (
            stored[blocks].reshape(-1, *keys.shape[2:])[:length].repeat_interleave(q.shape[1] // keys.shape[2], 1)
            for stored in (keys, values)
        )
        if length:
            weights = (scale * torch.einsum("hd,nhd->hn", q[row], k)).softmax(-1)
            out[row] = torch.einsum("hn,nhd->hd", weights, v)
    return out


HEADS = [(4, 2, 4), (4, 2, 1), (14, 2, 2), (8, 2, 4)]
SHORT = [
    ([70, 65, 90, 100, 33, 47, 0], 2),
    ([1, 5, 16, 17, 40], 0),
    ([64, 64, 64, 64], 4),
    ([130, 140, 129, 150], 8),
    ([0, 70, 80, 90], 3),
]
LONG = [([1030, 1041, 1024, 1100], 64), ([2200, 2177, 0, 2176], 130)]  # blocks are compared 64 at once
cases = [*itertools.product(HEADS[:1], SHORT + LONG), *itertools.product(HEADS[1:], SHORT[::2])]
for number, ((heads, key_heads, together), (lengths, shared)) in enumerate(cases):
    compare(heads, key_heads, together, number % 2 == 0, lengths, shared)
print(len(cases), "cases")


# The comparison with vLLM's attention, here one in torch.
@dataclasses.dataclass
class Step:
    num_actual_tokens: int = 0
    max_seq_len: int = 0
    max_num_splits: int = 0
    query_start_loc: object = None
    seq_lens: object = None
    block_table: object = None
    scheduler_metadata: object = None


def stock(layer, module, queries, key, value, cache, step, out):
    keys, values = cache.transpose(1, 2).split(layer.head_size, -1)
    out.copy_(plain(queries, keys, values, step.block_table, step.seq_lens.tolist(), layer.scale))


for block in (16, 48):
    layer = SimpleNamespace(num_heads=4, num_kv_heads=2, head_size=WIDTH, scale=SCALE)
    cache, state = torch.empty(3, 2, block, 2 * WIDTH), torch.get_rng_state()
    assert attention._problem(layer, None, torch.empty(1, 4, WIDTH), cache, Step(), stock) == ""
    assert torch.equal(torch.get_rng_state(), state)  # it samples tokens
print("compared")
"""


@needs_triton
@pytest.mark.long
def test_attention_under_the_interpreter_is_a_softmax_over_each_requests_tokens() -> None:
    assert "16 cases\ncompared" in run_under_the_interpreter(CASES, str(FAST_PATHS))


@needs_triton
@pytest.mark.parametrize(
    ("requests", "heads", "key_heads", "expected"),
    [
        *((256, 16, 8, 4), (128, 16, 8, 2), (48, 16, 8, 1), (32, 16, 8, 0)),  # 512 programs for 132 processors
        *((512, 14, 2, 2), (256, 14, 2, 1), (128, 14, 2, 0)),  # seven queries of a key head: two requests fill a tile
    ],
)
def test_as_few_requests_are_together_as_keep_the_gpu_busy(
    requests: int, heads: int, key_heads: int, expected: int
) -> None:
    from rollout_vllm.servers.fast.attention import requests_together

    assert requests_together(requests, heads, key_heads, 132) == expected


def decoding_step(**changes: Any) -> Any:
    """Metadata of a step with one new token for each of two requests, 40 and 33 tokens long."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    cascade = ("use_cascade", "common_prefix_len", "cu_prefix_query_lens", "prefix_kv_lens", "suffix_kv_lens")
    fields = {field.name for field in dataclasses.fields(FlashAttentionMetadata)}
    step = FlashAttentionMetadata(
        **{name: None for name in cascade if name in fields},  # vLLM 0.26 has no defaults for them
        num_actual_tokens=2,
        max_query_len=1,
        query_start_loc=torch.arange(3, dtype=torch.int32),
        max_seq_len=40,
        seq_lens=torch.tensor([40, 33], dtype=torch.int32),
        block_table=torch.tensor([[1, 2, 3], [1, 2, 4]], dtype=torch.int32),
        slot_mapping=torch.zeros(2, dtype=torch.int64),
    )
    return dataclasses.replace(step, **changes)


COMPARED = 3
"""Calls of the comparison: one, two and four requests together."""


def layer(**changes: Any) -> Any:
    from vllm.config import CUDAGraphMode

    defaults: dict[str, Any] = {
        "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "scale": 0.125, "attn_type": "decoder",
        "alibi_slopes": None, "logits_soft_cap": 0, "sinks": None, "sliding_window": (-1, -1),
        "plinth_compilation": SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **changes})


def plain_attention(self: Any, query: torch.Tensor, kv_cache: torch.Tensor, step: Any, output: torch.Tensor) -> None:
    """The output of vLLM's forward, in torch: its kernels need a GPU."""
    for row, length in enumerate(step.seq_lens.tolist()):
        blocks = step.block_table[row, : -(-length // kv_cache.shape[2])].long()
        both = kv_cache[blocks].transpose(1, 2).reshape(-1, self.num_kv_heads, 2 * self.head_size)[:length].float()
        k, v = both.repeat_interleave(self.num_heads // self.num_kv_heads, 1).split(self.head_size, -1)
        weights = (self.scale * torch.einsum("hd,nhd->hn", query[row].float(), k)).softmax(-1)
        output[row] = torch.einsum("hn,nhd->hd", weights, v).to(output.dtype)


class Replaced:
    """FlashAttentionImpl's forward with our hook, the kernel in torch, and both counted."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        error: float | None = 0.0,
        processors: int = 1,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        attention = pytest.importorskip("rollout_vllm.servers.fast.attention", reason="triton is not installed")
        from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

        self.stock_calls, self.our_calls, self.capturing = 0, 0, False
        self.case: Any = None
        """Metadata of the comparison."""

        def stock(
            self_: Any, module: Any, query: Any, key: Any, value: Any, cache: Any, step: Any, out: Any, *_: Any
        ) -> Any:
            self.stock_calls += 1
            if step is not None and step.max_query_len == 1 and query.dim() == 3:
                plain_attention(self_, query, cache, step, out)
            return out

        def decode(self_: Any, query: Any, cache: Any, step: Any, out: Any, together: int) -> None:
            self.our_calls += 1
            self.case = self.case or step
            if error is None:
                raise RuntimeError("no such kernel")
            plain_attention(self_, query, cache, step, out)
            out += error

        monkeypatch.setattr(FlashAttentionImpl, "forward", stock)
        monkeypatch.setattr(attention, "_decode", decode)
        monkeypatch.setattr(FlashAttentionImpl, "__init__", FlashAttentionImpl.__init__)  # restored afterwards
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        gpu = SimpleNamespace(multi_processor_count=processors, major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
        attention.attend_together(ATTENTION.replace)
        self.implementation = FlashAttentionImpl

    def forward(
        self, attention: Any, step: Any, *, dtype: torch.dtype = torch.bfloat16, scales: Any = None, block: int = 16
    ) -> None:
        query = torch.randn((2, 4, attention.head_size), generator=torch.Generator().manual_seed(1)).to(dtype)
        cache = torch.randn((5, 2, block, 128), generator=torch.Generator().manual_seed(2)).to(dtype)
        output, expected = torch.zeros_like(query), torch.zeros_like(query)
        forward: Any = self.implementation.forward
        assert forward(attention, None, query, None, None, cache, step, output, scales) is output
        if step is not None and step.max_query_len == 1:
            plain_attention(attention, query, cache, step, expected)
            torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_decoding_steps_are_computed_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replaced = Replaced(monkeypatch)
    for _ in range(3):
        replaced.forward(layer(), decoding_step())
    assert replaced.stock_calls == 1, "one comparison"
    assert replaced.our_calls == COMPARED + 3
    assert "own path" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "said"),
    [(0.5, "outputs differ by"), (float("nan"), "outputs differ by"), (None, "RuntimeError: no such")],
)
def test_an_attention_that_is_not_vllms_is_not_used(
    error: float | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replaced = Replaced(monkeypatch, error=error)
    for _ in range(3):
        replaced.forward(layer(), decoding_step())
    assert replaced.our_calls == 1, "vLLM's own path from the first difference on"
    assert f"attention of decoding steps: vLLM's own path is used: {said}" in capsys.readouterr().out


@pytest.mark.parametrize("block", [16, 48, 256])
def test_requests_of_the_comparison_share_whole_tiles(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the part of the kernel that computes requests together would not be compared."""
    replaced = Replaced(monkeypatch)
    replaced.forward(layer(), decoding_step(), block=block)
    table, lengths = replaced.case.block_table[:4], replaced.case.seq_lens[:4].tolist()
    assert table.shape[1] * block >= max(lengths)
    alike = (table == table[0]).all(0).int().cumprod(0).sum().item()
    assert min(alike, min(lengths) // block) * block >= 2 * 64


def test_one_missing_token_of_many_is_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replaced = Replaced(monkeypatch)

    def decode(self: Any, query: Any, cache: Any, step: Any, out: Any, together: int) -> None:
        lengths = torch.where(step.seq_lens == step.seq_lens.max(), step.seq_lens - 1, step.seq_lens)
        plain_attention(self, query, cache, dataclasses.replace(step, seq_lens=lengths), out)

    monkeypatch.setattr(sys.modules["rollout_vllm.servers.fast.attention"], "_decode", decode)
    replaced.forward(layer(), decoding_step())
    assert "outputs differ by" in capsys.readouterr().out


def test_the_comparison_waits_until_no_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = Replaced(monkeypatch)
    replaced.capturing = True
    replaced.forward(layer(), decoding_step())
    assert (replaced.stock_calls, replaced.our_calls) == (1, 0)
    replaced.capturing = False
    replaced.forward(layer(), decoding_step())
    replaced.capturing = True
    replaced.forward(layer(), decoding_step())
    assert (replaced.stock_calls, replaced.our_calls) == (1 + 1, COMPARED + 2)


@pytest.mark.parametrize(
    ("mode", "ours"),
    [("FULL", False), ("FULL_AND_PIECEWISE", True), ("FULL_DECODE_ONLY", True), ("PIECEWISE", True), ("NONE", True)],
)
def test_graphs_that_vllm_replays_for_prompts_are_vllms(mode: str, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With cudagraph_mode=FULL, vLLM 0.26 captures them as decoding steps."""
    from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config

    replaced, config = Replaced(monkeypatch), VllmConfig()
    with set_current_vllm_config(config):
        attention = replaced.implementation(4, 64, 0.125, 2, None, None, "auto")
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]  # vLLM decides after it has built the layers
    replaced.forward(attention, decoding_step())
    assert replaced.our_calls == (COMPARED + 1 if ours else 0)


@pytest.mark.parametrize(
    ("sizes", "changes", "options"),
    [
        ({}, {"max_query_len": 2}, {}),  # a prompt, or speculated tokens
        ({}, {"causal": False}, {}),
        ({}, {"dcp_context_kv_lens": torch.zeros(2)}, {}),
        ({}, {"rswa_prefix_lens": torch.zeros(2)}, {}),
        ({}, {"num_actual_tokens": 1}, {}),
        ({"sliding_window": (4095, 0)}, {}, {}),
        ({"alibi_slopes": torch.zeros(4)}, {}, {}),
        ({"logits_soft_cap": 50.0}, {}, {}),
        ({"sinks": torch.zeros(4)}, {}, {}),
        ({"attn_type": "encoder_decoder"}, {}, {}),
        ({"num_kv_heads": 1}, {}, {}),  # the cache has another shape than the layer says
        ({}, {}, {"dtype": torch.float32}),
        ({}, {}, {"scales": torch.ones(1)}),
        ({}, None, {}),  # vLLM measures its memory
        ({"plinth_compilation": None}, {}, {}),  # a layer without a configuration
        ({}, {}, {"processors": 132}),  # too few requests to fill the GPU
        ({}, {}, {"capability": (8, 0)}),  # a GPU that the kernel was not timed on
    ],
)
def test_other_steps_are_vllms(
    sizes: dict[str, Any], changes: dict[str, Any] | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = {name: options[name] for name in ("processors", "capability") if name in options}
    replaced = Replaced(monkeypatch, **gpu)
    step = None if changes is None else decoding_step(**changes)
    if sizes.get("num_kv_heads") == 1:
        monkeypatch.setattr(sys.modules[__name__], "plain_attention", lambda *_: None)
    replaced.forward(layer(**sizes), step, **({} if gpu else options))
    assert (replaced.stock_calls, replaced.our_calls) == (1, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(16, 8, 128), (14, 2, 64), (32, 8, 128)])
@pytest.mark.parametrize("requests", [1, 5, 64, 256])
def test_attention_on_a_gpu_is_a_softmax(requests: int, heads: int, key_heads: int, width: int) -> None:
    from rollout_vllm.servers.fast.attention import _choices, decode

    torch.manual_seed(0)
    most, shared = 80, 70
    blocks = most * requests
    cache = torch.randn((blocks, key_heads, 16, 2 * width), device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(blocks).to(torch.int32).view(requests, most).cuda()
    table[:, :shared] = table[0, :shared].clone()  # one prompt
    lengths = torch.randint(1, 16 * most + 1, (requests,), dtype=torch.int32, device="cuda")
    lengths[: requests // 2] = lengths[: requests // 2].clamp(min=16 * shared)  # these neighbors share all of it
    lengths[-1] = 0
    q = torch.randn((requests, heads, width), device="cuda", dtype=torch.bfloat16)
    out, expected = torch.full_like(q, 7.0), torch.zeros_like(q)
    keys, values = cache.transpose(1, 2).split(width, -1)
    attention = layer(num_heads=heads, num_kv_heads=key_heads, head_size=width, scale=width**-0.5)
    plain_attention(attention, q, cache, SimpleNamespace(seq_lens=lengths, block_table=table), expected)
    for together in _choices(heads, key_heads):
        decode(out.fill_(7.0), q, keys, values, table, lengths, width**-0.5, together=together)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
