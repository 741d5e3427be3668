"""DeepSpeed checkpoints of two gloo ranks: saved in the background, resumed, exported offline, reshaped."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from ckpt_fakes import Call, Engine
from ckpt_ranks import run_script
from safetensors.torch import load_file

from ckpt import (
    ArchitectureMismatchError,
    CheckpointDamagedError,
    CheckpointManager,
    CheckpointUsageError,
    ShardError,
    UntrustedFileError,
    ZeroCheckpoint,
    check_model,
    export_deepspeed,
    loading_without_pickle,
)
from ckpt.tools.command_line import main
from ckpt.tools.deepspeed_export import iterate_deepspeed_weights
from plinth_testing import raises, write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model/` and, by stage, `zero<stage>/` and `plain<stage>/`; the ranks have compared both and resumed."""
    root = tmp_path_factory.mktemp("deepspeed")
    # 67 tokens: with two ranks, sizes that do not divide
    sizes = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 40}
    write_tiny_model(root / "model", num_attention_heads=2, num_key_value_heads=1, **sizes)
    run_script("ckpt_deepspeed_saver.py", root / "model", root, 1, 2, 3)
    return root


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_background_checkpoints_are_deepspeeds_own(saved: Path, stage: int) -> None:
    manager = CheckpointManager(saved / f"zero{stage}")
    assert manager.steps() == [1, 2]
    assert [path.name for path in manager.root.iterdir() if path.name.startswith(".")] == [".lock"]
    checkpoint = manager.load(2)
    expected = torch.load(saved / f"plain{stage}.expected.pt")
    ours = dict(iterate_deepspeed_weights(ZeroCheckpoint(checkpoint.path / "actor" / "actor")))
    assert ours.keys() - expected.keys() <= {"model.norm.weight"}, "DeepSpeed leaves out the frozen weight at stage 1"
    assert all(torch.equal(ours[name].float(), expected[name].float()) for name in ours if name in expected)
    # Recorded from the live engine, whose parameters stage 3 partitions.
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved / "model")
    assert check_model(checkpoint, "actor", model)
    model.resize_token_embeddings(68)
    with raises(ArchitectureMismatchError, field="actor", reshaped=("model.embed_tokens.weight",)):
        check_model(checkpoint, "actor", model)


