"""Configs of DeepSpeed and accelerate: each key has a counterpart, no effect, or a reason why it is refused."""

import inspect
import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ds_engine import (
    EngineConfig,
    EngineConfigError,
    OffloadConfig,
    OptimConfig,
    ZeroConfig,
    ZeroEngine,
    check_deepspeed,
    config_from_deepspeed,
    deepspeed_config,
)
from ds_engine.from_deepspeed import _SECTIONS, imported, table
from plinth_testing import raises
from plinth_testing.deepspeed_configs import CONFIGS


def without_refused(tree: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    tree = json.loads(json.dumps(tree))
    for path in refused:
        *sections, name = path.split(".")
        inner = tree
        for section in sections:
            inner = inner[section]
        del inner[name]
    return tree


@pytest.mark.parametrize("name", CONFIGS)
def test_public_configs_give_the_engine_their_settings(name: str, tmp_path: Path) -> None:
    tree, settings, refused = CONFIGS[name]
    file = tmp_path / ("config.yaml" if "distributed_type" in tree else "config.json")
    file.write_text(yaml.safe_dump(tree) if file.suffix == ".yaml" else json.dumps(tree))
    entries = imported(file)
    assert [entry.theirs for entry in entries if entry.fate == "refused"] == refused
    assert {entry.ours: entry.our_value for entry in entries if entry.ours in settings and entry.fate == "mapped"} == (
        settings
    )
    if refused:
        with pytest.raises(EngineConfigError) as error:
            config_from_deepspeed(file)
        assert error.value.field == refused[0]
        assert all(path in str(error.value) for path in refused)
    config = config_from_deepspeed(without_refused(tree, refused))
    for key, value in settings.items():
        if key.startswith("zero.deepspeed."):
            assert config.zero.deepspeed[key.removeprefix("zero.deepspeed.")] == value
        else:
            held = attrgetter(key)(config)
            assert (list(held) if isinstance(held, tuple) else held) == value
    check_deepspeed(config)


def test_every_key_of_deepspeeds_zero_section_is_in_the_table() -> None:
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    sections = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer")
    for section, model in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("bf16", DeepSpeedBF16Config),
        ("fp16", DeepSpeedFP16Config),
        *((section, DeepSpeedZeroConfig.model_fields[section[18:]].annotation.__args__[0]) for section in sections),
    ):
        names = {f"{section}.{name}" for name, field in model.model_fields.items()}
        names |= {f"{section}.{field.alias}" for field in model.model_fields.values() if field.alias}
        assert not names - table().keys() - set(sections)


def test_every_key_that_deepspeed_reads_at_the_top_is_in_the_table() -> None:
    from deepspeed.runtime import config

    read = re.findall(r"param_dict(?:\[|, |\.get\()([A-Z][A-Z0-9_]+)", inspect.getsource(config))
    names = {getattr(config, name) for name in read}
    assert {"gradient_clipping", "prescale_gradients", "vocabulary_size"} <= names
    assert names <= table().keys() | set(_SECTIONS)


def test_every_key_that_accelerate_writes_is_in_the_table() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.utils import DeepSpeedPlugin

    names = {*ClusterConfig.__dataclass_fields__, *DeepSpeedPlugin.__dataclass_fields__}
    assert names - table().keys() == {"deepspeed_config", "hf_ds_config"}


MUON = {"betas": (0.9, 0.95), "eps": 1e-10}
"""Defaults of DeepSpeed's Muon."""
OFFLOADS = [
    OffloadConfig(),
    OffloadConfig(optimizer="cpu"),
    OffloadConfig(optimizer="cpu", param="cpu"),
    OffloadConfig(optimizer="nvme", param="nvme", nvme_path="/nvme"),
]


