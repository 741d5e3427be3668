"""A checkpoint of another architecture is refused before anything is loaded."""

from pathlib import Path
from typing import Any

import torch

from ckpt import ArchitectureMismatchError, CheckpointDamagedError, CheckpointManager, check_model, describe_model
from plinth_testing import raises


def model(width: int = 3, **options: Any) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, width, **options), torch.nn.Linear(width, 1))


def test_names_and_shapes_are_compared(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.prepare(1)
    checkpoint = manager.publish(1, state={}, models={"actor": describe_model(model())})
    assert describe_model(model())["0.weight"] == {"shape": [3, 2], "dtype": "float32"}
    for same in (model(), model().bfloat16(), model().named_parameters(), describe_model(model())):
        assert check_model(checkpoint, "actor", same)
    assert not check_model(checkpoint, "critic", model())
    with raises(ArchitectureMismatchError, field="actor", reshaped=("0.weight", "0.bias", "1.weight")):
        check_model(checkpoint, "actor", torch.nn.Sequential(*model(4), torch.nn.Linear(1, 1)))
    with raises(ArchitectureMismatchError, only_in_checkpoint=("0.bias",), only_here=(), reshaped=()):
        check_model(checkpoint, "actor", model(bias=False))
    with raises(ArchitectureMismatchError, only_here=("2.weight", "2.bias")):
        check_model(checkpoint, "actor", torch.nn.Sequential(*model(), torch.nn.Linear(1, 1)))
    for text in ("{}", "[" * 100_000):
        (checkpoint.path / "models.json").write_text(text)
        with raises(CheckpointDamagedError, files=("models.json",)):
            check_model(checkpoint, "actor", model())
    manager.prepare(2)
    assert not check_model(manager.publish(2, state={}), "actor", model())


def test_partitioned_and_tied_parameters() -> None:
    partitioned = model()
    partitioned[0].weight.data = torch.empty(0)  # type: ignore[index, union-attr]
    partitioned[0].weight.ds_shape = torch.Size([3, 2])  # type: ignore[index, union-attr]
    assert describe_model(partitioned) == describe_model(model())
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    assert "1.weight" not in describe_model(tied)
