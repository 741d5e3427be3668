"""Architectures of transformers: the engine computes what transformers computes, or refuses the model by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ds_engine_architectures import (
    HYBRIDS,
    MORE_HYBRIDS,
    PACKED,
    REFUSED,
    ROWS,
    all_architectures,
    padded_loss,
    tiny_architecture,
    write_architecture,
)
from ds_engine_testkit import Sample, make_batch, make_samples, token_loss

import ds_engine.model.recurrence as recurrence
from ds_engine import EngineConfig, EngineConfigError, ModelError, OptimConfig, ZeroConfig, check_model, dense_log_prob
from ds_engine.errors import BatchError
from ds_engine.model.attention import ATTENTION_NAME, register_packed_attention
from ds_engine.model.loading import load_model
from ds_engine.model.packed_model import install_packed_forward, packed_inputs, row_kernel
from ds_engine.model.trial import try_model
from plinth_testing import RankPool, raises

CPU = torch.device("cpu")
FP32 = EngineConfig(dtype="float32")
TABLE = {
    **{name: ("packed", changes) for name, changes in (PACKED | HYBRIDS).items()},
    **{name: ("rows", changes) for name, changes in ROWS.items()},
}
SAMPLES = make_samples(5, seed=11, longest=32)
PER_SEQUENCE = ("phi3",)
"""Transformers' own padded rows depend on the longest one: their reference is one sequence at a time."""


def load(folder: Path, config: EngineConfig = FP32) -> Any:
    model = load_model(str(folder), config, device=CPU, ds_config={}).train()
    install_packed_forward(model, dense_log_prob)
    return model


def outputs(model: Any, samples: list[Sample]) -> torch.Tensor:
    inputs, _ = packed_inputs(make_batch(samples), device=CPU, kernel=row_kernel(model) or "sdpa")
    return model(packed=inputs)