@given(
    stage=st.sampled_from([1, 2, 3]),
    offload=st.sampled_from(OFFLOADS),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    fp32=st.tuples(st.booleans(), st.booleans()),
    bucket=st.integers(1024, 10**9),
    persistence=st.integers(0, 10**6),
    clip=st.sampled_from([None, 0.5]),
)
def test_the_config_that_the_engine_gives_deepspeed_reads_back(
    stage: Any, offload: OffloadConfig, dtype: Any, fp32: tuple[bool, bool], bucket: int, persistence: int, clip: Any
) -> None:
    zero: dict[str, Any] = {
        "stage": stage,
        "fp32_reduce": fp32[0],
        "fp32_grad_accum": fp32[1],
        "reduce_bucket_bytes": bucket,
    }
    if stage == 3:
        zero |= {"offload": offload, "param_persistence_elements": persistence}
    config = EngineConfig(zero=ZeroConfig(**zero), dtype=dtype, optim=OptimConfig(grad_clip=clip))
    theirs = deepspeed_config(config, device_type="cpu")
    read = config_from_deepspeed(theirs, given={"dtype": dtype})
    assert deepspeed_config(read, device_type="cpu") == theirs
    assert read.zero.offload == config.zero.offload


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ({"type": "AdamW"}, {"lr": 1e-3}),
        ({"type": "SGD", "params": {"lr": 0.1}}, {"name": "sgd", "lr": 0.1}),
        (
            {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
            {"name": "sgd", "lr": 0.1, "options": {"momentum": 0.9, "nesterov": True}},
        ),
        (
            {"type": "RAdam", "params": {"lr": 0.1, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            {"name": "torch.optim:RAdam", "lr": 0.1, "weight_decay": 0.1, "options": {"betas": (0.9, 0.95)}},
        ),
        (
            {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "ns_method": "gram"}},
            {"name": "muon", "lr": 0.02, **MUON, "options": {"momentum": 0.9, "adjust_lr_fn": "original"}},
        ),
        (
            {"type": "muon", "params": {"lr": 1e-4, "muon_lr": 0.02}},
            {"name": "muon", "lr": 0.02, **MUON, "options": {"adam_lr": 1e-4, "adjust_lr_fn": "original"}},
        ),
        (
            {"type": "Muon"},
            {"name": "muon", "lr": 0.02, **MUON, "options": {"adam_lr": 3e-4, "adjust_lr_fn": "original"}},
        ),
        (
            {"type": "Muon", "params": {"lr": 1.0, "muon_lr": 0.02, "adam_lr": 1e-4, "betas": [0.8, 0.95]}},
            {
                "name": "muon",
                "lr": 0.02,
                **MUON,
                "betas": (0.8, 0.95),
                "options": {"adam_lr": 1e-4, "adjust_lr_fn": "original"},
            },
        ),
    ],
)
def test_deepspeeds_optimizers_train_with_the_same_numbers(optimizer: dict[str, Any], settings: dict[str, Any]) -> None:
    assert config_from_deepspeed({"optimizer": optimizer}).optim == OptimConfig(**settings)


@pytest.mark.parametrize(
    ("scheduler", "lr", "settings"),
    [
        ({"type": "WarmupLR"}, 1e-5, {"lr": 1e-5, "warmup_steps": 1000}),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}}, None, {"lr": 1e-4, "warmup_steps": 1000}),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}}, None, {"lr": 1e-3, "total_steps": 2000}),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 2000}}, 1e-5, {"lr": 1e-5, "min_lr_ratio": 1e-4}),
    ],
)
def test_keys_that_a_file_leaves_out_have_deepspeeds_values(
    scheduler: dict[str, Any], lr: float | None, settings: dict[str, Any]
) -> None:
    optimizer = {"type": "AdamW", "params": {} if lr is None else {"lr": lr}}
    optim = config_from_deepspeed({"optimizer": optimizer, "scheduler": scheduler}).optim
    assert {key: getattr(optim, key) for key in settings} == settings
    assert optim.warmup_steps == 1000


def test_a_rate_that_a_scheduler_would_override_without_a_word_is_refused() -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}}
    with raises(EngineConfigError, field="scheduler.type (its warmup_max_lr)", value=1e-3):
        config_from_deepspeed({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "scheduler": scheduler})


@pytest.mark.parametrize("name", ["Lion", "Lamb", "OneBitAdam", "NoSuchOptimizer"])
def test_other_optimizers_are_refused(name: str) -> None:
    with pytest.raises(EngineConfigError) as error:
        config_from_deepspeed({"optimizer": {"type": name, "params": {"lr": 1e-4}}})
    assert error.value.field in ("optimizer", "optim.name")


