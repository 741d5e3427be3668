"""A hybrid, with recurrent layers and attention, learns the built-in task: packed, pushed into vLLM, exported."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_data import write_task
from rl_data.tasks.tiny_model import VOCABULARY_SIZE, build_tiny_tokenizer
from tests.run_folders import column

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


def write_hybrid(folder: Path) -> Path:
    """Granite 4's layers, Mamba-2 and attention, with random weights and the tokenizer of the built-in model."""
    import torch
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    tokenizer = build_tiny_tokenizer()
    config = GraniteMoeHybridConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        shared_intermediate_size=384,
        num_local_experts=0,
        num_hidden_layers=2,
        layer_types=["mamba", "attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_chunk_size=16,
        max_position_embeddings=512,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    GraniteMoeHybridForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_hybrid_learns_the_built_in_task(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    model = write_hybrid(tmp_path / "model")
    task = write_task(tmp_path / "task", num_train=256, num_val=64, num_demonstrations=4096)
    app = start_app(
        tmp_path / "runs",
        "preset=demo",
        f"model.path={model}",
        f"data.train=[{task.train}]",
        f"data.val=[{task.val}]",
        f"warm_start.files=[{task.demonstrations}]",
        "warm_start.steps=120",
        "trainer.total_training_steps=3",
        "sync.verify=true",
    )
    run = app.succeeded()
    assert "GraniteMoeHybridForCausalLM: packed sequences equal each one alone" in app.output
    with (run / "supervised.tsv").open() as file:
        losses = [float(row["sft/loss"]) for row in csv.DictReader(file, delimiter="\t")]
    assert losses[0] > 3 > 1 > losses[-1]
    # Servers compute what the ranks compute, also after two pushes of weights that changed.
    gaps = column(run, "rollout/log_prob_mismatch_max")
    assert len(gaps) == 3
    assert max(gaps) < 1e-3

    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(run / "model")
    assert type(exported).__name__ == "GraniteMoeHybridForCausalLM"