def reference(folder: Path, samples: list[Sample], *, alone: bool = False) -> tuple[Any, torch.Tensor]:
    """Transformers' model with the gradients of the loss, and its log-probs; from each sequence `alone`, if true."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    log_probs = []
    for part in [[s] for s in samples] if alone else [samples]:
        loss, log_probs_K = padded_loss(model, part)
        loss.backward()
        log_probs.append(log_probs_K)
    return model, torch.cat(log_probs)


def assert_equal_gradients(model: Any, expected: Any, *, tolerance: float) -> None:
    gradients = {name: p.grad for name, p in expected.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        if name not in gradients:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        scale = max(float(gradients[name].abs().max()), 0.01 * largest)
        assert float((parameter.grad - gradients[name]).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("name", [*TABLE, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE_HYBRIDS)])
def test_log_probs_and_gradients_equal_transformers_padded_ones(tmp_path: Path, name: str) -> None:
    """In training mode, where ours has no dropout and no jitter."""
    way, changes = TABLE.get(name, ("packed", {}))
    folder = write_architecture(tmp_path, name, changes)
    assert check_model(str(folder), FP32).way == way
    is_hybrid = name in HYBRIDS
    expected, log_probs_K = reference(folder, SAMPLES, alone=is_hybrid or name in PER_SEQUENCE)
    model = load(folder)
    rows_RK = outputs(model, SAMPLES)
    token_loss(*rows_RK, make_batch(SAMPLES).columns["weights"]).backward()
    tolerance = 1e-5 if is_hybrid else 1e-4
    torch.testing.assert_close(rows_RK[0], log_probs_K, rtol=tolerance, atol=tolerance)
    assert_equal_gradients(model, expected, tolerance=tolerance)


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_are_not_exact_are_refused_by_name(name: str) -> None:
    with raises(ModelError, field="input_jitter_noise" if name == "phimoe" else None) as caught:
        try_model(tiny_architecture(name, REFUSED[name]))
    assert caught.type is ModelError, "it was tried"


@pytest.mark.parametrize(("name", "layer"), [("mamba2", "Mamba2Block"), ("bloom", "BloomBlock")])
def test_first_forward_refuses_a_layer_without_packed_attention(
    monkeypatch: pytest.MonkeyPatch, name: str, layer: str
) -> None:
    """A model that was loaded past the trial: a mixer without borders, and an attention that is never called."""
    monkeypatch.setattr(recurrence, "_LAYERS", {})
    register_packed_attention()
    config = tiny_architecture(name, TABLE[name][1])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    install_packed_forward(model, dense_log_prob)
    with raises(ModelError, field=layer):
        outputs(model, SAMPLES)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_do_not_depend_on_neighbors(tmp_path: Path, kind: str) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    name, rope = {"dynamic": ("llama", dynamic), "longrope": ("phi3", PACKED["phi3"]["rope_parameters"])}[kind]
    lengths = {"max_position_embeddings": 12} if kind == "dynamic" else {"original_max_position_embeddings": 12}
    folder = write_architecture(tmp_path, name, {"rope_parameters": rope, **lengths})
    samples = sorted(SAMPLES, key=lambda s: -len(s.ids))
    assert len(samples[1].ids) > 12 > len(samples[-1].ids)
    with torch.no_grad():
        together = outputs(load(folder), samples)[0]
    alone = torch.cat([reference(folder, [sample], alone=True)[1] for sample in samples])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_padded_rows_refuse_what_needs_packed_sequences(tmp_path: Path) -> None:
    folder = write_architecture(tmp_path, "bloom", ROWS["bloom"])
    settings = {"sequence_parallel": 2, "compile": True, "attention": "sdpa"}
    for name, value in settings.items():
        with raises(EngineConfigError, field=name, value=value):
            check_model(str(folder), replace(FP32, **{name: value}))
    batch = make_batch(SAMPLES)
    shifted = type(batch)(**{**vars(batch), "position_ids_T": batch.position_ids_T + 1})
    with raises(BatchError, field="position_ids_T"):
        packed_inputs(shifted, device=CPU, kernel="rows")


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_dropout_is_off_unless_it_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    folder = write_architecture(tmp_path, name, PACKED[name])
    for dropout in (False, True):
        caplog.clear()
        model = load(folder, replace(FP32, dropout=dropout))
        with torch.no_grad():
            first, second = outputs(model, SAMPLES), outputs(model, SAMPLES)
        assert torch.equal(first, second) is not dropout
        assert ("trained without its" in caplog.text) is not dropout


def test_value_heads_are_tried_too(tmp_path: Path) -> None:
    """BLOOM's packed attention is never called in the model with a value head either."""
    packed = check_model(str(write_architecture(tmp_path / "llama", "llama", {})), FP32, head="value")
    rows = check_model(str(write_architecture(tmp_path / "bloom", "bloom", {})), FP32, head="value")
    assert (packed.architecture, packed.way) == ("LlamaForSequenceClassification", "packed")
    assert (rows.architecture, rows.way) == ("BloomForSequenceClassification", "rows")
    assert "BloomBlock" in str(rows)
    assert f"{rows.seconds:.1f} s" in str(rows)


