"""Functions and settings that need no process group."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine import (
    EngineConfig,
    OffloadConfig,
    OptimConfig,
    ZeroConfig,
    check_deepspeed,
    deepspeed_config,
    learning_rate,
)
from ds_engine.config import check_schedule
from ds_engine.deepspeed_keys import HPZ, LIVE_PARAMETERS, OWNED, PREFETCH_BUCKET, REUSE_DISTANCE, SUB_GROUP
from ds_engine.errors import EngineConfigError
from plinth_testing import raises


@pytest.mark.parametrize(
    ("build", "field", "value"),
    [
        (lambda: ZeroConfig(stage=4), "stage", 4),
        (
            lambda: ZeroConfig(stage=2, offload=OffloadConfig(param="cpu", optimizer="cpu")),
            *("offload.param", "cpu"),
        ),
        (
            lambda: ZeroConfig(stage=1, offload=OffloadConfig(optimizer="nvme", nvme_path="/x")),
            *("offload.optimizer", "nvme"),
        ),
        (lambda: ZeroConfig(stage=3, offload=OffloadConfig(param="cpu")), "offload.optimizer", "none"),
        (lambda: OffloadConfig(optimizer="nvme"), "nvme_path", None),
        (lambda: OffloadConfig(nvme_path="/x"), "nvme_path", "/x"),
        (lambda: OffloadConfig(optimizer="disk"), "optimizer", "disk"),
        (lambda: OptimConfig(lr=0.0), "lr", 0.0),
        (lambda: OptimConfig(lr=math.inf), "lr", math.inf),
        (lambda: OptimConfig(weight_decay=math.inf), "weight_decay", math.inf),
        (lambda: OptimConfig(betas=(0.9, 1.0)), "betas", (0.9, 1.0)),
        (lambda: OptimConfig(warmup_steps=10, total_steps=10), "total_steps", 10),
        (lambda: OptimConfig(grad_clip=0.0), "grad_clip", 0.0),
        (lambda: EngineConfig(checkpoint_to_cpu=True), "checkpoint_to_cpu", True),
        (lambda: EngineConfig(collective_guard="on"), "collective_guard", "on"),
        (lambda: EngineConfig(dtype="fp8"), "dtype", "fp8"),
        (lambda: EngineConfig(attention="eager"), "attention", "eager"),
    ],
)
def test_bad_settings_are_refused_by_field_and_value(build, field: str, value: object) -> None:
    with raises(EngineConfigError, field=field, value=value) as caught:
        build()
    assert caught.value.allowed or caught.value.problem or caught.value.remedy


@given(
    stage=st.sampled_from([1, 2, 3]),
    optimizer=st.sampled_from(["none", "cpu"]),
    param=st.sampled_from(["none", "cpu"]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    fp32_accum=st.booleans(),
    fp32_reduce=st.booleans(),
    bucket=st.integers(1024, 1 << 30),
    device=st.sampled_from(["cpu", "cuda"]),
)
@settings(deadline=None, derandomize=True)
def test_deepspeed_config(stage, optimizer, param, dtype, fp32_accum, fp32_reduce, bucket, device) -> None:
    if param == "cpu" and (stage < 3 or optimizer == "none"):
        param = "none"
    config = EngineConfig(
        zero=ZeroConfig(
            stage=stage,
            offload=OffloadConfig(optimizer=optimizer, param=param),
            fp32_grad_accum=fp32_accum,
            fp32_reduce=fp32_reduce,
            reduce_bucket_bytes=bucket,
        ),
        dtype=dtype,
    )
    result = deepspeed_config(config, device_type=device)
    zero = result["zero_optimization"]
    assert zero["stage"] == stage
    assert ("offload_optimizer" in zero) == (optimizer == "cpu")
    assert ("offload_param" in zero) == (param == "cpu")
    deepspeed_name = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    assert result["data_types"]["grad_accum_dtype"] == deepspeed_name["float32" if fp32_accum else dtype]
    assert result.get("bf16", {}).get("enabled", False) == (dtype == "bfloat16")
    assert result.get("fp16", {}).get("enabled", False) == (dtype == "float16")
    element_bytes = 4 if fp32_reduce or dtype == "float32" else 2
    assert zero["reduce_bucket_size"] == bucket // element_bytes
    assert zero["allgather_bucket_size"] % 2 == 0  # DeepSpeed asserts this
    assert result["train_micro_batch_size_per_gpu"] == result["gradient_accumulation_steps"] == 1
    assert "train_batch_size" not in result  # DeepSpeed derives it from the world size
    assert not any(value == "auto" for value in zero.values())  # DeepSpeed drops "auto" without a word


@given(
    step=st.integers(0, 2000),
    warmup=st.integers(0, 100),
    length=st.integers(1, 1000),
    floor=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
)
@settings(deadline=None, derandomize=True)
def test_learning_rate_stays_within_its_bounds(step, warmup, length, floor, schedule) -> None:
    total = warmup + length
    config = OptimConfig(lr=1e-3, schedule=schedule, warmup_steps=warmup, total_steps=total, min_lr_ratio=floor)
    rate = learning_rate(step, config, total)
    assert 0 <= rate <= 1e-3 * (1 + 1e-12)
    if step + 1 < warmup:
        assert rate < learning_rate(step + 1, config, total)
    elif step >= warmup:
        assert learning_rate(step + 1, config, total) <= rate
        assert rate >= 1e-3 * (floor - 1e-12)
    assert learning_rate(warmup, config, total) == pytest.approx(1e-3)
    expected_end = 1e-3 if schedule == "constant" else 1e-3 * floor
    assert learning_rate(total, config, total) == pytest.approx(expected_end, abs=1e-15)


def test_cosine_halfway() -> None:
    config = OptimConfig(lr=2.0, schedule="cosine", warmup_steps=2, total_steps=12, min_lr_ratio=0.1)
    assert learning_rate(0, config, 12) == 1.0
    assert learning_rate(7, config, 12) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert learning_rate(4, config, 12) == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(0.2 * math.pi)) / 2))


def test_schedule_without_length_is_refused() -> None:
    check_schedule(OptimConfig(), None)
    with raises(EngineConfigError, field="optim.schedule", value="linear"):
        check_schedule(OptimConfig(schedule="linear"), None)
    with raises(EngineConfigError, field="optim.warmup_steps", value=5):
        check_schedule(OptimConfig(schedule="cosine", warmup_steps=5), 5)


@pytest.mark.parametrize("key", sorted(OWNED))
def test_deepspeed_keys_of_the_engine_are_refused_with_the_reason(key: str) -> None:
    with raises(EngineConfigError, field=f"deepspeed.{key}", value=1, problem=OWNED[key]):
        ZeroConfig(stage=3, deepspeed={key: 1})


def test_every_key_of_deepspeeds_section_is_owned_or_passed_on() -> None:
    """A key that a new DeepSpeed adds has to be judged first."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    known = {field.alias or name for name, field in fields.items()}
    assert known - set(OWNED) == {
        *(REUSE_DISTANCE, LIVE_PARAMETERS, PREFETCH_BUCKET, SUB_GROUP, HPZ, "stage3_model_persistence_threshold"),
        *("ignore_unused_parameters", "log_trace_cache_warnings", "enable_sanity_checks"),
    }


