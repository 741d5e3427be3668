"""The AdamW kernel, by Triton's interpreter, takes the steps of torch's fused AdamW."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_engine.adamw import AdamW

CASES = """
import itertools
import torch
from ds_engine.adamw_kernel import adamw

OPTIONS = dict(lr=3e-3, betas=(0.8, 0.99), eps=1e-6)
for size, decay, scale in itertools.product((1, 4096, 10_007), (0.0, 0.1), (None, 4.0)):
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
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_interpreted_kernel_equals_torch(tmp_path: Path) -> None:
    script = tmp_path / "cases.py"
    script.write_text(CASES)
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("case") == 12


def test_on_the_cpu_it_is_torchs() -> None:
    """Steps, names of states and options: what was saved by either can be continued by the other."""
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
