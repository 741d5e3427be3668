"""LoRA on real ranks against one process of PEFT, and its files read by PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ds_engine_testkit
import peft
import pytest
import torch
import transformers
from ds_engine_testkit import (
    Reference,
    assert_equal,
    distance,
    make_samples,
    reference_training,
    used,
    write_adapters,
)

from ds_engine import (
    CheckpointError,
    EngineConfig,
    EngineConfigError,
    EngineError,
    LoraConfig,
    ModelError,
)
from ds_engine.model.loading import load_model
from ds_engine.model.lora import adapter_settings, adapter_tensors, add_adapters, whole_tensors
from plinth_testing import RankPool, raises

STEPS = [make_samples(n, seed=s) for n, s in ((7, 1), (5, 2), (6, 3))]
LORA = LoraConfig(rank=4, alpha=12)
CPU = torch.device("cpu")


def config(stage: int, *, optimizer: str = "none", param: str = "none", dtype: str = "float32", **lora: Any):
    return ds_engine_testkit.config(
        stage, optimizer=optimizer, param=param, dtype=dtype, lora=replace(LORA, **lora), seed=5
    )


def adapted(folder: Path, lora: LoraConfig = LORA, head: str = "lm") -> torch.nn.Module:
    model = load_model(str(folder), EngineConfig(dtype="float32"), device=CPU, ds_config={}, head=head)
    add_adapters(model, lora, head=head, seed=5)
    return model


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """PEFT's own training, from the adapters that the engine starts with."""
    model = adapted(tiny_model)
    tensors = {t.name: t.value() for t in adapter_tensors(model)}
    folder = write_adapters(tmp_path_factory.mktemp("lora") / "start", adapter_settings(model), tensors)
    return reference_training(tiny_model, STEPS, adapters=folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "optimizer", "param"),
    [(2, "cpu", "none"), (3, "none", "none"), (3, "cpu", "cpu")],
)
def test_three_steps_equal_one_process_of_peft(
    two_ranks: RankPool,
    tiny_model: Path,
    reference: Reference,
    tmp_path: Path,
    stage: int,
    optimizer: str,
    param: str,
) -> None:
    expected = reference[0]
    per_rank = [{"steps": [[samples[rank::4], samples[rank + 2 :: 4], []] for samples in STEPS]} for rank in range(2)]
    wanted = config(stage, optimizer=optimizer, param=param)
    with used(two_ranks, "adapters off"):
        results = two_ranks.run(
            "train_adapters", per_rank, model_path=str(tiny_model), config=wanted, samples=STEPS[0][:3]
        )
    first = results[0]
    assert_equal(results, reference, key="adapters")
    assert {**first["adapters"], **first["merged"]}.keys() == expected.keys()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert list(first["merged"]) == [name for name, _ in model.named_parameters()]
    # PEFT reads the adapters and merges them to the same weights.
    folder = write_adapters(tmp_path / "adapters", first["settings"], first["adapters"])
    merged = dict(peft.PeftModel.from_pretrained(model, folder).merge_and_unload().named_parameters())
    for name, tensor in first["merged"].items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-6)
        assert distance(tensor, expected[name]) < 1e-5, name
    assert results[1]["merged"] == results[1]["adapters"] == {}
    # Adapters are all that the optimizer knows, each element on one rank (shards are padded by a few).
    num_trained = sum(t.numel() for t in first["adapters"].values())
    if optimizer == "none":
        assert num_trained <= sum(r["num_states"] for r in results) < 1.1 * num_trained
    # The base model, asked between steps, never changes; with adapters it does.
    for result in results:
        assert all(torch.equal(base, result["base"][0]) for base in result["base"])
        assert distance(result["outputs"].log_probs_K, result["base"][0]) > 1e-3


@pytest.mark.slow
@pytest.mark.long
def test_stages_agree_in_bf16(two_ranks: RankPool, untied_model: Path) -> None:
    """Stage 1 uses a different DeepSpeed optimizer in bf16. The losses of the first step precede any update."""
    per_rank = [{"steps": [[samples[rank::2]] for samples in STEPS]} for rank in range(2)]
    runs = [
        two_ranks.run(
            "train_adapters",
            per_rank,
            model_path=str(untied_model),
            config=config(stage, dtype="bfloat16", rslora=True, target_modules=("q_proj", "mlp.up_proj")),
            samples=STEPS[0],
        )[0]
        for stage in (1, 3)
    ]
    for run in runs:
        assert run["adapters"].keys() == {
            f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight"
            for layer in range(2)
            for name in ("self_attn.q_proj", "mlp.up_proj")
            for side in "AB"
        }
        assert run["stats"][0].loss == pytest.approx(runs[0]["stats"][0].loss, rel=1e-6)
        assert [s.grad_norm for s in run["stats"]] == pytest.approx([s.grad_norm for s in runs[0]["stats"]], rel=2e-2)
        for name, tensor in run["merged"].items():
            assert tensor.dtype == torch.bfloat16
            assert distance(tensor.float(), runs[0]["merged"][name].float()) < 2e-2, name


