"""LoRA on a base in NF4: the format against its definition, layers and models that hold it, training on real ranks."""

from __future__ import annotations

import hashlib
import shutil
import weakref
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import ds_engine_testkit
import pytest
import torch
import transformers
from ds_engine_testkit import (
    assert_equal,
    distance,
    make_batch,
    make_samples,
    reference_training,
    used,
    write_adapters,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from ds_engine import (
    EngineConfig,
    EngineConfigError,
    LoraConfig,
    ModelError,
    dense_log_prob,
)
from ds_engine.model import nf4 as nf4_module
from ds_engine.model.loading import load_model, nf4_base
from ds_engine.model.lora import adapter_settings, adapter_tensors, add_adapters, whole_tensors
from ds_engine.model.nf4 import VALUES, Nf4Linear, Nf4Packing, quantize_base
from ds_engine.model.packed_model import install_packed_forward, packed_inputs
from plinth_testing import RankPool, raises, write_tiny_model

CPU = torch.device("cpu")
STEPS = [make_samples(n, seed=s) for n, s in ((7, 1), (5, 2), (6, 3))]
LORA = LoraConfig(rank=4, alpha=12, base_format="nf4")
WIDEST_GAP = max(b - a for a, b in pairwise(VALUES))


config = partial(ds_engine_testkit.config, lora=LORA, seed=5)


def packing(weight: torch.Tensor) -> Nf4Packing:
    return Nf4Packing(shape=tuple(weight.shape), dtype=weight.dtype)


# ------------------------------------------------------------------ the format

BLOCKS = st.lists(
    st.tuples(st.integers(0, 2**31), st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 3e4]), st.booleans()),
    min_size=1,
    max_size=6,
)


def drawn(blocks: list[tuple[int, float, bool]], dtype: torch.dtype) -> torch.Tensor:
    """[number of blocks, 64]: normal, or with a few outliers, of scales that differ from block to block."""
    rows = []
    for seed, scale, spiky in blocks:
        row = torch.randn(64, generator=torch.Generator().manual_seed(seed))
        rows.append((row**7 if spiky else row) * scale / row.abs().max() ** (7 if spiky else 1))
    return torch.stack(rows).to(dtype)


