"""linear_log_prob on a CPU: reference backend, gradcheck, edge shapes, modules and threads."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rl_core.fused_log_prob import chunked, linear_log_prob


def make_inputs(
    num_tokens: int, hidden_size: int, vocab: int, dtype: torch.dtype, seed: int = 0, bias: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, dtype=torch.float64).to(dtype)
    weight = (2 * torch.randn(vocab, hidden_size, generator=generator, dtype=torch.float64) / hidden_size**0.5).to(
        dtype
    )
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    bias_V = torch.randn(vocab, generator=generator, dtype=torch.float64).to(dtype) if bias else None
    return hidden, weight, targets, bias_V


def run(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], upstream: tuple[Tensor, Tensor], **kwargs: object
) -> list[Tensor]:
    """Both outputs and the gradients of hidden, weight (and bias) of a random linear function of the outputs."""
    hidden, weight, targets, bias = inputs
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    results = linear_log_prob(leaves[0], leaves[1], targets, bias=leaves[2] if bias is not None else None, **kwargs)  # type: ignore[arg-type]
    loss = sum((out * up.to(out.dtype)).sum() for out, up in zip(results, upstream, strict=True))
    grads = torch.autograd.grad(loss, leaves)
    return [*results, *grads]


def relative_error(value: Tensor, truth: Tensor) -> float:
    return ((value.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30)).item()


def upstream_for(num_tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(num_tokens, generator=generator).double(), torch.randn(num_tokens, generator=generator).double()


@pytest.fixture
def narrow_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several vocabulary blocks, the last one narrower, for small vocabularies."""
    monkeypatch.setattr(chunked, "MIN_CHUNK", 16)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 1)


