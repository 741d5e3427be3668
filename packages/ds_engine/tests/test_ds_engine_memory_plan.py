"""The memory planner against what real ranks hold, and what has to be true of any estimate."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from ds_engine_architectures import HYBRIDS, PACKED, ROWS, tiny_architecture
from ds_engine_testkit import make_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine import EngineConfig, EngineConfigError, LoraConfig, ModelError, OffloadConfig, OptimConfig, ZeroConfig
from ds_engine.__main__ import main
from ds_engine.planning import model_shape
from ds_engine.planning.memory_plan import MemoryEstimate, estimate_memory
from ds_engine.planning.model_shape import ModelShape
from ds_engine.upstream import FENCE
from plinth_testing import RankPool, raises, write_tiny_model
from plinth_testing.models import QWEN2_7B, QWEN3_06B

LARGEST_WEIGHT = 128 * 64


def config(
    stage: int, *, dtype: str = "bfloat16", offload: str = "none", fp32: bool = True, **extra: Any
) -> EngineConfig:
    zero = ZeroConfig(
        stage=stage,
        offload=OffloadConfig(optimizer=offload),
        fp32_grad_accum=fp32,
        reduce_bucket_bytes=1024,
        param_persistence_elements=0,
    )
    return EngineConfig(**{"zero": zero, "dtype": dtype} | extra)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        config(1),
        config(1, dtype="float32"),
        config(2, optim=OptimConfig(weight_decay=0.1)),
        config(2, fp32=False),
        config(2, offload="cpu"),
        config(2, lora=LoraConfig(rank=4)),
        config(2, lora=LoraConfig(rank=4, base_format="nf4")),
        config(3, lora=LoraConfig(rank=4, base_format="nf4")),
        config(3),
        config(3, dtype="float32"),
        config(3, offload="cpu"),
    ],
    ids=["1-bf16", "1-fp32", "2-bf16", "2-grads", "2-cpu", "2-lora", "2-nf4", "3-nf4", "3-bf16", "3-fp32", "3-cpu"],
)
def test_planned_states_equal_what_ranks_hold(two_ranks: RankPool, tmp_path_factory: Any, case: EngineConfig) -> None:
    # In four bits a shard of the smaller model's matrices would be less than the kilobyte that counts.
    is_packed = case.lora is not None and case.lora.base_format == "nf4"
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128 if is_packed else 64)
    held = two_ranks.run(
        "held_bytes", model_path=str(folder), config=case, micro_batches=[make_samples(2, seed=s) for s in (1, 2)]
    )
    plan = estimate_memory(folder, case, dp=2, tokens_per_micro_batch=64)
    sizes = {name: place.device + place.cpu for name, place in plan.rows()}
    for rank in held:
        assert rank["weights"] == pytest.approx(sizes["weights"], rel=0.01)
        assert rank["optimizer"] == pytest.approx(sizes["optimizer"], rel=0.01)
        # A weight that lies across a border between shards, and the last that was reduced, are held in whole besides.
        most = sizes["gradients"] + plan.buffers.cpu + 2 * 4 * LARGEST_WEIGHT
        assert 0.98 * sizes["gradients"] <= rank["rest"] <= most, sizes


SHAPE = ModelShape.read(QWEN3_06B)


def plan(settings_: EngineConfig, **extra: Any) -> MemoryEstimate:
    return estimate_memory(SHAPE, settings_, **{"dp": 2, "tokens_per_micro_batch": 16384} | extra)


def test_parameters_are_counted_as_published() -> None:
    estimate = plan(config(2))
    assert estimate.num_parameters == estimate.num_trained == 596_049_920
    untied = estimate_memory(QWEN3_06B | {"tie_word_embeddings": False}, config(2), tokens_per_micro_batch=1)
    assert untied.num_parameters - 596_049_920 == 151936 * 1024
    critic = plan(config(2), head="value")
    assert critic.num_parameters == 596_049_920 + 1024
    adapters = plan(config(2, lora=LoraConfig(rank=8, target_modules=("q_proj", "v_proj"))))
    assert adapters.num_trained == 28 * 8 * (1024 + 2048 + 1024 + 1024)
    assert adapters.num_parameters == 596_049_920 + adapters.num_trained


def test_a_7b_model_in_four_bits_fits_cards_of_11_gb() -> None:
    """DeepSeek-R1-Distill-Qwen-7B's sizes on two cards; 0.5 GB of them are CUDA's own."""

    def device_bytes(stage: int, base_format: str) -> tuple[int, int]:
        lora = LoraConfig(rank=16, base_format=base_format)
        settings_ = config(stage, offload="cpu", lora=lora, gradient_checkpointing=True)
        estimate = estimate_memory(QWEN2_7B, settings_, dp=2, tokens_per_micro_batch=2048)
        assert estimate.num_parameters - estimate.num_trained == 7_615_616_512
        return estimate.weights.device, estimate.device_bytes

    linear = 28 * 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
    saved = linear * 2 - linear * 9 // 16
    for stage, share in ((2, 1), (3, 2)):
        packed, plain = (device_bytes(stage, base_format) for base_format in ("nf4", "plain"))
        assert plain[0] - packed[0] == saved // share
        assert packed[1] < 10_500_000_000
    assert device_bytes(2, "plain")[1] > 15_000_000_000


STAGES = st.sampled_from([1, 2, 3])
DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])


@settings(deadline=None, derandomize=True)
@given(stage=STAGES, dtype=DTYPES, offload=st.sampled_from(["none", "cpu"]), fp32=st.booleans(), dp=st.integers(1, 64))
def test_more_ranks_and_higher_stages_hold_no_more(stage: int, dtype: str, offload: str, fp32: bool, dp: int) -> None:
    def states(stage: int, dp: int, offload: str = offload) -> tuple[int, int]:
        kinds = plan(config(stage, dtype=dtype, offload=offload, fp32=fp32), dp=dp)
        places = (kinds.weights, kinds.gradients, kinds.optimizer)
        return sum(p.device for p in places), sum(p.device + p.cpu for p in places)

    slack = 1000 * 8  # padding
    assert states(stage, dp + 1)[0] <= states(stage, dp)[0] + slack
    assert states(stage, dp + 1)[1] <= states(stage, dp)[1] + slack
    if stage < 3:
        assert states(stage + 1, dp, "none")[0] <= states(stage, dp, "none")[0] + slack
    assert states(stage, dp, "cpu")[0] <= states(stage, dp, "none")[0]


@settings(deadline=None, derandomize=True)
@given(stage=STAGES, tokens=st.integers(2, 100_000), more=st.integers(1, 50_000))
def test_more_tokens_need_more_and_recomputation_needs_less(stage: int, tokens: int, more: int) -> None:
    def peak(settings_: EngineConfig, tokens: int = tokens) -> int:
        return plan(settings_, tokens_per_micro_batch=tokens).device_bytes

    whole = config(stage)
    recomputed = config(stage, gradient_checkpointing=True)
    on_cpu = config(stage, gradient_checkpointing=True, checkpoint_to_cpu=True)
    shared = replace(whole, sequence_parallel=2)
    for settings_ in (whole, recomputed, on_cpu):
        assert peak(settings_) <= peak(settings_, tokens + more)
    assert peak(on_cpu) <= peak(recomputed) <= peak(whole)
    rows = tokens * 151936 * 2  # a probability of each token and row of the vocabulary
    keeping = replace(whole, keep_probabilities=True)
    assert rows < plan(keeping, tokens_per_micro_batch=tokens).activations.device
    assert peak(keeping) < peak(whole) + 1.1 * rows
    for dtype in ("float16", "float32"):  # they keep none
        other = replace(whole, dtype=dtype)
        assert peak(replace(other, keep_probabilities=True)) == peak(other)
    # A single token cannot be shared.
    assert plan(shared, dp=1, tokens_per_micro_batch=tokens + 1).device_bytes <= peak(whole, tokens + 1)


def test_kept_paths_of_shared_prefixes_are_counted_where_they_are_kept() -> None:
    """Of Qwen3-0.6B: 28 layers with keys and values of 1024 numbers; not with recomputed layers."""
    paths = {"tokens_per_micro_batch": 16384, "path_rows_per_token": 1.5}
    keeping = config(2, keep_probabilities=True)
    sizes = [plan(settings_, **paths).device_bytes for settings_ in (keeping, replace(keeping, sequence_parallel=2))]
    less = plan(keeping, tokens_per_micro_batch=16384).device_bytes
    assert sizes[0] - less == 1.5 * 16384 * 28 * 2 * 2 * 1024
    assert sizes[1] < sizes[0] - (sizes[0] - less) / 2
    for none in (config(2), replace(keeping, gradient_checkpointing=True), replace(keeping, dtype="float32")):
        assert plan(none, **paths) == plan(none, tokens_per_micro_batch=16384)


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    for model, value in (({"model_type": "t5"}, "t5"), (tmp_path, str(tmp_path))):
        with raises(ModelError, value=value):
            estimate_memory(model, config(2), tokens_per_micro_batch=1)
    with raises(EngineConfigError, field="tokens_per_micro_batch", value=0):
        plan(config(2), tokens_per_micro_batch=0)


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    settings_ = ["zero.stage=3", "zero.offload.optimizer=cpu"]
    main(["plan", str(tmp_path), "--dp", "4", "--tokens", "16384", *settings_])
    expected = EngineConfig(zero=ZeroConfig(stage=3, offload=OffloadConfig(optimizer="cpu")))
    assert capsys.readouterr().out.strip() == plan(expected, dp=4).table()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("zero.stag=3", "error: zero.stag: unknown key; nearest: zero.stage"),
        ("actor.zero.stage=3", "error: actor.zero.stage: unknown key; nearest: zero.stage"),
        ("zero.stage=4", "error: zero.stage: got 4; "),
        ("optim.lr=0", "error: optim.lr: got 0.0; "),
        (
            "sequence_parallel=3",
            "error: sequence_parallel: got 3; it does not divide the 16 attention heads; allowed: one of [1, 2, 4",
        ),
        ("zero", "error: got 'zero'; it is not key=value"),
        ("lora.rank=8", ""),
    ],
)
def test_the_command_reads_settings_and_refuses_wrong_ones(
    setting: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    arguments = ["plan", str(tmp_path), "--tokens", "1", setting, "dtype=bfloat16"]
    if not message:
        main(arguments)
        assert "trained, 1 ranks" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(message)


def test_the_command_warns_of_a_model_that_runs_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    AutoConfig.for_model("bert", intermediate_size=64, **sizes).save_pretrained(tmp_path)
    for model in (tmp_path, tmp_path / "config.json"):
        main(["plan", str(model), "--tokens", "64"])
        printed = capsys.readouterr()
        assert "upper bound" in printed.out
        assert "warning: runs refuse this model: BertLMHeadModel cannot be trained: the log-prob of" in printed.err
    tiny_architecture("gpt2", PACKED["gpt2"]).save_pretrained(tmp_path)
    main(["plan", str(tmp_path), "--tokens", "64"])
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n,", "config.json' is not a valid JSON file."),
        ("[]", "Should have a `model_type` key in its config.json."),
        (
            '{"model_type": "vit"}',
            "be counted: ValueError: transformers has no AutoModelForCausalLM of ViTConfig",
        ),
        (
            '{"model_type": "new"}',
            "model type `new` but Transformers does not recognize this architecture; installed is transformers "
            f"{version('transformers')}, tested is {FENCE.tested['transformers']}",
        ),
    ],
)
def test_a_configuration_that_cannot_be_read_costs_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path), "--tokens", "64"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[transformers]")]
    assert (ended.value.code, line.startswith("error: "), message in line) == (2, True, True), line


def test_a_model_of_the_hub_is_planned_where_its_download_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    stored = tmp_path / "models--somebody--qwen"
    for file, text in (("refs/main", "0a1b"), ("snapshots/0a1b/config.json", json.dumps(QWEN3_06B))):
        (stored / file).parent.mkdir(parents=True)
        (stored / file).write_text(text)
    main(["plan", "somebody/qwen", "--tokens", "64"])
    assert "596.0M parameters" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "somebody/else", "--tokens", "64"])
    assert "the model of this name is fetched by: hf download somebody/else\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "gpus", "compiled", "recomputed", "kept_gib", "tokens", "measured_gib"),
    [
        (2, 1, True, False, 2, 12288, 21.48),
        (2, 1, True, False, 0.5, 24576, 31.2),
        (2, 2, True, False, 2, 12288, 18.15),
        (3, 1, False, False, 0.5, 12288, 31.79),
        (3, 1, False, True, 0.5, 12288, 11.93),
        (3, 1, True, True, 0.5, 12288, 11.67),
        (3, 2, True, False, 2, 12288, 18.71),
    ],
)
def test_peaks_measured_on_h200s(
    stage: int, gpus: int, compiled: bool, recomputed: bool, kept_gib: float, tokens: int, measured_gib: float
) -> None:
    """Qwen3-0.6B, one micro batch a GPU, measured by benchmarks/engine_step (which says how much of the logits its
    log-prob op keeps) and benchmarks/memory_plan."""
    settings_ = EngineConfig(zero=ZeroConfig(stage=stage), compile=compiled, gradient_checkpointing=recomputed)
    kept = {"log_prob_bytes": int(kept_gib * 2**30)}
    estimate = plan(settings_, dp=gpus, tokens_per_micro_batch=tokens, num_micro_batches=1, **kept)
    assert estimate.device_bytes / 2**30 == pytest.approx(measured_gib, rel=0.02)


@pytest.mark.parametrize(
    ("keeps", "tokens", "targets", "path_rows", "measured_gib"),
    [
        (False, 30408, 28672, 44296, 39.25),
        (True, 30408, 28672, 0, 46.64),
        (True, 32768, 16384, 0, 45.23),
        (True, 32680, 22016, 0, 46.78),
        (True, 30408, 28672, 44296, 51.42),
    ],
)
def test_peaks_with_kept_probabilities_measured_on_an_h200(
    keeps: bool, tokens: int, targets: int, path_rows: int, measured_gib: float
) -> None:
    """Qwen3-0.6B, compiled, micro batches of benchmarks/shared_prefix; the last one with kept paths."""
    settings_ = EngineConfig(zero=ZeroConfig(stage=2), compile=True, keep_probabilities=keeps)
    sizes = {"tokens_per_micro_batch": tokens, "targets_per_micro_batch": targets}
    estimate = plan(settings_, dp=1, path_rows_per_token=path_rows / tokens, **sizes)
    assert estimate.device_bytes / 2**30 == pytest.approx(measured_gib, rel=0.02)


COUNTED = {"qwen3": QWEN3_06B, "qwen2": {"num_hidden_layers": 4}, "llama": {"num_hidden_layers": 4}, "mistral": {}}


@pytest.mark.parametrize("family", COUNTED)
def test_a_counted_shape_is_an_upper_bound(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known families, counted as if they were unknown: no smaller activations."""
    fields = {"model_type": family, **COUNTED[family]}
    exact = ModelShape.read(fields)
    monkeypatch.setattr(model_shape, "_KNOWN", ())
    counted = ModelShape.read(fields)
    assert (exact.is_exact, counted.is_exact) == (True, False)
    for settings_ in (config(2), config(3, gradient_checkpointing=True)):
        known, bound = (estimate_memory(s, settings_, dp=2, tokens_per_micro_batch=8192) for s in (exact, counted))
        assert bound.weights == known.weights
        assert known.activations.device <= bound.activations.device <= 3 * known.activations.device


