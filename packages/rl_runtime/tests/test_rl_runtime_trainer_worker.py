"""Micro batches that a rank packs, and tensors that it pushes to servers."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_engine import EngineConfig, check_model
from ds_engine.model import trial
from rl_core import pack
from rl_data import build_tiny_model
from rl_runtime.ranks import trainer_worker
from rl_runtime.ranks.trainer_worker import RankPart, TrainerWorker
from weight_sync import SyncConfig


@given(st.data(), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=8), st.booleans())
def test_a_rank_packs_the_micro_batches_that_the_whole_batch_has(
    data: st.DataObject, rows: list[tuple[int, int]], shares: bool
) -> None:
    lens = [length for _, length in rows]
    facts = {"group_ids": torch.arange(len(rows))}
    batch = pack([[7, 8, 9, kind] for kind, _ in rows], [[5] * length for length in lens], per_sequence=facts)
    order = batch.order_prefixes(min_tokens=1) if shares else None
    chosen = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(0, len(rows)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(chosen)), min_size=3, max_size=3)))
    plan = [[chosen[: cuts[0]], chosen[cuts[0] : cuts[1]]], [chosen[cuts[1] : cuts[2]], chosen[cuts[2] :]]]

    minis = RankPart.of(batch, plan, order).micro_batches()
    for sequences, micro in zip([*plan[0], *plan[1]], [*minis[0], *minis[1]], strict=True):
        direct = batch.select(sequences)
        if order is not None:
            direct = direct.with_prefixes(order.select(sequences))
        assert micro.num_computed_tokens == direct.num_computed_tokens
        for name in ("input_ids_T", "position_ids_T", "cu_seqlens_S1", "target_index_K", "target_ids_K"):
            assert torch.equal(getattr(micro, name), getattr(direct, name)), name
        assert torch.equal(micro.per_sequence["group_ids"], torch.tensor(sequences, dtype=torch.int64))
        if micro.prefixes is not None and direct.prefixes is not None:
            assert torch.equal(micro.prefixes.place_T, direct.prefixes.place_T)


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


def test_a_warmed_up_rank_has_its_imports_and_draws_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(build_tiny_model(tmp_path / "model"))
    for name, value in (("LOCAL_RANK", "0"), ("DS_ACCELERATOR", "cpu")):
        monkeypatch.setenv(name, value)
    worker = TrainerWorker(0, 1, device="cpu", num_threads=1)
    before = torch.get_rng_state()
    worker.warm_up(folder)
    assert sys.modules.keys() >= {"deepspeed", "transformers.modeling_utils"}
    assert torch.equal(torch.get_rng_state(), before)
    worker.warm_up(str(tmp_path / "none"))  # the engine says what is wrong


def test_a_rank_does_not_try_again_what_the_driver_has_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(build_tiny_model(tmp_path / "model"))
    check_model(folder, EngineConfig())
    sent = pickle.dumps(trial.TRIALS)
    trial.TRIALS.clear()  # as in the process of a rank
    monkeypatch.setattr(trainer_worker, "init_distributed", lambda **_: None)
    monkeypatch.setattr(trial, "_try", None)
    TrainerWorker(0, 1, device="cpu", num_threads=1).connect("127.0.0.1", 0, pickle.loads(sent))
    assert check_model(folder, EngineConfig()).way == "packed"
