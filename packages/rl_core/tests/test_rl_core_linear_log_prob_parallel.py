"""Vocabulary parallel over two real gloo processes."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rl_core.fused_log_prob import linear_log_prob

VOCAB, HIDDEN, TOKENS = 42, 8, 11


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    up = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    return hidden, weight, bias, torch.randint(VOCAB, (TOKENS,), generator=generator), up


def _worker(rank: int, world: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    hidden, weight, bias, targets, up = _inputs()
    rows = slice(rank * VOCAB // world, (rank + 1) * VOCAB // world)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight[rows], bias[rows])]
    assert dist.group.WORLD is not None
    out = linear_log_prob(leaves[0], leaves[1], targets, bias=leaves[2], temperature=0.8, group=dist.group.WORLD)
    ((out[0] * up[0]).sum() + (out[1] * up[1]).sum()).backward()
    torch.save([out[0].detach(), out[1].detach(), *(leaf.grad for leaf in leaves)], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_worker, args=(2, port, str(tmp_path)), nprocs=2)
    hidden, weight, bias, targets, up = _inputs()
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    out = linear_log_prob(leaves[0], leaves[1], targets, bias=leaves[2], temperature=0.8, backend="reference")
    ((out[0] * up[0]).sum() + (out[1] * up[1]).sum()).backward()
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for result in ranks:
        for value, truth in zip(result[:3], (out[0], out[1], leaves[0].grad), strict=True):
            torch.testing.assert_close(value, truth.detach() if truth is not None else None)
    torch.testing.assert_close(torch.cat([r[3] for r in ranks]), leaves[1].grad)
    torch.testing.assert_close(torch.cat([r[4] for r in ranks]), leaves[2].grad)
