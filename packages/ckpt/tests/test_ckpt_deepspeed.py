"""DeepSpeed checkpoints of two gloo ranks, exported offline and loaded by transformers."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from ckpt_ranks import run_script
from safetensors.torch import load_file

from ckpt import ShardError, ZeroCheckpoint, export_deepspeed
from ckpt.tools.command_line import main
from plinth_testing import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model/` and `zero<stage>/actor/` for the three stages, from one pair of processes."""
    root = tmp_path_factory.mktemp("deepspeed")
    # 67 tokens: with two ranks, sizes that do not divide
    write_tiny_model(
        root / "model",
        vocab_size=67,
        hidden_size=24,
        intermediate_size=40,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    run_script("ckpt_deepspeed_saver.py", root / "model", root, 1, 2, 3)
    return root


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_export_equals_what_deepspeed_consolidates(saved: Path, tmp_path: Path, stage: int) -> None:
    from transformers import AutoModelForCausalLM

    expected = torch.load(saved / f"zero{stage}.expected.pt")
    report = export_deepspeed(saved / f"zero{stage}", tmp_path / "fp32", model_files_from=saved / "model")
    found = load_file(tmp_path / "fp32" / "model.safetensors")
    original = load_file(saved / "model" / "model.safetensors")
    assert found.keys() == original.keys(), "tied weights once, frozen ones too"
    for name, tensor in found.items():
        if name in expected:
            assert torch.equal(tensor.float(), expected[name].float()), name
        assert tensor.shape == original[name].shape
        moved = not torch.equal(tensor.float(), original[name].to(torch.bfloat16).float())
        assert moved == (name != "model.norm.weight"), name
    num_elements = sum(tensor.numel() for tensor in original.values())
    report = export_deepspeed(
        saved / f"zero{stage}" / "actor", tmp_path / "bf16", model_files_from=saved / "model", dtype=torch.bfloat16
    )
    assert report.num_bytes == 2 * num_elements
    size = (tmp_path / "bf16" / "model.safetensors").stat().st_size
    assert size <= 2 * num_elements + 65536
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    for name, tensor in loaded.state_dict().items():
        source = found["model.embed_tokens.weight" if name == "lm_head.weight" else name]
        assert torch.equal(tensor, source.to(torch.bfloat16)), name


def test_command_line(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["export", str(saved / "zero2"), str(tmp_path / "out"), "--model-files-from", str(saved / "model")]
    assert main([*base, "--dtype", "bfloat16"]) == 0
    assert "24 tensors" in capsys.readouterr().out
    assert main(base) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*base, "--tag", "critic", "--overwrite"]) == 2
    assert "critic: holds no DeepSpeed checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_universal_checkpoint(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int) -> None:
    expected = torch.load(saved / f"zero{stage}.expected.pt")
    out = tmp_path / "universal"
    assert main(["reshape", str(saved / f"zero{stage}"), str(out)]) == 0
    assert "'actor' of 23 parameters after 2 steps" in capsys.readouterr().out
    assert (out / "latest_universal").read_text() == "actor"
    folders = [path for path in (out / "actor" / "zero").iterdir() if path.is_dir()]
    assert len(folders) == 23
    source = ZeroCheckpoint(saved / f"zero{stage}")
    assert source.client_state == {"num_steps": 2}
    for folder in folders:
        state = {path.stem: torch.load(path, weights_only=True) for path in folder.iterdir()}
        assert state.pop("step") == 2
        assert torch.equal(state["fp32"]["param"], expected[folder.name])
        assert state["exp_avg_sq"]["param"].min() >= 0
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[kind]["param"], source.whole(folder.name, kind))
            assert state[kind]["param"].count_nonzero() > 0
        assert (folder / "fp32.pt").stat().st_size < 4 * expected[folder.name].numel() + 4096, "a tensor, not a file"
    assert main(["reshape", str(saved / f"zero{stage}"), str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["reshape", str(saved / f"zero{stage}"), str(out), "--overwrite"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["universal"]


def test_missing_and_torn_and_foreign_files(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    shutil.copytree(saved / "zero3" / "actor", folder)
    victim = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    victim.unlink()
    with pytest.raises(ShardError, match=r"saved by 2 ranks.*found \*_model_states\.pt of ranks \[0\]"):
        ZeroCheckpoint(folder).check()
    victim.write_bytes((saved / "zero3" / "actor" / victim.name).read_bytes()[:2000])
    with pytest.raises(ShardError, match=r"rank_1_mp_rank_00_model_states\.pt: cannot be read safely"):
        ZeroCheckpoint(folder).check()
    torch.save({"code": os.system}, victim)
    with pytest.raises(ShardError, match="cannot be read safely"):
        ZeroCheckpoint(folder).check()
    with pytest.raises(ShardError, match="holds no DeepSpeed checkpoint"):
        export_deepspeed(tmp_path / "none", tmp_path / "out", model_files_from=saved / "model")
    shutil.copytree(saved / "zero2" / "actor", tmp_path / "critic")
    with pytest.raises(ShardError, match="several DeepSpeed checkpoints: actor, critic"):
        export_deepspeed(tmp_path, tmp_path / "out", model_files_from=saved / "model")
    assert not (tmp_path / "out").exists()
