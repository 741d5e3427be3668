"""The Triton backend under Triton's interpreter on a CPU, and its planning functions.

The interpreter runs in a separate process, because Triton reads TRITON_INTERPRET at import.
"""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_core
from plinth_testing import run_under_the_interpreter
from rl_core.fused_log_prob.tiles import (
    BLOCK_BYTES,
    EXTRA_BYTES,
    MAX_BLOCK_ROWS,
    MAX_GROUPS,
    TileConfig,
    Tuner,
    kept_columns,
    plan_blocks,
    plan_grad_blocks,
    plan_groups,
    plan_keeping,
    sum_bytes,
)
from rl_core.fused_log_prob.types import Keeping

CASES = """
import sys
import torch
from rl_core.fused_log_prob import linear_log_prob, tiles, triton_backward, triton_forward

triton_forward.MAX_ROWS = 64  # several launches
triton_backward.plan_blocks = lambda rows, columns, *_: (min(rows, 48), min(columns, 64))  # row and column blocks
triton_backward.plan_groups = lambda rows, size: min(rows, 64)
tiles.GRAD_BLOCK_WIDTHS = (32,)
real_plan, num_grad_blocks = tiles.plan_keeping, []

def plan_keeping(rows, columns, size, itemsize, tile_columns, keeping):
    if keeping.own_bytes is not None:
        return real_plan(rows, columns, size, itemsize, tile_columns, keeping)
    blocks, width = tiles.plan_grad_blocks(rows, columns, size)
    num_grad_blocks.append(blocks)
    rest = columns - blocks * width
    return tiles.KeepPlan(num_grad_blocks=blocks, grad_block_width=width, own=min(32, rest), whole=rest <= 32)

triton_forward.plan_keeping = plan_keeping

def run(hidden, weight, targets, bias, up, **kwargs):
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    out = linear_log_prob(leaves[0], leaves[1], targets, bias=leaves[2] if bias is not None else None, **kwargs)
    loss = sum((o * u.to(o.dtype)).sum() for o, u in zip(out, up) if u is not None)
    return [*out, *torch.autograd.grad(loss, leaves)]

def error(value, truth):
    return ((value.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30)).item()

count = 0
for dtype, use_bias, soft_cap, entropy in (
    (torch.float32, False, None, False),
    (torch.float32, True, 4.0, True),
    (torch.bfloat16, True, None, True),
    (torch.bfloat16, False, 4.0, False),
    (torch.float16, True, None, True),
):
    generator = torch.Generator().manual_seed(count)
    tokens, size, vocab = ((7, 16, 31), (100, 48, 133), (33, 40, 90))[(count + count // 3) % 3]
    hidden = torch.randn(tokens, size, generator=generator).to(dtype)
    weight = (3 * torch.randn(vocab, size, generator=generator) / size**0.5).to(dtype)
    bias = torch.randn(vocab, generator=generator).to(dtype) if use_bias else None
    targets = torch.randint(vocab, (tokens,), generator=generator)
    if use_bias and soft_cap is None:  # one tile without any allowed token, and tokens among others
        bias[: vocab // 3], bias[vocab // 2 :: 9] = -torch.inf, -torch.inf
        targets = torch.where(bias[targets].isinf(), vocab // 3, targets)
    targets[::5] = -100
    up = (torch.randn(tokens, generator=generator) * 1e-4, torch.randn(tokens, generator=generator) * 1e-4)
    up = up if entropy else (up[0], None)
    options = dict(temperature=0.8, soft_cap=soft_cap, ignore_index=-100)
    exact = [x.double() if x is not None else None for x in (hidden, weight)]
    truth = run(*exact, targets, None if bias is None else bias.double(), up, backend="reference", **options)
    plain = run(hidden, weight, targets, bias, up, backend="reference", **options)
    # The interpreter truncates fp32 to bf16 where GPUs round: twice the error. Kept shares are truncated twice.
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    kept = (targets >= 0).sum().item()
    for keep_bytes in (0, 2 * kept * (32 * dtype.itemsize + 4), 10**9, None):  # none, two tiles, all, default
        mine = run(hidden, weight, targets, bias, up, backend="triton", keep_bytes=keep_bytes, **options)
        for i, (value, expected, base) in enumerate(zip(mine, truth, plain)):
            about = (dtype, use_bias, soft_cap, entropy, keep_bytes, i, error(value, expected), error(base, expected))
            if i < 2:
                assert (value.double() - expected).abs().max() < 2e-5, about
            else:
                assert error(value, expected) <= error(base, expected) + tolerance * (1 + (keep_bytes != 0)), about
        if dtype == torch.float16:
            break  # keeps nothing
    count += 1

# Rows with all probability in one token far above those of the first tile: the base is the lse of its own tile.
generator = torch.Generator().manual_seed(0)
hidden, weight = torch.randn(70, 48, generator=generator), torch.randn(133, 48, generator=generator)
targets = torch.randint(133, (70,), generator=generator)
for row in range(0, 70, 2):
    hidden[row] = weight[(40, 5, 100)[row % 3]] * 2 + 0.1 * hidden[row]
up = (torch.randn(70, generator=generator), None)
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
    inputs = hidden.to(dtype), weight.to(dtype)
    truth = run(*(x.double() for x in inputs), targets, None, up, backend="reference")
    mine = run(*inputs, targets, None, up, backend="triton", keep_bytes=10**9)
    for value, expected in zip(mine[2:], truth[2:]):
        assert error(value, expected) < tolerance, (dtype, error(value, expected))

leaf = hidden.float().requires_grad_()
log_prob, _ = linear_log_prob(leaf, weight.float(), targets, ignore_index=-100, backend="triton", keep_bytes=10**9)
first = torch.autograd.grad(log_prob.sum(), leaf, retain_graph=True)[0]
second = torch.autograd.grad(log_prob.sum(), leaf)[0]  # the kept numbers are freed, so this recomputes
assert error(second, first) < 1e-5
assert set(num_grad_blocks) >= {1, 2}, num_grad_blocks
print(count, "cases")
"""


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_interpreter_equals_float64() -> None:
    assert "5 cases" in run_under_the_interpreter(CASES, str(Path(rl_core.__file__).parents[1]))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    num_rows=st.integers(1, 300_000),
    num_columns=st.integers(1, 300_000),
    hidden_size=st.integers(1, 1024).map(lambda x: 16 * x),
    itemsize=st.sampled_from([2, 4]),
)
def test_planned_blocks_keep_their_limits(num_rows: int, num_columns: int, hidden_size: int, itemsize: int) -> None:
    group_rows = plan_groups(num_rows, hidden_size)
    assert 1 <= -(-num_rows // group_rows) <= MAX_GROUPS
    other_bytes = sum_bytes(num_rows, group_rows, hidden_size, itemsize)
    rows, columns = plan_blocks(group_rows, num_columns, itemsize, other_bytes)
    assert 1 <= rows <= min(group_rows, MAX_BLOCK_ROWS)
    assert 1 <= columns <= num_columns
    assert rows * columns * itemsize <= BLOCK_BYTES
    if other_bytes <= EXTRA_BYTES - 2**23 - BLOCK_BYTES // 2:
        assert rows * columns * itemsize + other_bytes <= EXTRA_BYTES


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    num_rows=st.integers(1, 100_000),
    num_columns=st.integers(1, 300_000),
    keep_bytes=st.integers(0, 10**11),
    tile_columns=st.sampled_from([32, 128, 256]),
)
def test_kept_columns_fit_and_are_whole_tiles(
    num_rows: int, num_columns: int, keep_bytes: int, tile_columns: int
) -> None:
    columns = kept_columns(num_rows, num_columns, 2, keep_bytes, tile_columns)
    assert 0 <= columns <= num_columns
    assert columns == num_columns or columns % tile_columns == 0
    assert num_rows * (2 * columns + 4 * -(-columns // tile_columns)) <= keep_bytes


SIZES = {
    "num_rows": st.integers(1, 20_000),
    "num_columns": st.integers(1, 300_000),
    "hidden_size": st.integers(1, 512).map(lambda x: 16 * x),
}


@settings(deadline=None, derandomize=True, max_examples=300)
@given(**SIZES, use_memory=st.booleans())
def test_default_keep_plan_fits_the_memory_limit(
    num_rows: int, num_columns: int, hidden_size: int, use_memory: bool
) -> None:
    plan = plan_keeping(num_rows, num_columns, hidden_size, 2, 256, Keeping(own_bytes=None, use_grad_memory=use_memory))
    in_gradient = plan.num_grad_blocks * plan.grad_block_width
    assert in_gradient + plan.own <= num_columns
    assert in_gradient + plan.own == num_columns or (in_gradient + plan.own) % 256 == 0
    assert use_memory or in_gradient == 0
    if in_gradient + plan.own > 0:
        own_bytes = 2 * num_rows * plan.own + 4 * num_rows * -(-(in_gradient + plan.own) // 256)
        statistics = 8 * num_rows * -(-num_columns // 256)
        assert own_bytes + statistics <= EXTRA_BYTES + 2 * num_rows * hidden_size  # forward: no gradient of hidden yet
        copies = 2 if plan.whole else 1
        assert own_bytes + copies * 2 * num_rows * hidden_size <= EXTRA_BYTES  # backward


@settings(deadline=None, derandomize=True, max_examples=300)
@given(**SIZES)
def test_kept_blocks_are_not_overwritten_before_use(num_rows: int, num_columns: int, hidden_size: int) -> None:
    blocks, width = plan_grad_blocks(num_rows, num_columns, hidden_size)
    assert blocks * width <= num_columns
    for block in range(blocks):
        start = num_columns * hidden_size - (blocks - block) * width * num_rows
        assert start % 8 == 0  # TMA needs multiples of 16 bytes
        assert (block + 1) * width * hidden_size <= start  # the gradient's rows end before the block that produces them


def test_tuner_measures_once_and_skips_candidates_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner()
    configs = [TileConfig(block_m=m, block_n=64, block_k=32, num_warps=4, num_stages=2) for m in (16, 32, 64)]
    times = {16: float("inf"), 32: 2.0, 64: 1.0}
    measured = []

    def milliseconds(launch: object, config: TileConfig) -> float:
        measured.append(config.block_m)
        return times[config.block_m]

    monkeypatch.setattr(tuner, "_milliseconds", milliseconds)
    assert tuner.choose(("a",), configs, lambda config: None) is configs[2]
    assert tuner.choose(("a",), configs, lambda config: None) is configs[2]
    assert measured == [16, 32, 64]
