"""Universal checkpoints are read by parameter; with real engines: tests/test_foreign_checkpoints.py."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import ShardError, UniversalState, open_deepspeed
from plinth_testing import raises

WEIGHT, BIAS = torch.arange(6.0).reshape(2, 3), torch.arange(2.0)


def write(folder: Path, *, step: Any = 4, momentum: bool = False) -> Path:
    """A universal checkpoint as `ds_to_universal` writes it: `step` in every parameter's folder, or None."""
    shapes = [{"layer.weight": torch.Size([2, 3]), "layer.bias": torch.Size([2])}]
    for name, tensor in (("layer.weight", WEIGHT), ("layer.bias", BIAS)):
        place = folder / "zero" / name
        place.mkdir(parents=True)
        kinds = ("momentum_buffer",) if momentum and name == "layer.weight" else ("exp_avg", "exp_avg_sq")
        for scale, kind in enumerate(("fp32", *kinds), 1):
            torch.save({"param": scale * tensor, "cat_dim": 0}, place / f"{kind}.pt")
        if step is not None:
            torch.save(step, place / "step.pt")
    torch.save({"param_shapes": shapes, "global_steps": 5, "epoch": 1}, folder / "mp_rank_00_model_states.pt")
    return folder


def test_elements_of_weights_and_states_are_read(tmp_path: Path) -> None:
    source = open_deepspeed(write(tmp_path / "out" / "global_step5"))
    assert isinstance(source, UniversalState)
    source.check()
    assert source.shapes == {"layer.weight": (2, 3), "layer.bias": (2,)}
    assert (source.optimizer_steps, source.counters, source.client_state) == (4, {"global_steps": 5}, {"epoch": 1})
    assert source.states == ("exp_avg", "exp_avg_sq")
    assert torch.equal(source.whole("layer.weight", "exp_avg"), 2 * WEIGHT)
    assert torch.equal(source.read("layer.weight", "exp_avg_sq", 1, 4), 3 * WEIGHT.reshape(-1)[1:4])
    assert torch.equal(source.read("layer.bias"), BIAS)


def test_parameters_have_their_own_states(tmp_path: Path) -> None:
    source = UniversalState(write(tmp_path, step=torch.tensor(4.0), momentum=True))
    source.check()
    assert source.states_of("layer.weight") == ("momentum_buffer",)
    assert source.states_of("layer.bias") == ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    "state",
    [
        {"optimizer_state_dict": {"state": {0: {"step": torch.tensor(7.0)}}}},  # stage 3
        {"param_groups": [{"lr": 1e-3, "step": 7}]},  # DeepSpeed's own Adam
    ],
)
def test_the_number_of_steps_may_be_stated_once(tmp_path: Path, state: dict[str, Any]) -> None:
    torch.save(state, write(tmp_path, step=None) / "zero" / "optimizer_state.pt")
    assert UniversalState(tmp_path).optimizer_steps == 7


def test_incomplete_torn_and_foreign_files_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path) / "zero" / "layer.bias" / "exp_avg.pt"
    torch.save({"param": torch.zeros(3)}, file)
    with raises(ShardError, field=str(file), value=3):
        UniversalState(tmp_path).check()
    torch.save({"param": os.system}, file)
    with raises(ShardError, value=str(file)):
        UniversalState(tmp_path).check()
    (file.parent / "fp32.pt").unlink()
    with pytest.raises(ShardError):
        UniversalState(tmp_path)
