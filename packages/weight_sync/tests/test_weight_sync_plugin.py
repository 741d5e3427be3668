"""The vLLM plugin without a server."""

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.utils import replace_parameter
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from plinth_testing import raises
from weight_sync import BucketPlan, ReceiverError, SyncConfigError, TensorEntry, WeightManifest, plan_buckets
from weight_sync.vllm_plugin import layout, processing, stale_replies, verify
from weight_sync.vllm_plugin.apply import ModelLoader
from weight_sync.vllm_plugin.patch import FENCE, records
from weight_sync.vllm_plugin.processing import recording


def test_verify_waits_for_the_device_before_the_bucket_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    loader = ModelLoader(nn.Module(), None, torch.device("cpu"))
    verifier = loader.verifier()
    monkeypatch.setattr(verifier, "_compare_bucket", lambda bucket, bytes_N: events.append(f"read {bucket}"))
    monkeypatch.setattr(verify, "synchronize", lambda device: events.append("waited"))
    bucket: Any = 0
    verifier.verify(bucket, torch.empty(0))
    assert events == ["read 0", "waited"]


@pytest.fixture(autouse=True)
def without_tensor_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_num_tensor_ranks", lambda: 1)


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
    stale_replies.PATCH.wrap(stale_replies.reading_stale_replies)
    stale_replies.PATCH.wrap(stale_replies.reading_stale_replies)
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


def process(model: nn.Module) -> None:
    """Processing after loading, with this package's record of it."""

    def process_weights(model: nn.Module, model_config: Any, target_device: torch.device) -> None:
        for module in model.modules():
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)
        for module in model.modules():
            if isinstance(module, MLAAttention):
                module.process_weights_after_loading(model_config.dtype)

    recording(process_weights)(model, SimpleNamespace(dtype=torch.float32), torch.device("cpu"))


def plan_of(model: nn.Module, *names: str) -> BucketPlan:
    shapes = {name: tuple(model.get_parameter(name).shape) for name in names}
    entries = [TensorEntry(name=name, shape=shape, dtype="float32") for name, shape in shapes.items()]
    return plan_buckets(WeightManifest.of(entries), 1024)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=3), max_size=4), st.randoms())
def test_a_module_is_complete_with_the_last_copy_into_its_processed_parameters(modules: Any, chance: Any) -> None:
    """`modules`: for each parameter, whether it is written in place, and its number of copies of two elements."""
    targets: list[layout.Target] = []
    copies: list[layout.Copy] = []
    for parameters in modules:
        module = nn.Module()
        for number, (in_place, num_copies) in enumerate(parameters):
            live = torch.zeros(8)
            target = layout.Target(
                module, f"{number}", f"{number}", live, live, False, not in_place, received=2 * num_copies
            )
            targets.append(target)
            copies += [layout.Copy(target, ((2,), (1,), 0), ((2,), (1,), 0)) for _ in range(num_copies)]
    chance.shuffle(copies)
    arrivals = layout.Arrivals(layout.Layout(targets=targets))
    left, completed = Counter(id(copy.target) for copy in copies), Counter[int]()
    for copy in copies:
        if any(left.values()):
            with raises(ReceiverError, kind="count"):
                arrivals.check_complete("are missing")
        left[id(copy.target)] -= 1
        completed_now = arrivals.completed_by(copy)
        completed.update(map(id, completed_now))
        assert not any(left[id(target)] for target in completed_now)
        own = [t for t in targets if t.module is copy.target.module and t.received and not t.in_place]
        expected = [copy.target] if copy.target.in_place else own
        assert completed_now == (expected if not any(left[id(target)] for target in expected) else [])
    arrivals.check_complete("are missing")
    assert completed == dict.fromkeys((id(target) for target in targets if target.received), 1)


