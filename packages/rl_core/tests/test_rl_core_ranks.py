"""Two gloo ranks give the results of one process: whitening, totals, averaged gradients, vocabulary parallelism."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from plinth_testing import record_calls, run_ranks, run_script
from rl_core import (
    aggregate_loss,
    broadcast_to_tokens,
    global_totals,
    group_advantages,
    linear_log_prob,
    masked_whiten,
    plan_micro_batches,
    ppo_clip_loss,
    reinforce_pp_baseline_advantages,
    token_weights,
)

WORLD_SIZE = 2
LENS = [3, 0, 5, 2, 1, 4, 4]
VOCAB = 42


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
        "scores": torch.arange(7, dtype=torch.float64).square(),
        "ids": torch.tensor([0, 0, 0, 1, 1, 1, 1]),
    }


def _share(data: dict[str, Tensor], rows: list[int], weights: Tensor, theta: Tensor) -> Tensor:
    lens = torch.tensor(LENS)
    starts = (lens.cumsum(0) - lens).tolist()
    index = torch.tensor([starts[r] + t for r in rows for t in range(LENS[r])], dtype=torch.int64)
    log_probs = (data["features"][index] * theta).sum(-1)
    loss_K, _ = ppo_clip_loss(log_probs, data["old"][index], data["advantages"][index])
    return aggregate_loss(loss_K, weights, lens[torch.tensor(rows, dtype=torch.int64)])


def _log_probs(rows: slice, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Log-probs, entropy and gradients of hidden, weight and bias, with these rows of the vocabulary on this rank."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias, upstream = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((11, 8), (VOCAB, 8), (VOCAB,), (2, 11))
    )
    targets = torch.randint(VOCAB, (11,), generator=generator)
    bias[VOCAB // 2 :] = -torch.inf  # a shard without any allowed token
    targets %= VOCAB // 2
    leaves = [x.clone().requires_grad_() for x in (hidden, weight[rows], bias[rows])]
    backend = "reference" if group is None else "auto"
    out = linear_log_prob(*leaves[:2], targets, bias=leaves[2], temperature=0.8, group=group, backend=backend)
    loss = (out[0] * upstream[0]).sum() + (out[1] * upstream[1]).sum()
    return [*(x.detach() for x in out), *torch.autograd.grad(loss, leaves)]


def _rank_main(rank: int) -> None:
    dist.init_process_group("gloo")
    group, data, results = dist.group.WORLD, _data(), {}
    # uneven shards, then a rank without values: exactly one collective in both cases
    for name, cut in (("uneven", 4), ("one_empty", 11)):
        shard = data["values"][:cut] if rank == 0 else data["values"][cut:]
        with record_calls() as calls:
            results[name] = masked_whiten(shard, group=group)
        assert calls == ["all_reduce"]
    lens = torch.tensor(LENS)
    mine = slice(0, 3) if rank == 0 else slice(3, 7)
    with record_calls() as calls:
        results["reinforce_pp"] = reinforce_pp_baseline_advantages(
            data["scores"][mine], data["ids"][mine], lens[mine], group=group
        )
    assert calls == ["all_reduce"]
    plan = plan_micro_batches([length + 1 for length in LENS], num_ranks=WORLD_SIZE, token_budget=6)
    with record_calls() as calls:
        num_tokens, num_sequences = global_totals(lens[list(sum(plan.assignment[rank], ()))], group)
    assert calls == ["all_reduce"]
    assert (num_tokens, num_sequences) == (sum(LENS), 6)
    theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for micro in plan.assignment[rank]:
        weights = token_weights(
            "token_mean", lens[list(micro)], num_tokens=num_tokens, num_sequences=num_sequences, dtype=torch.float64
        )
        (WORLD_SIZE * _share(data, list(micro), weights, theta)).backward()
    assert theta.grad is not None
    dist.all_reduce(theta.grad)
    results["grad"] = theta.grad / WORLD_SIZE
    results["log_probs"] = _log_probs(slice(rank * VOCAB // 2, (rank + 1) * VOCAB // 2), group)
    torch.save(results, Path(sys.argv[1]) / f"rank{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    run_script(Path(__file__), tmp_path, env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(WORLD_SIZE)]
    data, lens = _data(), torch.tensor(LENS)
    whole = masked_whiten(data["values"])
    for name in ("uneven", "one_empty"):
        torch.testing.assert_close(torch.cat([r[name] for r in ranks]), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.cat([r["reinforce_pp"] for r in ranks]),
        reinforce_pp_baseline_advantages(data["scores"], data["ids"], lens),
        rtol=1e-12,
        atol=1e-12,
    )
    theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
    weights = token_weights("token_mean", lens, dtype=torch.float64)
    _share(data, list(range(len(LENS))), weights, theta).backward()
    log_probs, entropy, d_hidden, d_weight, d_bias = _log_probs(slice(None), None)
    for rank in ranks:
        torch.testing.assert_close(rank["grad"], theta.grad, rtol=1e-12, atol=1e-12)
        for value, truth in zip(rank["log_probs"][:3], (log_probs, entropy, d_hidden), strict=True):
            torch.testing.assert_close(value, truth)
    torch.testing.assert_close(torch.cat([r["log_probs"][3] for r in ranks]), d_weight)
    torch.testing.assert_close(torch.cat([r["log_probs"][4] for r in ranks]), d_bias)


if __name__ == "__main__":
    run_ranks(_rank_main, num_ranks=WORLD_SIZE)