@pytest.mark.slow
@pytest.mark.parametrize("base", ["plain", "nf4"])
def test_a_checkpoint_holds_adapters_only_and_continues_exactly(
    two_ranks: RankPool, tiny_model: Path, tmp_path: Path, base: str
) -> None:
    """In four bits with recomputation in bf16: the base is quantized again."""
    steps = [[make_samples(2, seed=s)] for s in range(4)]
    common = {"model_path": str(tiny_model), "samples": STEPS[0]}
    wanted = config(3)
    if base == "nf4":
        wanted = replace(config(3, dtype="bfloat16", base_format="nf4"), gradient_checkpointing=True)
    whole = two_ranks.run("train_adapters", steps=steps, config=wanted, **common)[0]
    two_ranks.run("train_adapters", steps=steps[:2], save_to=str(tmp_path), config=wanted, **common)
    resumed = two_ranks.run("train_adapters", steps=steps[2:], load_from=str(tmp_path), config=wanted, **common)[0]
    assert resumed["stats"] == whole["stats"][2:]
    assert torch.equal(resumed["base"][0], whole["base"][0])
    assert all(torch.equal(resumed["merged"][name], tensor) for name, tensor in whole["merged"].items())
    (file, *_) = sorted((tmp_path / "tag").glob("*model_states.pt"))
    state = torch.load(file, weights_only=False)
    assert state["module"]
    assert all("lora_" in name for name in state["module"])
    assert not state["frozen_param_fragments"]
    other = replace(wanted, lora=replace(wanted.lora, rank=2))
    for error in two_ranks.run("train_adapters", steps=[], load_from=str(tmp_path), config=other, **common):
        assert isinstance(error, CheckpointError), error
        assert error.value == str(tmp_path / "tag")


@pytest.mark.slow
@pytest.mark.parametrize("base", ["plain", "nf4"])
def test_value_head_trains_together_with_adapters(two_ranks: RankPool, tiny_model: Path, base: str) -> None:
    per_rank = [{"steps": [[samples[rank::2]] for samples in STEPS], "value_samples": [STEPS[0]]} for rank in range(2)]
    configs = [config(stage, optimizer=optimizer, base_format=base) for stage, optimizer in ((2, "none"), (3, "cpu"))]
    runs = [two_ranks.run("train_values", per_rank, model_path=str(tiny_model), config=one)[0] for one in configs]
    model = load_model(str(tiny_model), configs[0], device=CPU, ds_config={}, head="value")
    start = {tensor.name: tensor.value() for tensor in whole_tensors(model)}
    assert list(runs[0]["weights"]) == list(start)
    for name, weight in runs[0]["weights"].items():
        assert distance(runs[1]["weights"][name], weight) < 1e-5, name
        is_trained = "_proj" in name or name == "score.weight"
        assert torch.equal(weight, start[name]) != is_trained, name


@pytest.mark.slow
def test_log_probs_without_adapters_are_the_base_models(two_ranks: RankPool, tiny_model: Path) -> None:
    for error in two_ranks.run(
        "train_adapters",
        model_path=str(tiny_model),
        config=replace(config(2), lora=None),
        steps=[],
        samples=STEPS[0],
    ):
        assert isinstance(error, EngineError)
        assert str(error) == "log_probs(adapters=False) needs an engine built with lora and trainable=True"


@pytest.mark.parametrize("head", ["lm", "value"])
def test_peft_reads_the_folder_and_merges_to_the_same_weights(tiny_model: Path, tmp_path: Path, head: str) -> None:
    """With random trained tensors, including the value head."""
    plain = load_model(str(tiny_model), EngineConfig(dtype="float32"), device=CPU, ds_config={}, head=head)
    model = adapted(tiny_model, replace(LORA, rslora=True), head)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in trained} - {""} == {
        f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert ("score.weight" in trained) == (head == "value")
    for name, tensor in plain.state_dict().items():
        if not name.startswith("score"):
            base = model.state_dict().get(name.replace("_proj.", "_proj.base_layer."))
            assert torch.equal(tensor, base), name
    with torch.no_grad():
        for name in trained:
            model.get_parameter(name).normal_(std=0.3)
    tensors = whole_tensors(model)
    assert [t.name for t in tensors] == [name for name, _ in plain.named_parameters()]
    folder = write_adapters(
        tmp_path / "adapters", adapter_settings(model), {t.name: t.value() for t in adapter_tensors(model)}
    )
    if head == "lm":
        base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    else:
        base = transformers.AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    merged = dict(peft.PeftModel.from_pretrained(base, folder).merge_and_unload().named_parameters())
    for tensor in tensors:
        torch.testing.assert_close(tensor.value(), merged[tensor.name], rtol=1e-6, atol=1e-6)
        assert tensor.value(torch.bfloat16).dtype == torch.bfloat16


def test_target_modules_without_a_layer_are_refused(tiny_model: Path) -> None:
    for names in (("lm_head",), ("q_proj", "query"), ("embed_tokens",)):
        with raises(ModelError, field="lora.target_modules"):
            adapted(tiny_model, replace(LORA, target_modules=names))


def test_adapters_start_the_same_on_every_rank(tiny_model: Path) -> None:
    first = adapted(tiny_model)
    torch.rand(7)
    second = adapted(tiny_model)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("field", "value"), [("rank", 0), ("alpha", 0), ("dropout", 1.0), ("target_modules", ()), ("target_modules", "q")]
)
def test_bad_settings(field: str, value: Any) -> None:
    with raises(EngineConfigError, field=field, value=value):
        LoraConfig(**{field: value})
