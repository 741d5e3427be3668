"""What runs inside vLLM, without a server."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from weight_sync.vllm_plugin.apply import ModelLoader
from weight_sync.vllm_plugin.replies import keep_in_step


def test_a_compared_bucket_is_no_longer_read_when_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    loader = ModelLoader(nn.Module(), None, torch.device("cpu"))
    compare = SimpleNamespace(verify=lambda bucket, bytes_N: events.append(f"read {bucket}"))
    monkeypatch.setattr(loader, "_verifier", compare)
    monkeypatch.setattr(loader, "_synchronize", lambda: events.append("waited"))
    bucket: Any = 0
    loader.verify(bucket, torch.empty(0))
    assert events == ["read 0", "waited"]


class Replies(deque[Any]):
    """A worker's reply queue."""

    def dequeue(self, **_: Any) -> Any:
        return self.popleft()


class Asked:
    """The workers: each replies to every call with its name and its own rank, and fails in ``update_weights``."""

    def __init__(self, replies: list[Replies]) -> None:
        self._replies = replies

    def enqueue(self, call: tuple[Any, ...]) -> None:
        status = WorkerProc.ResponseStatus
        method, _, _, only = call
        result = status.FAILURE if method == "update_weights" else status.SUCCESS
        for rank, queue in enumerate(self._replies):
            if only in (None, rank):
                queue.append((result, f"{method} {rank}"))


def test_a_failed_call_leaves_no_reply_for_the_next() -> None:
    keep_in_step()
    keep_in_step()
    executor: Any = MultiprocExecutor.__new__(MultiprocExecutor)
    replies = [Replies() for _ in range(3)]
    executor.is_failed, executor.futures_queue = False, deque()
    executor.response_mqs, executor.rpc_broadcast_mq = replies, Asked(replies)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="update_weights 0"):
            executor.collective_rpc("update_weights")
        assert executor.response_mqs is replies
    assert executor.collective_rpc("start_weight_update") == [f"start_weight_update {rank}" for rank in range(3)]
    with pytest.raises(RuntimeError):
        executor.collective_rpc("update_weights")
    running = executor.collective_rpc("execute_model", non_block=True, unique_reply_rank=2)
    assert executor.collective_rpc("sleep") == [f"sleep {rank}" for rank in range(3)]
    assert running.result() == "execute_model 2"
    assert not any(replies)
