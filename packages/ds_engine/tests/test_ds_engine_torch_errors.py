"""torch.distributed says of each provoked failure what `classify_torch_error` reads in it."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_engine.torch_errors import classify_torch_error
from plinth_testing import launch_ranks

STORES = {
    "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "hash": dist.HashStore,
}


@pytest.mark.parametrize("store", STORES)
def test_a_wait_for_a_key_that_nobody_sets_is_a_timeout(store: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        STORES[store]().wait(["nowhere"], timedelta(seconds=0.05))
    assert classify_torch_error(caught.value) == "timeout"


def test_a_bug_is_neither() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) + torch.zeros(3)
    assert classify_torch_error(caught.value) is None


def _lose_a_peer() -> None:
    """Rank 1 ends without a word during a collective of rank 0."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1000))
    assert classify_torch_error(caught.value) == "lost peer", str(caught.value)
    os._exit(0)


@pytest.mark.slow
def test_a_collective_with_a_rank_that_ended_is_a_lost_peer() -> None:
    launch_ranks(Path(__file__), timeout_s=90)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _lose_a_peer()