@pytest.mark.parametrize("family", [*PACKED, *HYBRIDS, *ROWS])
def test_every_architecture_that_trains_is_counted(family: str, tmp_path: Path) -> None:
    tiny_architecture(family, (PACKED | HYBRIDS | ROWS)[family]).save_pretrained(tmp_path)
    estimate = estimate_memory(tmp_path, config(2), tokens_per_micro_batch=64)
    assert estimate.num_parameters == estimate.num_trained > 0
    assert estimate.activations.device > 0


def test_stage_3_plans_the_gather_of_a_whole_layer_of_a_mixture(tmp_path: Path) -> None:
    """It cannot be split, whatever DeepSpeed's limits say."""
    tiny_architecture("qwen3_moe", PACKED["qwen3_moe"]).save_pretrained(tmp_path)
    shape = ModelShape.read(tmp_path)
    experts = sum(w.size for w in shape.counted if w.name.startswith("model.layers.0.mlp."))
    assert experts < shape.largest_layer < sum(w.size for w in shape.counted) / 2
    case = config(3)
    small = replace(case, zero=replace(case.zero, deepspeed={"stage3_max_reuse_distance": 0}))
    plan = estimate_memory(shape, small, dp=2, tokens_per_micro_batch=8)
    assert plan.buffers.device >= shape.largest_layer * 2


def test_adapters_that_match_no_layer_are_refused() -> None:
    with raises(EngineConfigError, field="lora.target_modules", value=("nowhere",)):
        SHAPE.adapters(LoraConfig(target_modules=("nowhere",)))
    whole = SHAPE.adapters(LoraConfig(target_modules=("q_proj",)))
    assert SHAPE.adapters(LoraConfig(target_modules=("self_attn.q_proj",))) == whole != []
