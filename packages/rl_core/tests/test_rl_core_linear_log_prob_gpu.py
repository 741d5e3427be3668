"""linear_log_prob on a GPU: accuracy against float64, edge shapes, kept probabilities, worker threads."""

import threading

import pytest
import torch
from torch import Tensor

from rl_core.fused_log_prob import linear_log_prob

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


def make_inputs(
    tokens: int, size: int, vocab: int, dtype: torch.dtype, spread: float = 1.0, bias: bool = False
) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(tokens + size + vocab)
    hidden = torch.randn(tokens, size, generator=generator, device="cuda").to(dtype)
    weight = (spread * torch.randn(vocab, size, generator=generator, device="cuda") / size**0.5).to(dtype)
    targets = torch.randint(vocab, (tokens,), generator=generator, device="cuda")
    return hidden, weight, targets, torch.randn(vocab, generator=generator, device="cuda").to(dtype) if bias else None


def run(inputs: Inputs, dtype: torch.dtype | None = None, with_entropy: bool = True, **options: object) -> list[Tensor]:
    """Outputs and gradients, with upstream gradients as small as those of a mean over many tokens."""
    hidden, weight, targets, bias = inputs
    leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    bias = leaves[2] if bias is not None else None
    outputs = linear_log_prob(leaves[0], leaves[1], targets, bias=bias, **options)  # type: ignore[arg-type]
    generator = torch.Generator("cuda").manual_seed(1)
    upstream = 1e-4 * torch.randn(2, targets.numel(), generator=generator, device="cuda")
    loss = (outputs[0] * upstream[0]).sum() + (outputs[1] * upstream[1]).sum() * with_entropy
    return [*(x.detach() for x in outputs), *torch.autograd.grad(loss, leaves)]


def check(inputs: Inputs, with_entropy: bool = True, keep_bytes: int | None = None, **options: object) -> None:
    """Log-prob and entropy within 1e-4; gradients within 2e-3 of what float32 throughout reaches."""
    mine = run(inputs, with_entropy=with_entropy, keep_bytes=keep_bytes, **options)
    exact = run(inputs, torch.float64, with_entropy, backend="reference", **options)
    plain = run(inputs, None, with_entropy, backend="reference", **options)
    for index, (value, truth, base) in enumerate(zip(mine, exact, plain, strict=True)):
        if index < 2:
            assert (value.double() - truth).abs().max() < 1e-4
        else:
            error, floor = ((x.double() - truth).norm() / truth.norm() for x in (value, base))
            assert error <= floor + 2e-3


@pytest.mark.parametrize("keep_bytes", [0, 1000 * 516 * 7, 2**40])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_bf16(keep_bytes: int, with_entropy: bool, spread: float) -> None:
    check(make_inputs(1000, 1024, 5003, torch.bfloat16, spread), with_entropy, keep_bytes, temperature=0.8)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("size", [1024, 4096])
def test_default_keeps_in_the_memory_of_the_weight_gradient(size: int, with_entropy: bool) -> None:
    check(make_inputs(2000, size, 151936, torch.bfloat16, 2.0), with_entropy)


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_kept_rows_with_probability_outside_the_first_columns(spread: float) -> None:
    hidden, weight, targets, _ = make_inputs(1000, 1024, 5003, torch.bfloat16)
    hidden = hidden.clone()
    hidden[::2] = (spread * weight[targets[::2]]).to(hidden.dtype)  # nearly all probability in one token, for 30
    check((hidden, weight, targets, None), False, 2**40, temperature=0.5)


@pytest.mark.parametrize("rows", [30000, 70000])
def test_groups_of_rows_add_up(rows: int) -> None:
    check(make_inputs(rows, 4096 if rows < 50000 else 1024, 3001, torch.bfloat16, 2.0), keep_bytes=0)


SHAPES = [(2048, 1024, 151936), (8192, 2048, 100003), (16384, 1024, 32000), (65536, 2048, 9000), (65536, 4096, 9000)]


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_beyond_gradients(shape: tuple[int, int, int]) -> None:
    hidden, weight, targets, _ = make_inputs(*shape, torch.bfloat16)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    for attempt in range(2):  # the first attempt also allocates the cuBLAS workspace
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        log_probs, entropy = linear_log_prob(*leaves, targets)
        (log_probs.sum() + entropy.sum()).backward()
        extra = torch.cuda.max_memory_allocated() - before - 2 * (hidden.numel() + weight.numel())
        assert attempt == 0 or extra <= 2**29
        del log_probs, entropy


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    check(make_inputs(700, 512, 3001, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keep_bytes", [0, 2**40])
def test_bias_and_soft_cap_take_the_portable_kernels(dtype: torch.dtype, keep_bytes: int) -> None:
    check(make_inputs(777, 208, 3001, dtype, bias=True), keep_bytes=keep_bytes, soft_cap=5.0)


@pytest.mark.parametrize("shape", [(1, 1024, 32000), (128, 64, 256), (777, 16, 3001), (20000, 256, 5000)])
@pytest.mark.parametrize("keep_bytes", [0, 2**40])
def test_edge_shapes(shape: tuple[int, int, int], keep_bytes: int) -> None:
    check(make_inputs(*shape, torch.bfloat16), keep_bytes=keep_bytes)


def test_deterministic_results_repeat() -> None:
    inputs = make_inputs(1000, 1024, 5003, torch.bfloat16)
    for first, second in zip(run(inputs, deterministic=True), run(inputs, deterministic=True), strict=True):
        assert torch.equal(first, second)


def num_compiled() -> int:
    """Variants of the op's kernels that this process has compiled or loaded."""
    from rl_core.fused_log_prob import hopper_kernels, triton_kernels

    values = [*vars(hopper_kernels).values(), *vars(triton_kernels).values()]
    kernels = {id(value): value for value in values if hasattr(value, "device_caches")}
    return sum(len(caches[0]) for kernel in kernels.values() for caches in kernel.device_caches.values())


@pytest.mark.parametrize("vocab", [32000, 151936])
def test_other_numbers_of_tokens_compile_nothing(vocab: int) -> None:
    """Else a run's first batch with an odd number of tokens waits for a compiler."""
    run(make_inputs(16384, 1024, vocab, torch.bfloat16), with_entropy=vocab > 32000)
    compiled = num_compiled()
    assert compiled
    for tokens in (16383, 16002, 15001):
        run(make_inputs(tokens, 1024, vocab, torch.bfloat16), with_entropy=vocab > 32000)
        assert num_compiled() == compiled, tokens


def test_out_of_range_targets_give_nan() -> None:
    hidden, weight, targets, _ = make_inputs(10, 64, 300, torch.bfloat16)
    targets[3] = 300
    log_probs, _ = linear_log_prob(hidden, weight, targets)
    assert torch.isnan(log_probs).nonzero()[:, 0].tolist() == [3]


def test_worker_threads() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            check(make_inputs(600, 256, 3000, torch.bfloat16, bias=True))
            check(make_inputs(1000, 1024, 5003, torch.bfloat16))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