@pytest.mark.parametrize(
    ("tree", "near"),
    [
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "zero_optimization.overlap_comm"),
        ({"bf16": {"enabled": True}, "stage3_max_live_parameters": 1}, "zero_optimization.stage3_max_live_parameters"),
        ({"gradient_clipping": 1.0, "zero_optimisation": {"stage": 2}}, "nearest: zero_optimization"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(tree: dict[str, Any], near: str) -> None:
    [refused] = [entry for entry in imported(tree) if entry.fate == "refused"]
    assert refused.why.endswith(near)


@pytest.mark.parametrize(("enabled", "fate"), [(True, "refused"), (False, "no effect")])
def test_expert_parallelism_is_refused_by_name_unless_it_is_off(enabled: bool, fate: str) -> None:
    entries = imported({"zero_optimization": {"stage": 2}, "expert_parallel": {"enabled": enabled, "autoep_size": 2}})
    assert {entry.theirs: entry.fate for entry in entries}["expert_parallel"] == fate


def test_given_settings_override_the_file_and_say_so() -> None:
    tree = {
        "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e8},
        "gradient_clipping": 0.5,
    }
    given = {"zero.stage": 2, "optim.name": "adamw"}
    fates = {entry.theirs: entry.fate for entry in imported(tree, given=given)}
    assert fates == {
        "optimizer": "overridden",
        "zero_optimization.stage": "overridden",
        "zero_optimization.stage3_max_live_parameters": "no effect",
        "gradient_clipping": "mapped",
    }
    config = config_from_deepspeed(tree, given=given)
    assert (config.zero.stage, config.optim.grad_clip) == (2, 0.5)


def test_an_engine_is_made_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(ZeroEngine, "from_pretrained", lambda *args, **named: calls.append((args, named)))
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}))
    ZeroEngine.from_deepspeed_config(tmp_path / "ds.json", "folder", given={"zero.stage": 2}, head="value")
    [((folder, config), named)] = calls
    assert (folder, config.zero.stage, config.optim.grad_clip, named) == ("folder", 2, 0.5, {"head": "value"})


@pytest.mark.parametrize(
    ("tree", "field", "value"),
    [
        ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage", "two"),
        ({"zero_optimization": 2}, "zero_optimization", 2),
        ({"fp16": True, "gradient_clipping": 1.0}, "fp16", True),
        ({"zero_optimization": {"stage": 4}}, "zero.stage", 4),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": True}}, "zero_optimization.reduce_bucket_size", True),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled", True),
        ({"distributed_type": "FSDP"}, "distributed_type", "FSDP"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "optimizer.params.adam_w_mode", False),
        ({"optimizer": "adam"}, "optimizer", "adam"),
        ({"compile": {"deepcompile": True}, "zero_optimization": {"stage": 3}}, "compile.deepcompile", True),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler", {"type": "OneCycle"}),
        ({"scheduler": {"type": []}}, "scheduler", {"type": []}),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 8}}, "zero_optimization.mics_shard_size", 8),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_its_key(tree: dict[str, Any], field: str, value: Any) -> None:
    with pytest.raises(EngineConfigError) as error:
        config_from_deepspeed(tree)
    assert (error.value.field, error.value.value) == (field, value)


@pytest.mark.parametrize(
    ("tree", "dtype", "bucket"),
    [
        ({"fp16": {"enabled": False}}, "float32", 4000),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "float32", 4000),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, "bfloat16", 2000),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, None, 2000),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, None, 2000),
        ({"mixed_precision": "no", "bf16": {"enabled": False}}, "float32", 4000),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "bfloat16", 4000),
    ],
)
def test_the_dtype_is_that_of_the_file_and_buckets_keep_their_elements(
    tree: dict[str, Any], dtype: str | None, bucket: int
) -> None:
    config = config_from_deepspeed({**tree, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}})
    assert (config.dtype, config.zero.reduce_bucket_bytes) == (dtype, bucket)
    assert config.reduce_bucket_elements == 1000


def test_accelerates_deepspeed_file_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIGS["trainer_zero3"][0]))
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n")
    assert config_from_deepspeed(file).zero.stage == 3
    assert "ds.json:zero_optimization.stage" in {entry.theirs for entry in imported(file)}


@pytest.mark.parametrize(("name", "text"), [("a.yaml", ": :"), ("a.yaml", "- a\n"), ("a.json", "a: 1"), ("b", "a: 1")])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    for file in (tmp_path / name, tmp_path / "missing.json"):
        with pytest.raises(EngineConfigError) as error:
            config_from_deepspeed(file)
        assert error.value.value == str(file)
