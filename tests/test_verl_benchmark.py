"""The verl side of workload W without verl: what its processes load, and the keys of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.grpo_step import verl_plugin, verl_step
from benchmarks.grpo_step.workload import write_prompts
from benchmarks.random_model import model_config, write_random_model

LENGTHS = (5, 1, 7)
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def packed_row() -> dict[str, Tensor]:
    """Three sequences in one row, as verl packs them."""
    torch.manual_seed(0)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return {"input_ids": torch.randint(200, (1, sum(LENGTHS))), "position_ids": positions[None]}


def sdpa_per_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    _: Tensor,
    longest: int,
    __: int,
    *,
    scale: float,
    window_size: object,
) -> Tensor:
    """What torch's kernel, which needs a GPU, computes."""
    assert (ends.dtype, longest, window_size) == (torch.int32, max(LENGTHS), (-1, 0))
    rows = zip(*(states.transpose(0, 1).split(ends.diff().tolist(), 1) for states in (q, k, v)), strict=True)
    outs = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True) for q, k, v in rows]
    return torch.cat(outs, 1).transpose(0, 1)


def attend(attention: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Logits and a gradient of a tiny model with this attention."""
    torch.manual_seed(1)
    config = model_config("qwen3-tiny", attn_implementation=attention)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    row = {name: each.to(device) for name, each in packed_row().items()}
    logits = model(**row, attention_mask=None, use_cache=False).logits
    logits.float().square().mean().backward()
    return [logits.detach().float(), model.model.layers[0].self_attn.q_proj.weight.grad.float()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_verl_attends_within_each_packed_sequence(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", sys.modules.get("trl"))  # is hidden below
    verl_plugin.install()
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 2e-2)
    if device == "cpu":
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", sdpa_per_sequence)
    expected = attend("sdpa", device, dtype)
    for ours, theirs in zip(attend(verl_plugin.ATTENTION, device, dtype), expected, strict=True):
        assert (ours - theirs).norm() < tolerance * theirs.norm()


def test_padded_rows_are_refused() -> None:
    states = torch.zeros(2, 1, 4, 8)
    with pytest.raises(ValueError, match="use_remove_padding=true"):
        verl_plugin.packed_attention(torch.nn.Module(), states, states, states, None, position_ids=torch.zeros(2, 4))


def test_processes_of_verl_load_the_plugin_from_any_folder_and_see_no_trl(tmp_path: Path) -> None:
    verl = tmp_path / "verl.py"  # loads what the variable names, as verl's __init__ does
    verl.write_text("import importlib, os\nimportlib.import_module(os.environ['VERL_USE_EXTERNAL_MODULES'])\n")
    (tmp_path / "trl.py").touch()  # is there, also where TRL is not installed
    code = "import verl, importlib.util, transformers\n"
    code += "print(importlib.util.find_spec('trl'), *transformers.AttentionInterface().valid_keys())"
    env = verl_step.environment(tmp_path)
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    trl, *attentions = said.stdout.split()
    assert trl == "None"
    assert verl_plugin.ATTENTION in attentions


def test_a_run_has_the_prompts_and_a_tokenizer_as_verl_needs_them(tmp_path: Path) -> None:
    write_random_model("qwen3-tiny", tmp_path / "model")
    write_prompts(tmp_path, 4)
    files = verl_step.write_prompts(tmp_path), verl_step.write_tokenizer(tmp_path)
    # verl's agent loop of Qwen models asks for this token.
    assert "<|im_end|>" not in AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab()
    assert "<|im_end|>" in AutoTokenizer.from_pretrained(files[1]).get_vocab()
    keys = verl_step.overrides(tmp_path, *files, steps=2, gpus=1, attention="varlen")
    assert f"actor_rollout_ref.model.tokenizer_path={files[1]}" in keys
    assert f"+actor_rollout_ref.model.override_config.attn_implementation={verl_plugin.ATTENTION}" in keys


def test_a_run_without_a_step_is_tried_with_the_next_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_model("qwen3-tiny", tmp_path / "model")
    write_prompts(tmp_path, 4)
    tried: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        tried.extend(key.rpartition("=")[2] for key in command if "attn_implementation" in key)
        if len(tried) == 2:
            step = json.dumps({"step": 1, "data": {"timing_s/step": 2.0}})
            (tmp_path / verl_step.LOG).write_text(f"{step}\n{step[:-9]}")  # it ended as it wrote the second one
        return subprocess.CompletedProcess(command, returncode=2 - len(tried))

    monkeypatch.setattr("benchmarks.grpo_step.verl_step.subprocess.run", run)
    monkeypatch.setattr(sys, "argv", ["verl_step", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        verl_step.main()
    assert left.value.code == 0
    assert tried == [verl_plugin.ATTENTION, "sdpa"]
    assert "verl step 1: 2.00 s" in capsys.readouterr().out
