"""No file in a checkpoint folder is ever executed, whatever it holds."""

import ast
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_fakes import Call
from safetensors.torch import save_file

import ckpt
from ckpt import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManager,
    CheckpointStateError,
    check_model,
    export_deepspeed,
    load_state_dict,
    restore_rng,
    save_state_dict,
)
from ckpt.manifest import CheckpointManifest
from plinth_testing import raises


def plain_pickle(mark: Path, path: Path) -> None:
    path.write_bytes(pickle.dumps({"step": 1, "payload": Call(os.system, f"touch {mark}")}))


def torch_pickle(mark: Path, path: Path) -> None:
    torch.save({"module": {}, "w": torch.ones(1), "payload": Call(os.system, f"touch {mark}")}, path)


def old_torch_pickle(mark: Path, path: Path) -> None:
    torch.save({"module": {}, "payload": Call(os.system, f"touch {mark}")}, path, _use_new_zipfile_serialization=False)


def export(manager: CheckpointManager) -> None:
    folder = manager.read(1).path / "ds"
    (folder / "config.json").write_text("{}")
    export_deepspeed(folder, manager.root / "out", model_files_from=folder)


@pytest.mark.parametrize("kind", [plain_pickle, torch_pickle, old_torch_pickle])
@pytest.mark.parametrize(
    ("victim", "read", "error"),
    [
        ("manifest.json", lambda manager: manager.load(1), CheckpointDamagedError),
        ("state.json", lambda manager: manager.load(1), CheckpointDamagedError),
        (
            "models.json",
            lambda manager: check_model(manager.read(1), "m", {"w": {"shape": [1]}}),
            CheckpointDamagedError,
        ),
        (
            "m.safetensors",
            lambda manager: load_state_dict(manager.read(1).path / "m.safetensors"),
            CheckpointStateError,
        ),
        ("ds/mp_rank_00_model_states.pt", export, CheckpointError),
        ("ds/zero_pp_rank_0_mp_rank_00_optim_states.pt", export, CheckpointError),
    ],
)
def test_a_pickle_in_place_of_any_file_is_refused(
    tmp_path: Path,
    kind: Callable[[Path, Path], None],
    victim: str,
    read: Callable[[CheckpointManager], object],
    error: type[Exception],
) -> None:
    manager = CheckpointManager(tmp_path / "checkpoints")
    folder = manager.prepare(1)
    save_state_dict(folder / "m.safetensors", {"w": torch.ones(1)})
    (folder / "ds").mkdir()
    weights = {"zero_stage": 1, "partition_count": 1, "single_partition_of_fp32_groups": [torch.ones(1)]}
    torch.save({"optimizer_state_dict": weights}, folder / "ds" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    model = {"module": {"w": torch.ones(1)}, "param_shapes": [{"w": torch.Size([1])}]}
    torch.save(model, folder / "ds" / "mp_rank_00_model_states.pt")
    path = manager.publish(1, state={}, models={"m": {"w": {"shape": [1], "dtype": "float32"}}}).path
    kind(tmp_path / "mark", path / victim)
    if victim != "manifest.json":  # an attacker can write a matching manifest too
        (path / "manifest.json").unlink()
        described = CheckpointManifest.describe(path, step=1)
        (path / "manifest.json").write_text(described.to_json())
    # `read` also reads state.json.
    with pytest.raises(error):
        read(manager)
    assert not (tmp_path / "mark").exists(), "it was executed"


def test_the_payload_works_when_unpickled(tmp_path: Path) -> None:
    plain_pickle(tmp_path / "mark", tmp_path / "file")
    pickle.loads((tmp_path / "file").read_bytes())
    assert (tmp_path / "mark").exists()


def test_structures_and_generators_hold_plain_values_only(tmp_path: Path) -> None:
    structure = {"python/object/apply": ["os.system"]}
    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors", {"plinth_ckpt_structure": json.dumps(structure)})
    with raises(CheckpointStateError, field="path"):
        load_state_dict(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointStateError):
        restore_rng({"format_version": "os.system", "python": [3, ["x"], None]})


def test_the_package_has_no_other_way_to_read_a_pickle() -> None:
    """Every torch.load passes weights_only=True; no other function that unpickles is called."""
    calls = 0
    for path in Path(ckpt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called not in ("pickle.load", "pickle.loads", "pickle.Unpickler", "numpy.load", "np.load"), path.name
            if called in ("torch.load", "torch.jit.load", "torch.package.PackageImporter"):
                assert called == "torch.load", path.name
                assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords), path.name
                calls += 1
    assert calls >= 2
