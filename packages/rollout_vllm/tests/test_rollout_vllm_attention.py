"""Attention of decoding steps: the kernels under Triton's interpreter, in a process of its own, and on a GPU."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_vllm.servers.patch import ATTENTION

SERVERS = Path(importlib.util.find_spec("rollout_vllm").origin).with_name("servers")  # type: ignore[union-attr,arg-type]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
CASES = """
import itertools
import torch
import attention

torch.manual_seed(0)
WIDTH, BLOCK, SCALE = 64, 16, 0.2


def compare(heads, key_heads, together, heads_first, lengths, shared):
    if heads_first:
        cache = torch.randn(200, key_heads, BLOCK, 2 * WIDTH)
    else:
        cache = torch.randn(200, BLOCK, key_heads, 2 * WIDTH).transpose(1, 2)
    cache[0] = float("nan")  # the block of padding
    keys, values = cache.transpose(1, 2).split(WIDTH, -1)
    free = iter((1 + torch.randperm(199)).tolist())
    table = torch.zeros(len(lengths), 32, dtype=torch.int32)
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
    attention.decode(out, q, keys, values, table, lengths_tensor, SCALE, together=together, tile=32)
    for row, length in enumerate(lengths):
        if not length:
            assert not out[row].any()
            continue
        blocks = table[row, : -(-length // BLOCK)].long()
        k, v = (
            stored[blocks].reshape(-1, key_heads, WIDTH)[:length].repeat_interleave(heads // key_heads, 1)
            for stored in (keys, values)
        )
        weights = (SCALE * torch.einsum("hd,nhd->hn", q[row], k)).softmax(-1)
        torch.testing.assert_close(out[row], torch.einsum("hn,nhd->hd", weights, v), rtol=1e-5, atol=1e-5)


count = 0
for (heads, key_heads, together), heads_first, (lengths, shared) in itertools.product(
    [(4, 2, 4), (4, 2, 1), (14, 2, 2), (8, 2, 4)],
    [True, False],
    [
        ([70, 65, 90, 100, 33, 47, 0], 2),
        ([1, 5, 16, 17, 40], 0),
        ([64, 64, 64, 64], 4),
        ([130, 140, 129, 150], 8),
        ([0, 70, 80, 90], 3),
    ],
):
    compare(heads, key_heads, together, heads_first, lengths, shared)
    count += 1
print(count, "cases")
"""


@needs_triton
def test_attention_under_the_interpreter_is_a_softmax_over_each_requests_tokens() -> None:
    paths = os.pathsep.join(path for path in (str(SERVERS), *sys.path) if path)
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", CASES], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "40 cases" in done.stdout


@needs_triton
@pytest.mark.parametrize(
    ("requests", "heads", "key_heads", "expected"),
    [
        (256, 16, 8, (4, True)),
        (128, 16, 8, (4, True)),  # 256 programs for 132 processors
        (96, 16, 8, (4, False)),
        (1, 16, 8, (4, False)),
        (256, 14, 2, (2, True)),  # seven queries of a key head: two requests fill a tile
        (64, 14, 2, (2, False)),
        (256, 16, 1, (1, True)),
    ],
)
def test_few_requests_are_left_to_vllm(requests: int, heads: int, key_heads: int, expected: tuple[int, bool]) -> None:
    from rollout_vllm.servers.attention import fills_gpu, requests_together

    assert (requests_together(heads, key_heads), fills_gpu(requests, heads, key_heads, 132)) == expected


def decoding_step(**changes: Any) -> Any:
    """Metadata of a step with one new token for each of two requests, 40 and 33 tokens long."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    step = FlashAttentionMetadata(
        num_actual_tokens=2,
        max_query_len=1,
        query_start_loc=torch.arange(3, dtype=torch.int32),
        max_seq_len=40,
        seq_lens=torch.tensor([40, 33], dtype=torch.int32),
        block_table=torch.tensor([[1, 2, 3], [1, 2, 4]], dtype=torch.int32),
        slot_mapping=torch.zeros(2, dtype=torch.int64),
    )
    return dataclasses.replace(step, **changes)


def layer(**changes: Any) -> Any:
    found: dict[str, Any] = {
        "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "scale": 0.125, "attn_type": "decoder",
        "alibi_slopes": None, "logits_soft_cap": 0, "sinks": None, "sliding_window": (-1, -1),
    }  # fmt: skip
    return SimpleNamespace(**{**found, **changes})


CACHE = (5, 2, 16, 128)
"""Blocks, key heads, tokens of a block, keys and values."""


def plain_attention(self: Any, query: torch.Tensor, kv_cache: torch.Tensor, step: Any, output: torch.Tensor) -> None:
    """What vLLM's forward computes, in torch: its kernels need a GPU."""
    for row, length in enumerate(step.seq_lens.tolist()):
        blocks = step.block_table[row, : -(-length // kv_cache.shape[2])].long()
        both = kv_cache[blocks].transpose(1, 2).reshape(-1, self.num_kv_heads, 2 * self.head_size)[:length].float()
        k, v = both.repeat_interleave(self.num_heads // self.num_kv_heads, 1).split(self.head_size, -1)
        weights = (self.scale * torch.einsum("hd,nhd->hn", query[row].float(), k)).softmax(-1)
        output[row] = torch.einsum("hn,nhd->hd", weights, v).to(output.dtype)


class Replaced:
    """FlashAttentionImpl's forward with our hook, the kernel in torch, and both counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, error: float | None = 0.0, processors: int = 1) -> None:
        attention = pytest.importorskip("rollout_vllm.servers.attention", reason="triton is not installed")
        from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

        self.stock_calls, self.our_calls = 0, 0

        def stock(
            self_: Any, module: Any, query: Any, key: Any, value: Any, cache: Any, step: Any, out: Any, *_: Any
        ) -> Any:
            self.stock_calls += 1
            if step is not None and step.max_query_len == 1 and query.dim() == 3:
                plain_attention(self_, query, cache, step, out)
            return out

        def decode(self_: Any, query: Any, cache: Any, step: Any, out: Any) -> None:
            self.our_calls += 1
            if error is None:
                raise RuntimeError("no such kernel")
            plain_attention(self_, query, cache, step, out)
            out += error

        monkeypatch.setattr(FlashAttentionImpl, "forward", stock)
        monkeypatch.setattr(attention, "_decode", decode)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        found = SimpleNamespace(multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        attention.attend_together(ATTENTION.replace)
        self.implementation = FlashAttentionImpl

    def forward(self, of: Any, step: Any, *, dtype: torch.dtype = torch.bfloat16, scales: Any = None) -> None:
        query = torch.randn((2, 4, of.head_size), generator=torch.Generator().manual_seed(1)).to(dtype)
        cache = torch.randn(CACHE, generator=torch.Generator().manual_seed(2)).to(dtype)
        output, expected = torch.zeros_like(query), torch.zeros_like(query)
        forward: Any = self.implementation.forward
        found = forward(of, None, query, None, None, cache, step, output, scales)
        assert found is output
        if step is not None and step.max_query_len == 1:
            plain_attention(of, query, cache, step, expected)
            torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_decoding_steps_are_computed_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replaced = Replaced(monkeypatch)
    for _ in range(3):
        replaced.forward(layer(), decoding_step())
    assert replaced.stock_calls == 1, "one comparison"
    assert replaced.our_calls == 1 + 3
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


@pytest.mark.parametrize(
    ("of", "changes", "options"),
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
    ],
)
def test_other_steps_are_vllms(
    of: dict[str, Any], changes: dict[str, Any] | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = Replaced(monkeypatch)
    step = None if changes is None else decoding_step(**changes)
    if of.get("num_kv_heads") == 1:
        monkeypatch.setattr(sys.modules[__name__], "plain_attention", lambda *_: None)
    replaced.forward(layer(**of), step, **options)
    assert (replaced.stock_calls, replaced.our_calls) == (1, 0)


def test_a_step_that_does_not_fill_the_gpu_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = Replaced(monkeypatch, processors=132)
    replaced.forward(layer(), decoding_step())
    assert (replaced.stock_calls, replaced.our_calls) == (1, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(16, 8, 128), (14, 2, 64), (32, 8, 128)])
@pytest.mark.parametrize("requests", [1, 5, 64, 256])
def test_attention_on_a_gpu_is_a_softmax(requests: int, heads: int, key_heads: int, width: int) -> None:
    from rollout_vllm.servers.attention import decode, requests_together

    torch.manual_seed(0)
    blocks = 4 + 8 * requests
    cache = torch.randn((blocks, key_heads, 16, 2 * width), device="cuda", dtype=torch.bfloat16)
    table = (4 + torch.randperm(8 * requests).to(torch.int32).view(requests, 8)).cuda()
    table[:, :3] = torch.arange(3, dtype=torch.int32)  # one prompt
    lengths = torch.randint(1, 129, (requests,), dtype=torch.int32, device="cuda")
    lengths[-1] = 0
    q = torch.randn((requests, heads, width), device="cuda", dtype=torch.bfloat16)
    out, expected = torch.full_like(q, 7.0), torch.zeros_like(q)
    keys, values = cache.transpose(1, 2).split(width, -1)
    together = requests_together(heads, key_heads)
    decode(out, q, keys, values, table, lengths, width**-0.5, together=together)
    of = layer(num_heads=heads, num_kv_heads=key_heads, head_size=width, scale=width**-0.5)
    plain_attention(of, q, cache, SimpleNamespace(seq_lens=lengths, block_table=table), expected)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
