"""AdamW and its kernel, by Triton's interpreter, take the steps of torch's fused AdamW, and continue its states."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ds_engine.zero.adamw import AdamW
from plinth_testing import run_under_the_interpreter

CASES = """
import itertools
import torch
from ds_engine.zero.adamw_kernel import adamw

OPTIONS = dict(lr=3e-3, betas=(0.8, 0.99), eps=1e-6)
for size, decay, scale in itertools.product((1, 5000), (0.0, 0.1), (None, 4.0)):
    generator = torch.Generator().manual_seed(size)
    ours = torch.randn(size, generator=generator)
    mean, square, count = torch.zeros(size), torch.zeros(size), torch.zeros(())
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = torch.optim.AdamW([theirs], weight_decay=decay, fused=True, **OPTIONS)
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    for _ in range(4):
        gradient = torch.randn(size, generator=generator)
        theirs.grad = gradient.clone()  # torch divides it in place
        optimizer.step()
        count += 1
        adamw(ours, gradient, mean, square, count, weight_decay=decay, grad_scale=optimizer.grad_scale, **OPTIONS)
    state = optimizer.state[theirs]
    for tensor, expected in ((ours, theirs), (mean, state["exp_avg"]), (square, state["exp_avg_sq"])):
        torch.testing.assert_close(tensor, expected.detach(), rtol=2e-6, atol=2e-6)
    print("case")

# A decay so small that fp32 hardly has 1 - lr * decay.
OPTIONS = dict(lr=1e-6, betas=(0.9, 0.999), eps=1e-8, grad_scale=None)
for decay in (0.05, 0.3):
    before = 1 + torch.rand(5_000, generator=torch.Generator().manual_seed(0))
    after, zeros = before.clone(), torch.zeros(5_000)
    adamw(after, zeros, zeros.clone(), zeros.clone(), torch.ones(()), weight_decay=decay, **OPTIONS)
    assert torch.equal(after, (before.double() * (1 - 1e-6 * decay)).float())
    print("case")
"""

CONTINUED = """
import torch
import ds_engine.zero.adamw
from ds_engine.zero.adamw import AdamW

ds_engine.zero.adamw._is_supported = lambda param: True  # the interpreter runs it on the CPU
OPTIONS = dict(betas=(0.8, 0.99), eps=1e-6)


def groups():
    sizes, generator = (40, 5000, 3), torch.Generator().manual_seed(0)
    tensors = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    return [dict(params=tensors[:2], lr=3e-3, weight_decay=0.1), dict(params=tensors[2:], lr=1e-2, weight_decay=0.0)]


def train(optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.grad_scale = torch.tensor(2.0) if step % 2 else None
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator)
        optimizer.param_groups[1]["params"][0].grad = None if step == 2 else torch.ones(3)  # a group without gradients
        optimizer.step()


def ours(params):
    return AdamW(params, **OPTIONS)


def theirs(params):
    return torch.optim.AdamW(params, fused=True, **OPTIONS)


expected = theirs(groups())
train(expected, range(6))
for first, then in ((ours, theirs), (theirs, ours), (ours, ours)):
    saved = first(groups())
    train(saved, range(3))
    continued = then([dict(params=group["params"]) for group in saved.param_groups])
    continued.load_state_dict(saved.state_dict())
    train(continued, range(3, 6))
    for group, expected_group in zip(continued.param_groups, expected.param_groups, strict=True):
        for param, expected_param in zip(group["params"], expected_group["params"], strict=True):
            torch.testing.assert_close(param, expected_param, rtol=1e-5, atol=1e-6)
            state = continued.state[param]
            assert state.keys() == expected.state[expected_param].keys()
            for name, value in expected.state[expected_param].items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    print("case")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_interpreted_kernel_equals_torch() -> None:
    """The kernel alone, and the optimizer resumed from its own and from torch's state."""
    assert run_under_the_interpreter(CASES + CONTINUED).count("case") == 8 + 2 + 3


def test_cpu_steps_and_states_equal_torchs_fused_adamw() -> None:
    """Same steps, state names and options, so that either resumes from the state of the other."""
    pairs = []
    for kind in (AdamW, lambda params, **options: torch.optim.AdamW(params, fused=True, **options)):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 50))
        optimizer = kind([weight], lr=1e-2, weight_decay=0.1)
        optimizer.grad_scale = torch.tensor(2.0)
        for step in range(3):
            weight.grad = torch.linspace(0, 1 + step, 50)
            optimizer.step()
        pairs.append((weight.detach(), optimizer.state_dict()))
    (ours, our_state), (theirs, their_state) = pairs
    assert torch.equal(ours, theirs)
    assert our_state["param_groups"] == their_state["param_groups"]
    for name, value in their_state["state"][0].items():
        assert torch.equal(our_state["state"][0][name], value), name
