"""The SFT app on real DeepSpeed ranks."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def test_the_loss_falls_and_the_model_loads(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    app = start_app(
        tmp_path,
        "engine.dtype=float32",
        "supervised.steps=40",
        "supervised.batch_size=32",
        "engine.zero.stage=1",
        app="sft",
    )
    assert app.finish() == 0, app.output
    assert not app.survivors()
    (run,) = tmp_path.iterdir()
    with (run / "metrics.tsv").open() as file:
        losses = [float(row["sft/loss"]) for row in csv.DictReader(file, delimiter="\t")]
    assert len(losses) == 40
    # 64 words: a model that knows nothing starts near ln 64 = 4.2.
    assert losses[0] > 3
    assert losses[-1] < 2

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "model"), AutoTokenizer.from_pretrained(run / "model")
    assert model.num_parameters() > 0.3e6
    assert tokenizer.decode(tokenizer("3 + 1 = 4")["input_ids"]) == "3 + 1 = 4"
