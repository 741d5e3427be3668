"""LoRA adapters pushed into a real CPU server: output of PEFT's model, base model unchanged, all servers or none."""

from collections.abc import Iterator
from typing import Any

import pytest
import weight_sync_helpers as helpers
from weight_sync_helpers import ChangedSource, Server, assert_serves, flip_bytes, is_paused

from plinth_testing import raises
from weight_sync import Adapter, ModuleSource, ReceiverError, SyncConfig, SyncConfigError, WeightPusher, peft_name

pytestmark = [pytest.mark.slow, pytest.mark.long]

RANK = 8
NAME = "tuned"
FLAGS = ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "1"]


@pytest.fixture(scope="module")
def lora_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the base model with one LoRA slot."""
    folder = tmp_path_factory.mktemp("weight_sync_lora")
    helpers.save_model(helpers.tiny_model(seed=1), folder / "model")
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with helpers.running_server(folder / "model", folder / "server.log", extra_args=FLAGS, env=env) as running:
        yield running


def tuned_model(seed: int) -> Any:
    """The server's base model with adapters that change every prediction."""
    import peft
    import torch

    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = peft.get_peft_model(helpers.tiny_model(seed=1), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.normal_(0.0, 0.1)
    return model.eval()


def adapter_of(model: Any, **changes: Any) -> Adapter:
    settings = {key: getattr(model.peft_config["default"], key) for key in ("r", "lora_alpha")}
    settings["target_modules"] = sorted(model.peft_config["default"].target_modules)
    return Adapter(name=NAME, settings=settings | changes)


def pusher_of(model: Any, servers: list[Server], config: SyncConfig | None = None, **changes: Any) -> WeightPusher:
    return WeightPusher(ModuleSource(model, rename=peft_name), servers, config, adapter=adapter_of(model, **changes))


def test_adapter_is_served_next_to_the_base_model(lora_server: Server, old_model: Any, monkeypatch: Any) -> None:
    first, second = tuned_model(7), tuned_model(8)
    with pusher_of(first, [lora_server]) as pusher:
        report = pusher.push(1)
        assert report.num_bytes < 0.5 * sum(p.numel() * 4 for p in old_model.parameters())
        assert report.num_tensors == 2 * 2 * 7
    assert assert_serves(lora_server, first, NAME) <= 1e-4
    assert assert_serves(lora_server, old_model) <= 1e-4
    monkeypatch.setattr(SyncConfig, "bucket_bytes", lambda *_: 20_000)
    with pusher_of(second, [lora_server], SyncConfig(verify=True)) as pusher:
        pusher.push(2)
        assert assert_serves(lora_server, second, NAME) <= 1e-4
        flip_bytes(monkeypatch, 1)
        assert pusher.push(3).num_attempts == 2
    assert assert_serves(lora_server, second, NAME) <= 1e-4
    assert assert_serves(lora_server, old_model) <= 1e-4
    helpers.assert_reports_version(lora_server, 3)


def test_mismatched_adapter_is_rejected_and_the_previous_version_stays(lora_server: Server, server: Server) -> None:
    model = tuned_model(7)
    with pusher_of(model, [lora_server]) as pusher:
        pusher.push(1)
    lora = "layers.1.mlp.down_proj.lora_"
    plain = ModuleSource(model, rename=peft_name)
    unknown = f"base_model.model.x.{lora}B.weight"
    cases: list[tuple[Any, Adapter, str]] = [
        (ChangedSource(plain, f"{lora}A.weight", {"shape": (RANK, 64)}), adapter_of(model), f"{lora}A.weight"),
        (ChangedSource(plain, f"{lora}B.weight", {"shape": (64, RANK // 2)}), adapter_of(model), f"{lora}A.weight"),
        (ChangedSource(plain, f"{lora}B.weight", None), adapter_of(model), f"{lora}A.weight"),
        (ChangedSource(plain, f"{lora}B.weight", {"name": unknown}), adapter_of(model), unknown),
        (plain, adapter_of(model, r=2 * RANK), ""),
        (plain, adapter_of(model, use_dora=True), ""),
    ]
    for source, adapter, tensor in cases:
        with WeightPusher(source, [lora_server], adapter=adapter) as pusher:
            with raises(ReceiverError, kind="plan") as caught:
                pusher.push(2)
            assert caught.value.tensor.endswith(tensor)
            assert bool(caught.value.tensor) == bool(tensor)
    with pusher_of(tuned_model(8), [lora_server, server]) as pusher:
        with raises(ReceiverError, kind="plan", tensor=""):
            pusher.push(2)  # one server cannot load it, so none publishes it
        assert is_paused(lora_server)
        assert is_paused(server)
    with WeightPusher(ModuleSource(helpers.tiny_model(seed=2)), [server]) as pusher:
        pusher.push(1)
    helpers.call(lora_server, "POST", "/resume")
    assert_serves(lora_server, model, NAME)  # the previous version
    with raises(SyncConfigError, field="settings"):
        Adapter(name="a", settings={"lora_alpha": 1, "target_modules": []})


def test_base_weights_load_below_adapters_in_a_vllm_without_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26's layers with LoRA slots do not pass weights on."""
    import torch
    from vllm.lora.layers.base import BaseLayerWithLoRA

    from weight_sync.vllm_plugin.adapters import load_weights_below_adapters

    monkeypatch.delattr(BaseLayerWithLoRA, "load_weights", raising=False)
    load_weights_below_adapters()
    layer: Any = BaseLayerWithLoRA()
    layer.base_layer = torch.nn.Linear(3, 2)
    weight, bias = torch.randn(2, 3), torch.randn(2)
    loaded = layer.load_weights([("weight", weight), ("bias", bias)])
    assert set(loaded) == {"base_layer.weight", "base_layer.bias"}
    assert torch.equal(layer.base_layer.weight, weight)
    assert torch.equal(layer.base_layer.bias, bias)
