"""Two real gloo processes: whitening and totals across ranks, and a gradient averaged over ranks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core import (
    aggregate_loss,
    broadcast_to_tokens,
    global_totals,
    group_advantages,
    masked_whiten,
    plan_micro_batches,
    ppo_clip_loss,
    reinforce_pp_baseline_advantages,
    token_weights,
)

WORLD_SIZE = 2
LENS = [3, 0, 5, 2, 1, 4, 4]


def _data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    num_tokens = sum(LENS)
    lens = torch.tensor(LENS)
    scores = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    advantages = group_advantages(scores, torch.tensor([0, 0, 0, 1, 1, 1, 1]))
    return {
        "features": torch.randn(num_tokens, 3, generator=generator, dtype=torch.float64),
        "old": torch.randn(num_tokens, generator=generator, dtype=torch.float64) - 1,
        "advantages": broadcast_to_tokens(advantages, lens),
        "values": 100 + torch.randn(11, generator=generator, dtype=torch.float64),
    }


def _share(data: dict[str, Tensor], rows: list[int], weights: Tensor, theta: Tensor) -> Tensor:
    lens = torch.tensor(LENS)
    starts = (lens.cumsum(0) - lens).tolist()
    index = torch.tensor([starts[r] + t for r in rows for t in range(LENS[r])], dtype=torch.int64)
    log_probs = (data["features"][index] * theta).sum(-1)
    loss_K, _ = ppo_clip_loss(log_probs, data["old"][index], data["advantages"][index])
    return aggregate_loss(loss_K, weights, lens[torch.tensor(rows, dtype=torch.int64)])


def _rank_main(rank: int, port: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    calls = 0
    real_all_reduce = dist.all_reduce

    def counted(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        return real_all_reduce(*args, **options)  # type: ignore[arg-type]

    dist.all_reduce = counted
    group, data, results = dist.group.WORLD, _data(), {}
    # uneven shards, then a rank with nothing at all: the same single collective
    for name, cut in (("uneven", 4), ("one_empty", 11)):
        shard = data["values"][:cut] if rank == 0 else data["values"][cut:]
        calls = 0
        results[name] = masked_whiten(shard, group=group)
        assert calls == 1
    lens = torch.tensor(LENS)
    scores, ids = torch.arange(7, dtype=torch.float64).square(), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mine = slice(0, 3) if rank == 0 else slice(3, 7)
    calls = 0
    results["reinforce_pp"] = reinforce_pp_baseline_advantages(scores[mine], ids[mine], lens[mine], group=group)
    assert calls == 1
    plan = plan_micro_batches([length + 1 for length in LENS], num_ranks=WORLD_SIZE, token_budget=6)
    rows = list(plan.rank_samples(rank))
    calls = 0
    num_tokens, num_sequences = global_totals(lens[rows], group)
    assert calls == 1
    assert (num_tokens, num_sequences) == (sum(LENS), 6)
    theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for micro in plan.assignment[rank]:
        weights = token_weights(
            "token_mean", lens[list(micro)], num_tokens=num_tokens, num_sequences=num_sequences, dtype=torch.float64
        )
        (WORLD_SIZE * _share(data, list(micro), weights, theta)).backward()
    assert theta.grad is not None
    real_all_reduce(theta.grad)
    results["grad"] = theta.grad / WORLD_SIZE
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # this very file as a script: nothing to pickle, so it works however pytest imported the module
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(port), str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(WORLD_SIZE)]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0] * WORLD_SIZE
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(WORLD_SIZE)]
    data, lens = _data(), torch.tensor(LENS)
    whole = masked_whiten(data["values"])
    for name in ("uneven", "one_empty"):
        torch.testing.assert_close(torch.cat([r[name] for r in ranks]), whole, rtol=1e-12, atol=1e-12)
    scores, ids = torch.arange(7, dtype=torch.float64).square(), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    torch.testing.assert_close(
        torch.cat([r["reinforce_pp"] for r in ranks]),
        reinforce_pp_baseline_advantages(scores, ids, lens),
        rtol=1e-12,
        atol=1e-12,
    )
    theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
    weights = token_weights("token_mean", lens, dtype=torch.float64)
    _share(data, list(range(len(LENS))), weights, theta).backward()
    for rank in ranks:
        torch.testing.assert_close(rank["grad"], theta.grad, rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    _rank_main(int(sys.argv[3]), int(sys.argv[1]), sys.argv[2])
