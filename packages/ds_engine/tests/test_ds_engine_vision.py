"""Vision-language models: packed sequences with images equal transformers' own forward of each, on any ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from ds_engine_testkit import (
    EPS,
    LR,
    Sample,
    make_batch,
    make_samples,
    reference_training,
    token_loss,
    upstream_inputs,
    write_adapters,
)
from PIL import Image
from safetensors.torch import load_file, save_file

from ds_engine import (
    EngineConfig,
    EngineConfigError,
    LoraConfig,
    OffloadConfig,
    OptimConfig,
    ZeroConfig,
    check_model,
    dense_log_prob,
    estimate_memory,
)
from ds_engine.errors import BatchError
from ds_engine.model.loading import load_model
from ds_engine.model.lora import adapter_settings, adapter_tensors, add_adapters, whole_tensors
from ds_engine.model.packed_model import install_packed_forward, packed_inputs, vision_of
from plinth_testing import RankPool, raises, tiny_vlm
from plinth_testing.vision import FAMILIES

CPU = torch.device("cpu")
FP32 = EngineConfig(dtype="float32", train_vision=True)


@pytest.fixture(scope="module", params=FAMILIES)
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), request.param)


def write(folder: Path, family: str) -> Path:
    return tiny_vlm(folder, family, num_hidden_layers=2, initializer_range=0.1)


@cache
def upstream(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def draw(folder: Path, *sizes: tuple[int, int], seed: int = 0) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Images of these heights and widths as the folder's own image processor returns them, and the features of each."""
    random = np.random.default_rng(seed)
    images = [Image.fromarray(random.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    inputs = dict(processor(images=[images], return_tensors="pt"))
    sample = Sample(ids=[0], num_prompt=1, weight=0.0, images=inputs)
    known = {name: value for name, value in upstream_inputs(upstream(folder), sample).items() if name in inputs}
    with torch.no_grad():
        features = upstream(folder).model.get_image_features(**known).pooler_output
    return inputs, [len(feature) for feature in features]


def with_images(folder: Path, sample: Sample, *sizes: tuple[int, int], seed: int = 0) -> Sample:
    """The sample with images in its prompt, each before one of its tokens."""
    images, counts = draw(folder, *sizes, seed=seed)
    placeholder = upstream(folder).config.image_token_id
    ids = [*sample.ids]
    for number, count in enumerate(counts):
        at = number + sum(counts[:number])
        ids[at:at] = [placeholder] * count
    return replace(sample, ids=ids, num_prompt=sample.num_prompt + sum(counts), images=images)


def samples_of(folder: Path, num: int, seed: int) -> list[Sample]:
    """Two sequences that share a prompt with two images, one with one image, and others of text."""
    first, second, *others = make_samples(num, seed=seed)
    pair = with_images(folder, first, (50, 70), (90, 40), seed=seed)
    other = replace(pair, ids=[*pair.ids[: pair.num_prompt], *second.ids])
    return [pair, others[0], other, with_images(folder, second, (60, 100), seed=seed + 1), *others[1:]]


def load(folder: Path, config: EngineConfig = FP32) -> Any:
    model = load_model(str(folder), config, device=CPU, ds_config={}).train()
    install_packed_forward(model, dense_log_prob)
    return model


def test_log_probs_and_gradients_equal_transformers_forward_of_each_sequence(
    model_folder: Path, tmp_path: Path
) -> None:
    assert check_model(str(model_folder), FP32).sees
    samples = samples_of(model_folder, 5, 1)
    expected = upstream(model_folder)
    expected.zero_grad()
    log_probs = []
    for sample in samples:
        log_p = expected(**upstream_inputs(expected, sample)).logits[0, sample.num_prompt - 1 : -1].log_softmax(-1)
        chosen = log_p.gather(1, torch.tensor(sample.ids[sample.num_prompt :])[:, None])[:, 0]
        log_probs.append(chosen)
        token_loss(chosen, -(log_p.exp() * log_p).sum(-1), torch.full_like(chosen, sample.weight)).backward()
    model = load(model_folder)
    save_file({k: v for k, v in samples[3].images.items() if isinstance(v, torch.Tensor)}, tmp_path / "images")
    batch = make_batch([*samples[:3], replace(samples[3], images=str(tmp_path / "images")), *samples[4:]])
    inputs, _ = packed_inputs(batch, device=CPU, kernel="sdpa", vision=vision_of(model, always=False))
    rows_RK = model(packed=inputs)
    torch.testing.assert_close(rows_RK[0], torch.cat(log_probs), rtol=1e-5, atol=1e-5)
    token_loss(*rows_RK, batch.columns["weights"]).backward()
    gradients = {name: p.grad for name, p in expected.named_parameters() if p.grad is not None}
    assert any("vision" in name or "visual" in name for name in gradients)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        if name in gradients:
            scale = max(float(gradients[name].abs().max()), 0.01 * largest)
            assert float((parameter.grad - gradients[name]).abs().max()) <= 1e-4 * scale, name


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows in the tower, and positions with three axes."""
    return write(tmp_path_factory.mktemp("grids"), "qwen2_5_vl")


def test_a_sampled_placeholder_is_text(grids: Path) -> None:
    model = load(grids)
    vision = vision_of(model, always=False)
    sample = samples_of(grids, 3, 1)[0]
    images = {**sample.images, "num_placeholders": torch.tensor([sample.ids.count(vision.placeholder)])}
    longer = replace(sample, ids=[*sample.ids, vision.placeholder, 7], images=images)
    outputs = []
    for each in (sample, longer):
        inputs, _ = packed_inputs(make_batch([each]), device=CPU, kernel="sdpa", vision=vision)
        outputs.append(model(packed=inputs)[0])
    torch.testing.assert_close(outputs[1][:-2], outputs[0])
    expected = {**upstream_inputs(upstream(grids), longer), "input_ids": torch.tensor([[*longer.ids[:-2], 99, 7]])}
    expected["mm_token_type_ids"][0, -2:] = 0
    ordinary = upstream(grids)
    with torch.no_grad():  # the placeholder's embedding under another token's id
        table = ordinary.get_input_embeddings().weight
        kept, table[99] = table[99].clone(), table[vision.placeholder]
        hidden = ordinary.model(**expected)[0][0, -2]
        table[99] = kept
        log_p = ordinary.lm_head(hidden).log_softmax(-1)
    torch.testing.assert_close(outputs[1][-1], log_p[7], rtol=1e-4, atol=1e-4)


def test_a_placeholder_that_is_sampled_before_another_image_is_text(grids: Path) -> None:
    """As in an episode whose observations are images."""
    model = load(grids)
    vision = vision_of(model, always=False)
    images, (first, second) = draw(grids, (50, 70), (90, 40))
    images |= {"num_placeholders": torch.tensor([first + second])}
    ids = [*[vision.placeholder] * first, 7, vision.placeholder, 8, *[vision.placeholder] * second, 9]
    batch = make_batch([Sample(ids=ids, num_prompt=first, weight=1.0, images=images)])
    assert batch.target_ids_K.tolist() == ids[first:]
    is_sampled = batch.target_index_K < first + 2  # the other targets are context, which is none
    inputs, _ = packed_inputs(
        replace(batch, target_index_K=batch.target_index_K[is_sampled], target_ids_K=batch.target_ids_K[is_sampled]),
        device=CPU,
        kernel="sdpa",
        vision=vision,
    )
    assert inputs.seen.features_T.tolist() == [*range(first), -1, -1, -1, *range(first, first + second), -1]


def test_images_that_do_not_belong_to_the_tokens_are_refused(grids: Path) -> None:
    model = load(grids)
    vision = vision_of(model, always=False)
    sample = samples_of(grids, 3, 1)[0]
    few = replace(sample, images={**sample.images, "num_placeholders": torch.tensor([100])})
    with raises(BatchError, field="images", value=sample.ids.count(vision.placeholder)):
        packed_inputs(make_batch([few]), device=CPU, kernel="sdpa", vision=vision)
    with raises(BatchError, field="images", allowed="none"):
        packed_inputs(make_batch([sample]), device=CPU, kernel="sdpa")
    batch = make_batch([sample])
    with raises(BatchError, field="images", value=2):
        packed_inputs(replace(batch, images=batch.images * 2), device=CPU, kernel="sdpa", vision=vision)
    one_more = replace(sample, ids=[vision.placeholder, *sample.ids], num_prompt=sample.num_prompt + 1)
    with raises(BatchError, field="images", value=one_more.ids.count(vision.placeholder)):
        packed_inputs(make_batch([one_more]), device=CPU, kernel="sdpa", vision=vision)


LORA = LoraConfig(rank=4, alpha=12)
OFFLOADED = ZeroConfig(stage=3, offload=OffloadConfig(optimizer="cpu", param="cpu"), param_persistence_elements=0)


def is_text(name: str) -> bool:
    return any(part in name for part in ("language_model", "text_model", "lm_head"))


def config(stage: int, **extra: object) -> EngineConfig:
    zero = ZeroConfig(stage=stage, param_persistence_elements=0, reduce_bucket_bytes=100_000)
    optim = OptimConfig(lr=LR, eps=EPS, grad_clip=1.0)
    return replace(EngineConfig(zero=zero, optim=optim, dtype="float32", collective_guard="lockstep"), **extra)


def test_an_export_has_the_tensors_of_the_model_folder(model_folder: Path) -> None:
    saved = load_file(model_folder / "model.safetensors")
    exported = {tensor.name: tensor.value() for tensor in whole_tensors(load(model_folder))}
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())


def test_values_of_sequences_with_images(model_folder: Path) -> None:
    """The critic's backbone is that of the folder; transformers itself has no class with a value head for most."""
    assert check_model(str(model_folder), FP32, head="value").sees
    model = load_model(str(model_folder), FP32, device=CPU, ds_config={}, head="value")
    score = model.score.weight.detach()
    install_packed_forward(model, None)
    samples = samples_of(model_folder, 4, 1)
    inputs, _ = packed_inputs(make_batch(samples), device=CPU, kernel="sdpa", vision=vision_of(model, always=False))
    expected = upstream(model_folder)
    with torch.no_grad():
        hidden = [expected.model(**upstream_inputs(expected, s))[0][0, s.num_prompt - 1 : -1] for s in samples]
        torch.testing.assert_close(model(packed=inputs), (torch.cat(hidden) @ score.T).T, rtol=1e-4, atol=1e-5)


def test_training_a_tower_needs_one(tiny_model: Path) -> None:
    with raises(EngineConfigError, field="train_vision"):
        check_model(str(tiny_model), FP32)


def test_the_memory_plan_knows_the_tower(model_folder: Path) -> None:
    names = {name: p.numel() for name, p in upstream(model_folder).named_parameters()}
    text = sum(size for name, size in names.items() if is_text(name))
    zero = ZeroConfig(stage=2)
    plans = [
        estimate_memory(model_folder, EngineConfig(zero=zero, **settings), tokens_per_micro_batch=4096)
        for settings in ({}, {"train_vision": True}, {"train_vision": True, "gradient_checkpointing": True})
    ]
    assert [plan.num_parameters for plan in plans] == [sum(names.values())] * 3
    assert [plan.num_trained for plan in plans] == [text, sum(names.values()), sum(names.values())]
    assert plans[1].activations.device > plans[0].activations.device
    assert plans[1].activations.device > plans[2].activations.device


def test_the_documented_models_are_those_of_the_tests() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert sorted(re.findall(r"^\| [A-Z][\w .-]+ \| `(\w+)` \|$", text, re.M)) == sorted(FAMILIES)


def adapted(folder: Path, *, vision: bool) -> Any:
    model = load_model(str(folder), FP32, device=CPU, ds_config={})
    add_adapters(model, LORA, head="lm", seed=0, vision=vision)
    return model


@pytest.mark.parametrize("vision", [False, True])
def test_adapters_of_the_text_model_or_of_both(model_folder: Path, vision: bool) -> None:
    names = [name for name, p in adapted(model_folder, vision=vision).named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in names)
    assert any(is_text(name) for name in names)
    assert any(not is_text(name) for name in names) is vision


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("vision", [False, True])
def test_adapters_train_as_peft_trains_them(two_ranks: RankPool, tmp_path: Path, vision: bool) -> None:
    folder = write(tmp_path / "model", "qwen3_vl")
    steps = [samples_of(folder, 6, seed) for seed in (1, 5)]
    model = adapted(folder, vision=vision)
    start = {t.name: t.value() for t in adapter_tensors(model)}
    adapters = write_adapters(tmp_path / "start", adapter_settings(model), start)
    expected = reference_training(folder, steps, adapters=adapters)
    per_rank = [{"steps": [[samples[rank::2], []] for samples in steps]} for rank in range(2)]
    wanted = config(3, lora=LORA, train_vision=vision)
    results = two_ranks.run("train_adapters", per_rank, model_path=str(folder), config=wanted, samples=steps[0][:3])
    weights, losses, norms = expected
    assert [s.loss for s in results[0]["stats"]] == pytest.approx(losses, rel=1e-5)
    assert [s.grad_norm for s in results[0]["stats"]] == pytest.approx(norms, rel=1e-5)
    trained = results[0]["adapters"]
    assert trained.keys() == start.keys() <= weights.keys()
    # Some gradients are rounding alone, such as those of keys' biases.
    torch.testing.assert_close(trained, {name: weights[name] for name in trained}, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "stage", "trains", "extra"),
    [
        ("qwen2_5_vl", 1, True, {}),
        pytest.param("qwen3_vl", 2, False, {"gradient_checkpointing": True}, marks=pytest.mark.long),
        ("qwen3_vl", 3, True, {"gradient_checkpointing": True}),
        pytest.param("llava_onevision", 3, True, {}, marks=pytest.mark.long),
        ("gemma3", 3, False, {"sequence_parallel": 2}),
        pytest.param("qwen3_vl", 1, True, {"sequence_parallel": 2}, marks=pytest.mark.long),
        pytest.param("idefics3", 2, True, {}, marks=pytest.mark.long),
        ("smolvlm", 3, False, {"zero": OFFLOADED}),
    ],
)
def test_two_ranks_of_which_one_sees_no_images_train_as_one_process(
    two_ranks: RankPool, tmp_path: Path, family: str, stage: int, trains: bool, extra: dict[str, object]
) -> None:
    """Micro batches with images meet those without, and empty ones, in every collective."""
    folder = write(tmp_path / "model", family)
    steps = [samples_of(folder, 6, seed) for seed in (1, 5)]
    is_shared = "sequence_parallel" in extra
    per_rank: list[Any] = [{"steps": []}, {"steps": []}]
    for samples in steps:
        with_them, text = ([s for s in samples if (s.images is None) is not sees] for sees in (True, False))
        micro = [[with_them[:2], with_them[2:]], [text, []]]
        if is_shared:
            micro = [[with_them, text]] * 2
        for rank in range(2):
            per_rank[rank]["steps"].append(micro[rank])
    wanted = config(stage, train_vision=trains, **extra)
    results = two_ranks.run("train", per_rank, model_path=str(folder), config=wanted)

    frozen = (lambda name: False) if trains else (lambda name: not is_text(name))
    weights, losses, norms = reference_training(folder, steps, is_frozen=frozen)
    for result in results:
        assert [s.loss for s in result["stats"]] == pytest.approx(losses, rel=1e-5)
        assert [s.grad_norm for s in result["stats"]] == pytest.approx(norms, rel=1e-5)
    reference = upstream(folder)
    reference.load_state_dict(weights, strict=False)
    reference.save_pretrained(tmp_path / "trained")
    expected = load_file(tmp_path / "trained" / "model.safetensors")
    trained = results[0]["weights"]
    assert trained.keys() == expected.keys()
    # Some gradients are rounding alone, such as those of biases of keys.
    torch.testing.assert_close(trained, expected, rtol=1e-4, atol=1e-5)
