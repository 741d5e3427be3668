"""The vLLM plugin without a server."""

from collections import deque
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.utils import replace_parameter
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from weight_sync import ReceiverError, TensorEntry, WeightManifest, plan_buckets
from weight_sync.vllm_plugin import layout
from weight_sync.vllm_plugin.adapters import patch_adapter_loading
from weight_sync.vllm_plugin.apply import ModelLoader
from weight_sync.vllm_plugin.patch import REPLACED, replace_method
from weight_sync.vllm_plugin.stale_replies import patch_executor


def test_verify_waits_for_the_device_before_the_bucket_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
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


class Workers:
    """Reply to every call with its name and their rank, and fail in ``update_weights``."""

    def __init__(self, replies: list[Replies]) -> None:
        self._replies = replies

    def enqueue(self, call: tuple[Any, ...]) -> None:
        status = WorkerProc.ResponseStatus
        method, _, _, only = call
        result = status.FAILURE if method == "update_weights" else status.SUCCESS
        for rank, queue in enumerate(self._replies):
            if only in (None, rank):
                queue.append((result, f"{method} {rank}"))


def test_replies_stay_in_order_after_a_failed_call() -> None:
    patch_executor()
    patch_executor()
    executor: Any = MultiprocExecutor.__new__(MultiprocExecutor)
    replies = [Replies() for _ in range(3)]
    executor.is_failed, executor.futures_queue = False, deque()
    executor.response_mqs, executor.rpc_broadcast_mq = replies, Workers(replies)
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


def test_replaced_methods_are_recorded_and_exist() -> None:
    patch_executor()
    patch_adapter_loading()
    for path in REPLACED:
        module, owner, name = path.rsplit(".", 2)
        assert hasattr(getattr(import_module(module), owner), name)
    assert {path.rpartition(".")[2] for path in REPLACED} == {"collective_rpc", "_load_adapter"}
    with pytest.raises(AttributeError, match="renamed_upstream"):
        replace_method(MultiprocExecutor, "renamed_upstream", lambda method: method)


class Attention(MLAAttention):
    """Stand-in for MLA attention: derives a parameter from another layer's weight after loading."""

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self._of = [model]

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        replace_parameter(self, "W_UV", 2 * self._of[0].get_parameter("weight").data)


class Mla(nn.Module):
    """A layer with a bias, and an attention with a parameter derived from its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.attention = Attention(self)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            param = self.get_parameter(name)
            getattr(param, "weight_loader", default_weight_loader)(param, tensor)


def test_derived_parameters_are_recomputed_and_not_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_num_tensor_ranks", lambda: 1)
    model = Mla()
    record_metadata_for_reloading(model)
    loader = ModelLoader(model, SimpleNamespace(dtype=torch.float32), torch.device("cpu"))
    entries = {
        "weight": TensorEntry(name="weight", shape=(4, 4), dtype="float32"),
        "bias": TensorEntry(name="bias", shape=(4,), dtype="float32"),
    }
    plan = plan_buckets(WeightManifest.of(entries.values()), 1024)
    assert loader.check(plan).direct
    model.attention.process_weights_after_loading(torch.float32)
    for missing in entries:  # vLLM does not record a bias for reloading either, but it is required
        part = plan_buckets(WeightManifest.of(entry for name, entry in entries.items() if name != missing), 1024)
        with pytest.raises(ReceiverError, match="receives 0 of its") as caught:
            loader.check(part)
        assert caught.value.tensor == missing

    loader.begin(loader.check(plan))
    loader.load(plan.buckets[0], torch.ones(plan.buckets[0].nbytes // 4).view(torch.uint8))
    assert loader.finish() == 2
    assert model.weight.eq(1).all()
    assert model.bias.eq(1).all()
    assert model.attention.get_parameter("W_UV").eq(2).all()