def test_derived_parameters_are_recomputed_and_not_required() -> None:
    model = Mla()
    record_metadata_for_reloading(model)
    process(model)
    loader = ModelLoader(model, SimpleNamespace(dtype=torch.float32), torch.device("cpu"))
    for missing, sent in (("weight", "bias"), ("bias", "weight")):
        with raises(ReceiverError, kind="plan", tensor=missing):
            loader.check(plan_of(model, sent))
    plan = plan_of(model, "weight", "bias")
    loader.begin(loader.check(plan))
    ones = torch.ones(plan.buckets[0].nbytes // 4).view(torch.uint8)
    loader.load(plan.buckets[0], ones)
    assert loader.finish() == 2
    assert model.weight.eq(1).all()
    assert model.bias.eq(1).all()
    assert model.attention.get_parameter("W_UV").eq(2).all()
    verifier = loader.verifier()
    verifier.verify(plan.buckets[0], ones)
    assert verifier.finish() == 2
    model.attention.get_parameter("W_UV")[1, 1] = 3
    verifier = loader.verifier()
    verifier.verify(plan.buckets[0], ones)
    with raises(ReceiverError, kind="verify", tensor="attention"):
        verifier.finish()


class Packing(QuantizeMethodBase):
    """Reverses a weight's rows after loading at the same shape, once, as vLLM packs experts on the CPU."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind
        self.kernel: Any = None
        self.num_calls = 0

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None: ...

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Any: ...

    def process_weights_after_loading(self, layer: Any) -> None:
        self.num_calls += 1
        if self.kernel is None and self.kind != "plain":
            replace_parameter(layer, "weight", layer.weight.data.flip(0).contiguous())
            self.kernel = SimpleNamespace()
            if self.kind == "hidden":
                self.kernel.scale = layer.weight.amax().clone()
        if self.kind == "random":
            layer.weight.data[0, 0] = torch.rand(())


def experts(kind: str = "", weight: Any = None) -> Any:
    """A module with this kind of packing, with metadata for vLLM's reload."""
    torch.manual_seed(0)
    model: Any = Mla()
    del model.attention
    model.weight.data.copy_(torch.randn(4, 4) if weight is None else weight)
    model.bias.data.copy_(torch.randn(4))
    model.quant_method = Packing(kind)
    record_metadata_for_reloading(model)
    process(model)
    return model


def push(model: Any, *names: str, layerwise: bool = False) -> tuple[ModelLoader, Any]:
    loader = ModelLoader(model, SimpleNamespace(dtype=torch.float32), torch.device("cpu"))
    plan = plan_of(model, *(names or ("weight", "bias")))
    values = torch.arange(plan.buckets[0].nbytes // 4, dtype=torch.float32).view(torch.uint8)
    loader.begin(loader.check(plan), layerwise=layerwise)
    loader.load(plan.buckets[0], values)
    assert loader.finish() == 2
    return loader, (plan.buckets[0], values)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("weight", [None, torch.zeros(4, 4)], ids=["random", "constant"])
@pytest.mark.parametrize("order", [("weight", "bias"), ("bias", "weight")], ids=["weight first", "bias first"])
def test_packed_weights_are_packed_again_and_verified(order: tuple[str, ...], layerwise: bool, weight: Any) -> None:
    model = experts(weight=weight)
    kernel, address = model.quant_method.kernel, model.weight.data_ptr()
    loader, sent = push(model, *order, layerwise=layerwise)
    start = 64.0 if order[0] == "bias" else 0.0
    assert torch.equal(model.weight, torch.arange(start, start + 16).view(4, 4).flip(0))
    assert (model.quant_method.kernel, model.weight.data_ptr()) == (kernel, address)
    verifier = loader.verifier()
    verifier.verify(*sent)
    assert verifier.finish() == 2
    model.weight.data.copy_(model.weight.flip(0))  # the bytes that were sent, unpacked
    verifier = loader.verifier()
    with raises(ReceiverError, kind="verify", tensor="weight"):
        verifier.verify(*sent)


class Skipping(Mla):
    """Ignores tensors that it has no parameter for, as some of vLLM's models do."""

    def load_weights(self, weights: Any) -> None:
        own = dict(self.named_parameters())
        super().load_weights((name, tensor) for name, tensor in weights if name in own)


def test_only_layers_that_the_model_leaves_out_receive_nothing() -> None:
    model: Any = Skipping()
    del model.attention
    model.post_norm = model.gate = None
    model.inner = nn.Module()
    model.inner.gate = nn.Identity()
    record_metadata_for_reloading(model)
    process(model)
    loader = ModelLoader(model, None, torch.device("cpu"))
    shapes = {"weight": (4, 4), "bias": (4,)}

    def check(name: str) -> None:
        entries = [TensorEntry(name=n, shape=s, dtype="float32") for n, s in (shapes | {name: (4,)}).items()]
        loader.check(plan_buckets(WeightManifest.of(entries), 1024))

    check("tower.post_norm.weight")
    for name in ("tower.norm.weight", "gate.weight", "weights", "weight.weight"):
        with raises(ReceiverError, kind="plan", tensor=name):
            check(name)


def test_unchanged_weights_are_written_in_place() -> None:
    model = experts("plain")
    push(model)
    assert torch.equal(model.weight, torch.arange(16.0).view(4, 4))
    assert model.quant_method.num_calls == 1


@pytest.mark.parametrize("kind", ["hidden", "random"])
def test_processing_that_cannot_be_repeated_is_refused(kind: str) -> None:
    with raises(ReceiverError, kind="plan"):
        push(experts(kind))
    push(experts(kind), layerwise=True)


def test_model_that_cannot_be_read_loads_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing, "digest", lambda tensor: 1 / 0)
    model = experts()
    assert model.quant_method.num_calls == 1
    with raises(ReceiverError, kind="plan"):
        push(model)


def test_model_that_was_loaded_without_the_record_is_refused() -> None:
    with raises(ReceiverError, kind="plan", tensor="weight"):
        ModelLoader(Mla(), None, torch.device("cpu")).check(plan_of(Mla(), "weight"))


# ---- the fence -------------------------------------------------------------------------------------------------------
def test_installed_vllm_has_every_declared_part() -> None:
    rows = records()
    assert {row["name"]: row["problem"] for row in rows if row["state"] != "active"} == {}
    assert len(rows) == 7
    assert all(row["reason"] and row["tested"] == "vllm>=0.26,<0.33" for row in rows)


def test_untested_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FENCE.tested, "vllm", ">=99")
    with raises(SyncConfigError, remedy="install vllm>=99"):
        stale_replies.PATCH.check()
    assert {row["state"] for row in records()} == {"refused"}
    monkeypatch.setattr(MultiprocExecutor, "collective_rpc", MultiprocExecutor.collective_rpc)
    before = MultiprocExecutor.collective_rpc
    stale_replies.PATCH.wrap(stale_replies.reading_stale_replies)
    assert MultiprocExecutor.collective_rpc is before