def test_a_trial_computes_in_one_thread_and_leaves_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def fails(*_: object) -> None:
        seen.append(torch.get_num_threads())
        raise ModelError("no such model")

    monkeypatch.setattr("ds_engine.model.trial._try", fails)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ModelError):
            try_model(tiny_architecture("llama", {"vocab_size": 66}))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_a_head_that_is_not_upstreams_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial compares with upstream's own logits: scale, cap and bias of the head must reach the log-probs."""
    import ds_engine.model.packed_model as packed_model

    monkeypatch.setattr(packed_model, "_hidden_scale", lambda model: 1.0)
    with pytest.raises(ModelError):
        try_model(tiny_architecture("cohere", {"logit_scale": 0.41}))
    monkeypatch.setattr(packed_model, "_head_options", lambda model, head: {})
    with pytest.raises(ModelError):
        try_model(tiny_architecture("gemma3_text", {**PACKED["gemma3_text"], "final_logit_softcapping": 3.1}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["gpt2", "deepseek_v3"],
        pytest.param([name for name in TABLE if name not in PER_SEQUENCE], marks=pytest.mark.thorough),
    ],
    ids=["some", "all"],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_on_two_ranks_equals_transformers(
    two_ranks: RankPool, tmp_path: Path, stage: int, names: list[str]
) -> None:
    """Log-probs before and after a step of AdamW, and the gradient norm; the ranks have different numbers of rows."""
    folders = {name: write_architecture(tmp_path / name, name, TABLE[name][1]) for name in names}
    assert_step_equals_transformers(two_ranks, folders, zero=ZeroConfig(stage=stage, param_persistence_elements=0))


@pytest.mark.slow
def test_latent_attention_works_with_sequence_parallelism(two_ranks: RankPool, tmp_path: Path) -> None:
    """DeepSeek's values have fewer features than its queries; the all-to-all sends both in one tensor."""
    folder = write_architecture(tmp_path / "model", "deepseek_v3", PACKED["deepseek_v3"])
    assert_step_equals_transformers(two_ranks, {"deepseek_v3": folder}, sequence_parallel=2)


def assert_step_equals_transformers(two_ranks: RankPool, folders: dict[str, Path], **settings: Any) -> None:
    config = replace(FP32, optim=OptimConfig(lr=3e-3, eps=1e-4, grad_clip=None), **settings)
    shares = [SAMPLES[:2], SAMPLES[2:]] if config.sequence_parallel == 1 else [SAMPLES, SAMPLES]
    results = two_ranks.run(
        "train_architectures",
        [{"mine": share} for share in shares],
        folders={name: str(folder) for name, folder in folders.items()},
        config=config,
        samples=SAMPLES,
    )
    for name, folder in folders.items():
        model, expected_K = reference(folder, SAMPLES)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.0).step()
        with torch.no_grad():
            after_K = padded_loss(model, SAMPLES)[1]
        for before, grad_norm, after in (rank[name] for rank in results):
            torch.testing.assert_close(before, expected_K, rtol=1e-4, atol=1e-4, msg=name)
            assert grad_norm == pytest.approx(float(norm), rel=1e-4), name
            torch.testing.assert_close(after, after_K, rtol=1e-4, atol=1e-4, msg=name)


DOCS = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_documented_table_is_that_of_the_tests() -> None:
    """`model_type` and way of every row, and of the names below them; the other tests show that the ways are right."""
    text = DOCS.read_text()
    documented = re.findall(r"^\| `([\w-]+)` \|.*?\| (packed|rows|refused) \|", text, re.M)
    names = text[text.index("small copies of these") : text.index("log-probs and gradients equal")]
    for listed, way in re.findall(r"((?:`[\w-]+`,?\s+)+)\((packed|rows|refused)\)", names):
        documented += [(name, way) for name in re.findall(r"`([\w-]+)`", listed)]
    assert sorted(documented) == sorted(
        [
            *((name, way) for name, (way, _) in TABLE.items()),
            *((name, "packed") for name in MORE_HYBRIDS),
            *((name, "refused") for name in REFUSED if name not in TABLE),
        ]
    )


@pytest.mark.thorough
def test_the_documented_lists_are_those_of_all_trials() -> None:
    """Every causal language model of the documented version of transformers."""
    text = DOCS.read_text()
    if f"transformers {transformers.__version__}" not in text:
        pytest.skip("docs/models.md describes another version of transformers")
    ways = all_architectures()
    assert f"{len(ways.pop('not tried'))} others give no small copy" in text
    for way, names in ways.items():
        documented = re.search(rf"^{way} \(\d+\): (.*?)\n(?:\n|\Z)", text, re.M | re.S)
        assert documented is not None, way
        assert re.findall(r"`([\w-]+)`", documented[1]) == names, way


def test_an_unknown_mixer_beside_packed_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer calls packed attention, on tokens into which the token before was mixed across borders."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    attend = LlamaAttention.forward

    def mix_and_attend(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        before = torch.nn.functional.pad(hidden_states, (0, 0, 1, -1))
        return attend(self, hidden_states + before, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", mix_and_attend)
    trial = try_model(tiny_architecture("llama", {"vocab_size": 65}))
    assert trial.way == "rows"
    assert "its log-probs differ by" in str(trial)