@settings(deadline=None)
@given(blocks=BLOCKS, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_every_weight_becomes_the_nearest_value_of_its_block(
    blocks: list[tuple[int, float, bool]], dtype: torch.dtype
) -> None:
    weight = drawn(blocks, dtype)
    packed = packing(weight).pack(weight)
    back = packing(weight).unpack(packed)
    assert (packed.dtype, packed.shape) == (dtype, (36 * len(blocks) // dtype.itemsize,))
    assert (back.dtype, back.shape) == (dtype, weight.shape)
    largest = weight.double().abs().amax(dim=1, keepdim=True)
    rounding = 2.0 ** (-8 if dtype == torch.bfloat16 else -23) * largest
    error = (back.double() - weight.double()).abs()
    assert (error <= WIDEST_GAP / 2 * largest + rounding).all()
    choices = largest[..., None] * torch.tensor(VALUES, dtype=torch.float64)
    nearest = (choices - weight.double()[..., None]).abs().amin(dim=-1)
    assert (error <= nearest + rounding).all()
    # The largest of a block and zeros survive; so does everything that has been rounded once.
    assert torch.equal(back.abs().amax(dim=1), weight.abs().amax(dim=1))
    assert (back[weight == 0] == 0).all()
    assert torch.equal(packing(back).pack(back).view(torch.uint8), packed.view(torch.uint8))


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 40), columns=st.integers(1, 6), at_once=st.integers(1, 8), offset=st.integers(0, 5))
def test_chunk_size_and_buffer_offset_do_not_matter(rows: int, columns: int, at_once: int, offset: int) -> None:
    """Quantized in chunks of any size, and dequantized from any offset of a buffer."""
    weight = torch.randn(rows, 64 * columns, generator=torch.Generator().manual_seed(rows)).bfloat16()
    packed = packing(weight).pack(weight)
    whole = packing(weight).unpack(packed)
    buffer = torch.zeros(offset + len(packed) + 3, dtype=torch.bfloat16)
    placed = buffer[offset : offset + len(packed)]
    placed.copy_(packed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nf4_module, "NF4_CHUNK", 64 * at_once)
        assert torch.equal(packing(weight).pack(weight).view(torch.uint8), packed.view(torch.uint8))
        assert torch.equal(packing(weight).unpack(placed), whole)


# SHA-256 of what bitsandbytes 0.50.2 makes of `ramp` on the CPU: indices and scales, and the weights out of them.
BITSANDBYTES = {
    torch.float32: (
        "79d26b00400d5192840e022afe0dcdb5e2156d551c4bceafb3c09ce2e5341ec4",
        "72ef5b632a9e18b4071982c9b6ebd879b417dd9f8cbe9970d3ddd417ed2f1ae5",
    ),
    torch.bfloat16: (
        "2841f12f0d4835525d69bf146892f890d9ee0992ba33529c61623ccd1c177aac",
        "ef5f4de968917833cfaa6f1da446f8e8b7e4e93893290ebc324808843b761657",
    ),
    torch.float16: (
        "964b380b18ebba0238f34d68edb00fcc487f7928620be57d55c09e95d97d2ebf",
        "206e0cbc026a5009c38f8e0262b93380342e55ae145c0ed1777f2e0e69735756",
    ),
}


def ramp(dtype: torch.dtype) -> torch.Tensor:
    """[384, 640], up to 0.05 and mostly small, by arithmetic that is the same everywhere; one row of zeros."""
    i = torch.arange(384 * 640)
    weight = ((i * 2654435761 % 1048576).double() / 524288 - 1) ** 3 * 0.05
    weight = weight.float().view(384, 640).to(dtype)
    weight[7] = 0
    return weight


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", list(BITSANDBYTES))
def test_bits_equal_recorded_bitsandbytes(dtype: torch.dtype) -> None:
    weight = ramp(dtype)
    packed = packing(weight).pack(weight)
    back = packing(weight).unpack(packed)
    assert (digest(packed), digest(back)) == BITSANDBYTES[dtype]


# ------------------------------------------------------------ layers and models


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_multiplies_by_the_unpacked_weight_and_keeps_nothing(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(128, 96, bias=bias).requires_grad_(False)
    packed = packing(plain.weight)
    layer = Nf4Linear(plain, nn.Parameter(packed.pack(plain.weight), requires_grad=False), packed)
    plain.weight.copy_(packed.unpack(layer.weight))
    x = torch.randn(2, 5, 128)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(ours)
    assert [t.data_ptr() for t in kept] == [layer.weight.data_ptr()]
    expected = plain(theirs)
    assert torch.equal(y, expected)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    assert torch.equal(ours.grad, theirs.grad)
    assert layer.weight.untyped_storage().nbytes() == 128 * 96 * 9 // 16


def test_layers_are_quantized_one_at_a_time(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(str(tiny_model), EngineConfig(dtype="bfloat16"), device=CPU, ds_config={})
    before = [weakref.ref(m.weight) for m in model.model.modules() if type(m) is nn.Linear]
    alive: list[int] = []
    original = Nf4Packing.pack

    def pack(self: Nf4Packing, weight: torch.Tensor) -> torch.Tensor:
        alive.append(sum(each() is not None for each in before))
        return original(self, weight)

    monkeypatch.setattr(Nf4Packing, "pack", pack)
    quantize_base(model, device=CPU)
    assert alive == list(range(len(before), 0, -1))
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "mlp.up_proj")])
def test_exported_weights_are_those_of_the_forward_pass(tiny_model: Path, targets: Any) -> None:
    """A plain model with the exported tensors gives the same log-probs."""
    settings_ = EngineConfig(dtype="float32", lora=replace(LORA, target_modules=targets))
    model = load_model(str(tiny_model), settings_, device=CPU, ds_config={})
    add_adapters(model, settings_.lora, head="lm", seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    plain = load_model(str(tiny_model), EngineConfig(dtype="float32"), device=CPU, ds_config={})
    before = {name: p.clone() for name, p in plain.named_parameters()}
    tensors = {t.name: t.value() for t in whole_tensors(model)}
    assert list(tensors) == list(before)
    assert not any(torch.equal(tensors[name], p) for name, p in before.items() if "_proj" in name)
    assert all(torch.equal(tensors[name], p) for name, p in before.items() if "_proj" not in name)
    plain.load_state_dict(tensors, strict=False)
    answers = []
    for each in (model, plain):
        install_packed_forward(each, dense_log_prob)
        inputs, _ = packed_inputs(make_batch(STEPS[0]), device=CPU, kernel="sdpa")
        answers.append(each(packed=inputs))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-5, atol=1e-5)