def test_a_missing_rank_file_is_named(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "zero2", tmp_path / "zero2")
    manager = CheckpointManager(tmp_path / "zero2")
    (shard,) = (tmp_path / "zero2" / "step_00000002").glob("actor/actor/*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    for victim in ("rng.rank00001.safetensors", f"actor/actor/{shard.name}"):
        path = manager.root / "step_00000002" / victim
        content = path.read_bytes()
        path.unlink()
        with raises(CheckpointDamagedError, step=2, files=(victim,), newest_good=1):
            manager.load(2)
        path.write_bytes(content)
    assert manager.load(2).step == 2


def test_loading_without_pickle_executes_nothing(tmp_path: Path) -> None:
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    engine, file = Engine(), tmp_path / "mp_rank_00_model_states.pt"
    engine.checkpoint_engine = original = TorchCheckpointEngine()
    torch.save({"module": {}, "extra": Call(open, str(tmp_path / "marker"), "w")}, file)
    with raises(UntrustedFileError, value=str(file)), loading_without_pickle(engine):
        engine.checkpoint_engine.load(str(file), map_location="cpu")
    assert not (tmp_path / "marker").exists()
    assert engine.checkpoint_engine is original
    engine.has_moe_layers = True
    with pytest.raises(CheckpointUsageError), loading_without_pickle(engine):
        pass
    original.load(str(file))
    assert (tmp_path / "marker").exists(), "what DeepSpeed alone does"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_export_equals_what_deepspeed_consolidates(saved: Path, tmp_path: Path, stage: int) -> None:
    from transformers import AutoModelForCausalLM

    expected = torch.load(saved / f"plain{stage}.expected.pt")
    report = export_deepspeed(saved / f"plain{stage}", tmp_path / "fp32", model_files_from=saved / "model")
    exported = load_file(tmp_path / "fp32" / "model.safetensors")
    original = load_file(saved / "model" / "model.safetensors")
    assert exported.keys() == original.keys(), "tied weights once, frozen ones too"
    for name, tensor in exported.items():
        if name in expected:
            assert torch.equal(tensor.float(), expected[name].float()), name
        assert tensor.shape == original[name].shape
        has_changed = not torch.equal(tensor.float(), original[name].to(torch.bfloat16).float())
        assert has_changed == (name != "model.norm.weight"), name
    num_elements = sum(tensor.numel() for tensor in original.values())
    report = export_deepspeed(
        saved / f"plain{stage}" / "actor", tmp_path / "bf16", model_files_from=saved / "model", dtype=torch.bfloat16
    )
    assert report.num_bytes == 2 * num_elements
    assert (tmp_path / "bf16" / "model.safetensors").stat().st_size <= 2 * num_elements + 65536
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    for name, tensor in loaded.state_dict().items():
        source = exported["model.embed_tokens.weight" if name == "lm_head.weight" else name]
        assert torch.equal(tensor, source.to(torch.bfloat16)), name


def test_command_line(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["export", str(saved / "plain2"), str(tmp_path / "out"), "--model-files-from", str(saved / "model")]
    assert main([*base, "--dtype", "bfloat16"]) == 0
    assert "24 tensors" in capsys.readouterr().out
    assert main(base) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*base, "--tag", "critic", "--overwrite"]) == 2
    assert "critic" in capsys.readouterr().err


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_universal_checkpoint(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int) -> None:
    expected = torch.load(saved / f"plain{stage}.expected.pt")
    command = ["reshape", str(saved / f"plain{stage}"), str(tmp_path / "universal")]
    assert main(command) == 0
    assert "'actor' of 23 parameters after 2 steps" in capsys.readouterr().out
    assert (tmp_path / "universal" / "latest_universal").read_text() == "actor"
    folders = [path for path in (tmp_path / "universal" / "actor" / "zero").iterdir() if path.is_dir()]
    assert len(folders) == 23
    source = ZeroCheckpoint(saved / f"plain{stage}")
    assert source.client_state == {"num_steps": 2}
    for folder in folders:
        state = {path.stem: torch.load(path, weights_only=True) for path in folder.iterdir()}
        assert state.pop("step") == 2
        assert torch.equal(state["fp32"]["param"], expected[folder.name])
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[kind]["param"], source.whole(folder.name, kind))
            assert state[kind]["param"].count_nonzero() > 0
        assert (folder / "fp32.pt").stat().st_size < 4 * expected[folder.name].numel() + 4096, "a tensor, not a file"
    assert main(command) == 2
    assert main([*command, "--overwrite"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["universal"]


def test_missing_and_torn_and_foreign_files(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    shutil.copytree(saved / "plain3" / "actor", folder)
    victim = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    content = victim.read_bytes()
    victim.unlink()
    with pytest.raises(ShardError):
        ZeroCheckpoint(folder).check()
    victim.write_bytes(content[:2000])
    with raises(ShardError, value=str(victim)):
        ZeroCheckpoint(folder).check()
    torch.save({"code": os.system}, victim)
    with raises(ShardError, value=str(victim)):
        ZeroCheckpoint(folder).check()
    with raises(ShardError, field="path"):
        export_deepspeed(tmp_path / "none", tmp_path / "out", model_files_from=saved / "model")
    shutil.copytree(saved / "plain2" / "actor", tmp_path / "critic")
    with raises(ShardError, field="tag", allowed="actor, critic"):
        export_deepspeed(tmp_path, tmp_path / "out", model_files_from=saved / "model")
    assert not (tmp_path / "out").exists()