@pytest.mark.usefixtures("narrow_chunks")
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck_in_float64(soft_cap: float | None, bias: bool) -> None:
    hidden, weight, targets, bias_V = make_inputs(5, 7, 37, torch.float64, bias=bias)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias_V) if x is not None]

    def function(h: Tensor, w: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return linear_log_prob(h, w, targets, bias=b, soft_cap=soft_cap, temperature=0.7, backend="chunked")

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.usefixtures("narrow_chunks")
@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@settings(
    deadline=None,
    derandomize=True,
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(allowed=st.sets(st.integers(0, 39), min_size=1), temperature=st.floats(0.2, 3.0), seed=st.integers(0, 99))
def test_a_bias_of_minus_infinity_takes_a_token_out_of_the_vocabulary(
    backend: Any, dtype: torch.dtype, allowed: set[int], temperature: float, seed: int
) -> None:
    kept = torch.tensor(sorted(allowed))
    hidden, weight, _, bias = make_inputs(6, 8, 40, dtype, seed, bias=True)
    assert bias is not None
    targets = torch.arange(6) % len(kept)
    masked = torch.full_like(bias, -torch.inf).index_copy(0, kept, bias[kept])
    options = {"temperature": temperature, "backend": backend}
    small = run((hidden, weight[kept], targets, bias[kept]), upstream_for(6), **options)
    whole = run((hidden, weight, kept[targets], masked), upstream_for(6), **options)
    for value, expected in zip(whole[:3], small[:3], strict=True):
        torch.testing.assert_close(value, expected)
    for value, expected in zip(whole[3:], small[3:], strict=True):
        torch.testing.assert_close(value, torch.zeros_like(value).index_copy(0, kept, expected))
    if len(kept) < 40:
        outside = torch.full((6,), min(set(range(40)) - allowed))
        log_probs, entropy = linear_log_prob(hidden, weight, outside, temperature, bias=masked, backend=backend)
        assert (log_probs == -torch.inf).all()
        torch.testing.assert_close(entropy, small[1])


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    num_tokens=st.integers(1, 33),
    hidden_size=st.integers(1, 40),
    vocab=st.integers(1, 150),
    temperature=st.floats(0.2, 3.0),
    soft_cap=st.none() | st.floats(1.0, 30.0),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_chunked_equals_reference_float64(
    num_tokens: int, hidden_size: int, vocab: int, temperature: float, soft_cap: float | None, bias: bool, seed: int
) -> None:
    inputs = make_inputs(num_tokens, hidden_size, vocab, torch.float64, seed, bias)
    up = upstream_for(num_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "MIN_CHUNK", 16)
        patch.setattr(chunked, "CHUNK_BYTES", 1)
        mine = run(inputs, up, temperature=temperature, soft_cap=soft_cap, backend="chunked")
    truth = run(inputs, up, temperature=temperature, soft_cap=soft_cap, backend="reference")
    for value, expected in zip(mine, truth, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("narrow_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    hidden, weight, targets, _ = make_inputs(64, 48, 301, dtype)
    truth = run((hidden.double(), weight.double(), targets, None), upstream_for(64), backend="reference")
    plain = run((hidden, weight, targets, None), upstream_for(64), backend="reference")
    mine = run((hidden, weight, targets, None), upstream_for(64))
    assert mine[0].dtype == mine[1].dtype == torch.float32
    assert mine[2].dtype == mine[3].dtype == dtype
    assert (mine[0].double() - truth[0]).abs().max() < 1e-5
    assert (mine[1].double() - truth[1]).abs().max() < 1e-5
    for index in (2, 3):
        assert relative_error(mine[index], truth[index]) <= relative_error(plain[index], truth[index]) + 2e-6


def test_large_logits_stay_finite_and_exact() -> None:
    hidden, weight, targets, _ = make_inputs(16, 32, 200, torch.float32)
    for scale, tolerance in ((10, 1e-4), (1000, None)):  # at 1000 logits reach 6e3, where float32 steps by 5e-4
        inputs = (hidden * scale, weight, targets, None)
        mine = run(inputs, upstream_for(16), backend="chunked")
        truth = run((inputs[0].double(), inputs[1].double(), targets, None), upstream_for(16), backend="reference")
        for value, expected in zip(mine, truth, strict=True):
            assert torch.isfinite(value).all()
            assert tolerance is None or relative_error(value, expected) < tolerance


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_ignored_targets_get_zero_and_no_gradient(backend: str) -> None:
    hidden, weight, targets, _ = make_inputs(12, 16, 50, torch.float64)
    targets[[0, 3, 11]] = -100
    kept = (targets != -100).nonzero()[:, 0]
    up = upstream_for(12)
    mine = run((hidden, weight, targets, None), up, backend=backend, ignore_index=-100)
    truth = run((hidden[kept], weight, targets[kept], None), (up[0][kept], up[1][kept]), backend="reference")
    torch.testing.assert_close(mine[0][kept], truth[0])
    torch.testing.assert_close(mine[1][kept], truth[1])
    torch.testing.assert_close(mine[2][kept], truth[2])
    torch.testing.assert_close(mine[3], truth[3])
    ignored = targets == -100
    assert not mine[0][ignored].any()
    assert not mine[1][ignored].any()
    assert not mine[2][ignored].any()


@pytest.mark.parametrize("all_ignored", [False, True])
def test_without_tokens_every_leaf_gets_a_zero_gradient(all_ignored: bool) -> None:
    num_tokens = 4 if all_ignored else 0
    hidden, weight, targets, bias = make_inputs(num_tokens, 8, 20, torch.float32, bias=True)
    targets.fill_(-100)
    mine = run((hidden, weight, targets, bias), upstream_for(num_tokens), ignore_index=-100)
    assert mine[0].shape == mine[1].shape == (num_tokens,)
    for grad, leaf in zip(mine[2:], (hidden, weight, bias), strict=True):
        assert leaf is not None
        assert grad.shape == leaf.shape
        assert not grad.any()


def test_gradient_of_one_output_and_one_input() -> None:
    hidden, weight, targets, _ = make_inputs(6, 8, 30, torch.float64)
    for index in (0, 1):
        for leaf_index in (0, 1):
            grads = []
            for backend in ("chunked", "reference"):
                leaves = [hidden.clone(), weight.clone()]
                leaves[leaf_index].requires_grad_()
                out = linear_log_prob(leaves[0], leaves[1], targets, backend=backend)[index]  # type: ignore[arg-type]
                grads.append(torch.autograd.grad(out.sum(), leaves[leaf_index])[0])
            torch.testing.assert_close(grads[0], grads[1])


def test_no_grad_and_autocast() -> None:
    hidden, weight, targets, _ = make_inputs(6, 8, 30, torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs, entropy = linear_log_prob(hidden, weight.requires_grad_(), targets)
    assert not log_probs.requires_grad
    expected = linear_log_prob(hidden.double(), weight.double(), targets, backend="reference")
    assert (log_probs - expected[0]).abs().max() < 1e-5
    assert (entropy - expected[1]).abs().max() < 1e-5


class Head(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return linear_log_prob(hidden, self.weight, targets)


def test_weight_storage_may_be_freed_and_gathered_again() -> None:
    """ZeRO-3 frees the parameter's data after the forward pass and gathers it before the backward pass."""
    hidden, weight, targets, _ = make_inputs(9, 8, 40, torch.float32)
    expected = run((hidden, weight, targets, None), (torch.ones(9), torch.zeros(9)), backend="reference")
    head = Head(weight.clone())
    log_probs, _ = head(hidden, targets)
    head.weight.data = torch.empty(0)
    head.weight.data = weight.clone()
    log_probs.sum().backward()
    assert head.weight.grad is not None
    torch.testing.assert_close(head.weight.grad, expected[3])


def test_worker_threads() -> None:
    inputs = make_inputs(16, 8, 40, torch.float32)
    expected = run(inputs, upstream_for(16))
    results: list[list[Tensor]] = []
    threads = [threading.Thread(target=lambda: results.append(run(inputs, upstream_for(16)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for result in results:
        for value, truth in zip(result, expected, strict=True):
            assert torch.equal(value, truth)


def test_peak_of_the_forward_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is as large as the logits."""
    monkeypatch.setattr(chunked, "MIN_CHUNK", 16)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 1)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for item in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(item, Tensor):
                    largest = max(largest, item.numel())
            return out

    inputs = make_inputs(64, 8, 400, torch.float32)
    with Watch():
        run(inputs, upstream_for(64), backend="chunked")
    assert largest <= max(64 * 16, 400 * 8, 64 * 8)


def test_export_stays_callable_after_its_subpackage_is_imported() -> None:
    import rl_core.fused_log_prob.api

    hidden, weight, targets, _ = make_inputs(3, 8, 20, torch.float32)
    expected = linear_log_prob(hidden, weight, targets)
    results = rl_core.linear_log_prob(hidden, weight, targets)  # type: ignore[operator]
    assert torch.equal(results[0], expected[0])