def test_weights_that_cannot_be_quantized_are_refused(tmp_path: Path) -> None:
    odd = write_tiny_model(tmp_path / "odd", hidden_size=40)
    with raises(ModelError, field="lora.base_format") as caught:
        load_model(str(odd), config(2), device=CPU, ds_config={})
    assert "layers.0.self_attn.k_proj.weight" in caught.value.problem
    broken = transformers.AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "tiny"))
    broken.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
    with raises(ModelError, field="lora.base_format") as caught:
        quantize_base(broken, device=CPU)
    assert "layers.1.mlp.up_proj.weight" in caught.value.problem


def test_bad_settings() -> None:
    with raises(EngineConfigError, field="base_format", value="int4"):
        LoraConfig(base_format="int4")
    with raises(EngineConfigError, field="compile", value=True):
        EngineConfig(lora=LORA, compile=True)


# ----------------------------------------------------------------------- ranks


Rounded = tuple[Path, Path, dict[str, torch.Tensor]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_becomes_the_base_of_an_engine_without_one(tiny_model: Path, dtype: str) -> None:
    """For exports of checkpoints, which hold the adapters alone."""
    base = nf4_base(str(tiny_model), EngineConfig(dtype=dtype))
    engine = load_model(str(tiny_model), config(2, dtype=dtype), device=CPU, ds_config={})
    layers = {f"{n}.weight": layer for n, layer in engine.named_modules() if isinstance(layer, Nf4Linear)}
    of_folder = load_file(tiny_model / "model.safetensors")
    assert layers.keys() < of_folder.keys()
    for name, tensor in of_folder.items():
        used_K = layers[name].packed.unpack(layers[name].weight) if name in layers else tensor
        assert torch.equal(base(name, tensor), used_K), name


def test_a_folder_with_other_names_is_no_base(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors["renamed"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    with raises(ModelError, field="model_path", value=str(folder)):
        nf4_base(str(folder), EngineConfig(dtype="float32"))


@pytest.fixture(scope="module")
def rounded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Rounded:
    """(model folder, adapter folder, weights): a plain fp32 model of what the packed base is unpacked to, and the
    adapters that the engine starts with."""
    folder = tmp_path_factory.mktemp("rounded")
    packed = load_model(str(tiny_model), config(2), device=CPU, ds_config={})
    weights = {t.name: t.value() for t in whole_tensors(packed)}
    add_adapters(packed, LORA, head="lm", seed=5)
    tensors = {t.name: t.value() for t in adapter_tensors(packed)}
    adapters = write_adapters(folder / "adapters", adapter_settings(packed), tensors)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(folder / "model")
    return folder / "model", adapters, weights


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "optimizer", "param"), [(2, "none", "none"), (3, "cpu", "cpu")])
def test_three_steps_equal_one_process_on_the_unpacked_base(
    two_ranks: RankPool,
    tiny_model: Path,
    rounded: Rounded,
    stage: int,
    optimizer: str,
    param: str,
) -> None:
    folder, adapters, base = rounded
    reference = reference_training(folder, STEPS, adapters=adapters)
    per_rank = [{"steps": [[samples[rank::4], samples[rank + 2 :: 4], []] for samples in STEPS]} for rank in range(2)]
    wanted = config(stage, optimizer=optimizer, param=param)
    with used(two_ranks, *(["sharded NF4 weights"] if wanted.zero.stage == 3 else [])):
        results = two_ranks.run(
            "train_adapters", per_rank, model_path=str(tiny_model), config=wanted, samples=STEPS[0][:3]
        )
    first = results[0]
    assert_equal(results, reference, key="adapters")
    for name, tensor in first["merged"].items():
        assert distance(tensor, reference[0][name]) < 1e-5, name
        change = base[name]
        if "_proj" in name:
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = (first["adapters"][f"{layer}.lora_{side}.weight"] for side in "AB")
            change = change + 12 / 4 * b @ a
        torch.testing.assert_close(tensor, change, rtol=1e-6, atol=1e-6)
    # The packed base really is half a byte a weight and four a block of 64; stage 3 has a half of it on each rank.
    num_weights = sum(tensor.numel() for name, tensor in base.items() if "_proj" in name)
    for result in results:
        assert result["packed_bytes"] == num_weights * 9 // 16 // (2 if stage == 3 else 1)
        assert all(torch.equal(each, result["base"][0]) for each in result["base"])
        assert distance(result["outputs"].log_probs_K, result["base"][0]) > 1e-3
    # Nor does it change what a reference model answers: a frozen engine of this configuration is that base.
    (frozen, _, _), _ = two_ranks.run(
        "frozen_log_probs", model_path=str(tiny_model), config=wanted, samples=STEPS[0][:3]
    )
    torch.testing.assert_close(frozen.log_probs_K, first["base"][0], rtol=1e-6, atol=1e-6)
