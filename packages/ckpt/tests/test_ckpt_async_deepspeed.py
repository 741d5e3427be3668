"""DeepSpeed's checkpoint, written in the background by two gloo ranks: equal files and a bit-exact resume."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_ranks import run_script

import plinth_testing
from ckpt import ArchitectureMismatchError, CheckpointDamagedError, CheckpointManager, ZeroCheckpoint, check_model
from ckpt.tools.deepspeed_export import iterate_deepspeed_weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`zero<stage>/`, checkpoint folders of the three stages; each rank has already compared and resumed."""
    root = tmp_path_factory.mktemp("async")
    run_script("ckpt_async_saver.py", root, 1, 2, 3)
    return root


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_background_checkpoints_are_deepspeeds_own(saved: Path, stage: int) -> None:
    for rank in range(2):
        assert json.loads((saved / f"rank{rank}.json").read_text())[str(stage)]["stall_s"] > 0
    manager = CheckpointManager(saved / f"zero{stage}")
    assert manager.steps() == [1, 2]
    checkpoint = manager.load(2)
    assert [path.name for path in manager.root.iterdir() if path.name.startswith(".")] == [".lock"]
    ours, plain = (
        dict(iterate_deepspeed_weights(ZeroCheckpoint(folder)))
        for folder in (checkpoint.path / "actor" / "actor", saved / f"plain{stage}" / "actor")
    )
    assert ours.keys() == plain.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(torch.equal(ours[name], plain[name]) for name in ours)
    # Recorded from the live engine, whose parameters stage 3 partitions.
    there = [torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 7)]
    assert check_model(checkpoint, "actor", torch.nn.Sequential(*there))
    with pytest.raises(ArchitectureMismatchError, match="another shape"):
        check_model(checkpoint, "actor", torch.nn.Sequential(*there[:2], torch.nn.Linear(65, 8)))


def test_zero_to_fp32_reads_them(saved: Path, tmp_path: Path) -> None:
    """Stage 2 runs the script in the checkpoint folder, as users do; the other stages call its function."""
    for stage in (1, 2, 3):
        folder = CheckpointManager(saved / f"zero{stage}").load(2).path / "actor"
        if stage == 2:
            plinth_testing.run_script(folder / "zero_to_fp32.py", folder, tmp_path / "out")
            found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
        else:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            found = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        expected = dict(iterate_deepspeed_weights(ZeroCheckpoint(folder)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found), stage


def test_a_missing_rank_file_is_named(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "zero2", tmp_path / "zero2")
    manager = CheckpointManager(tmp_path / "zero2")
    victims = [
        "rng.rank00001.safetensors",
        "actor/actor/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "actor/actor/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ]
    found = [name for name in victims if (manager.root / "step_00000002" / name).exists()]
    assert len(found) == 2
    for victim in found:
        path = manager.root / "step_00000002" / victim
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointDamagedError, match=r"missing.*newest good checkpoint is step 1 ") as caught:
            manager.load(2)
        assert caught.value.files == (victim,)
        path.write_bytes(content)
    assert manager.load(2).step == 2


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self._marker, "w"))


class FakeEngine:
    """The part of a DeepSpeed engine that loading_without_pickle uses."""

    def __init__(self) -> None:
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

        self.checkpoint_engine = TorchCheckpointEngine()
        self.has_moe_layers = False

    def load_universal_checkpoint(self) -> bool:
        return False


def test_loading_without_pickle_executes_nothing(saved: Path, tmp_path: Path) -> None:
    from ckpt import CheckpointUsageError, UntrustedFileError, loading_without_pickle

    engine = FakeEngine()
    original = engine.checkpoint_engine
    torch.save({"module": {}, "extra": Payload(tmp_path / "marker")}, tmp_path / "mp_rank_00_model_states.pt")
    with (
        pytest.raises(UntrustedFileError, match=r"mp_rank_00_model_states\.pt: cannot be read safely"),
        loading_without_pickle(engine),
    ):
        engine.checkpoint_engine.load(str(tmp_path / "mp_rank_00_model_states.pt"), map_location="cpu")
    assert not (tmp_path / "marker").exists()
    assert engine.checkpoint_engine is original
    engine.has_moe_layers = True
    with pytest.raises(CheckpointUsageError, match="mixtures of experts"), loading_without_pickle(engine):
        pass
    original.load(str(tmp_path / "mp_rank_00_model_states.pt"))
    assert (tmp_path / "marker").exists(), "what DeepSpeed alone does"