@given(number=st.integers(0, 10**10), key=st.sampled_from([REUSE_DISTANCE, LIVE_PARAMETERS, PREFETCH_BUCKET]))
@settings(deadline=None, derandomize=True)
def test_other_keys_reach_deepspeed(number: int, key: str) -> None:
    config = EngineConfig(zero=ZeroConfig(stage=3, deepspeed={key: number}))
    check_deepspeed(config)
    assert deepspeed_config(config, device_type="cuda")["zero_optimization"][key] == number
    with raises(EngineConfigError, field=f"deepspeed.{key}", value=number):
        ZeroConfig(stage=2, deepspeed={key: number})


def test_unknown_keys_and_bad_values_are_refused_by_deepspeed() -> None:
    for key, value, remedy in (
        ("stage3_max_live_parameter", 1, "nearest: stage3_max_live_parameters"),
        ("stage3_max_live_parameters", -1, None),
    ):
        with raises(EngineConfigError, field=f"zero.deepspeed.{key}", remedy=remedy):
            check_deepspeed(EngineConfig(zero=ZeroConfig(stage=3, deepspeed={key: value})))


def test_a_null_dtype_is_bfloat16() -> None:
    assert EngineConfig().model_dtype == "bfloat16"
    assert deepspeed_config(EngineConfig(), device_type="cuda")["bf16"] == {"enabled": True}
