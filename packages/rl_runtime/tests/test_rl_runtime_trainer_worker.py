"""Tensors that a rank pushes to servers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_engine import EngineConfig, check_model
from ds_engine.model import trial
from rl_data import build_tiny_model
from rl_runtime.ranks import trainer_worker
from rl_runtime.ranks.trainer_worker import TrainerWorker
from weight_sync import SyncConfig


class Engine:
    """Names what it would push."""

    def whole_tensors(self, *, merged: bool = True) -> str:
        return "merged" if merged else "base"

    def adapter_tensors(self) -> str:
        return "adapters"

    def adapter_config(self) -> dict[str, Any]:
        return {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("adapter", "base", "expected"),
    [
        (None, True, [("merged", 1)]),
        ("policy", True, [("base", 0), ("adapters", 1)]),
        ("policy", False, [("adapters", 1)]),  # a server that rounded the folder's weights has no place for 16 bits
    ],
)
def test_a_server_with_a_base_of_its_own_gets_adapters_alone(
    monkeypatch: pytest.MonkeyPatch, adapter: str | None, base: bool, expected: list[tuple[str, int]]
) -> None:
    pushed: list[tuple[str, int]] = []

    class Pusher:
        def __init__(self, source: str, **_: Any) -> None:
            self.source = source

        def push(self, version: int) -> None:
            pushed.append((self.source, version))

        def __enter__(self) -> "Pusher":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(trainer_worker, "WeightPusher", Pusher)
    monkeypatch.setattr(trainer_worker, "ZeroSource", lambda tensors: tensors)
    worker = object.__new__(TrainerWorker)  # a whole one joins a process group
    vars(worker).update(_pusher=None, _engines={"actor": Engine()}, rank=0, device="cpu")
    worker.connect_servers("actor", [], SyncConfig(), adapter, 0, base)
    worker.push_weights(1)
    assert pushed == expected


def test_a_warmed_up_rank_has_tried_the_model_and_draws_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(build_tiny_model(tmp_path / "model"))
    worker = TrainerWorker(0, 1, device="cpu", num_threads=1)
    before = torch.get_rng_state()
    worker.warm_up(folder)
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(trial, "_try", None)
    check_model(folder, EngineConfig())  # knows the trial of the warm-up
    worker.warm_up(str(tmp_path / "none"))  # the engine says what is wrong
