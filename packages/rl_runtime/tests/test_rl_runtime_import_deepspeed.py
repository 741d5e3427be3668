"""`plinth import-deepspeed`: configs of DeepSpeed and accelerate become presets that load."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing import deepspeed_configs
from rl_runtime import SupervisedJobConfig
from rl_runtime.app.cli import run_job_cli
from rl_runtime.app.import_deepspeed import CONFIGS, app_entries, main, preset_text
from rl_runtime.job_config import JobConfig
from rl_runtime.resolve.resolved import ResolvedConfig
from rl_runtime.rules import value_of
from run_kit import load_config

ZERO_3, ZERO_2 = (deepspeed_configs.CONFIGS[f"document_zero{stage}"][0] for stage in (3, 2))


def changed(tree: dict[str, Any], **keys: Any) -> str:
    return yaml.safe_dump({**tree, "deepspeed_config": {**tree["deepspeed_config"], **keys}})


def with_file(name: str) -> dict[str, Any]:
    """accelerate's config beside a file of DeepSpeed's own."""
    keys = {"deepspeed_config_file": name, "zero3_init_flag": True}
    return {**{key: value for key, value in ZERO_2.items() if key != "mixed_precision"}, "deepspeed_config": keys}


JSON_FILE = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-6, "betas": [0.9, 0.95], "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "sub_group_size": 1e9,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "train_batch_size": 64,
    "steps_per_print": 2000,
    "flops_profiler": {"enabled": True},
}


def imported(folder: Path, tree: Any, app: Any = "grpo") -> Any:
    """The preset of a file, loaded; every key of the file is in it."""
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(tree))
    entries = app_entries(file, CONFIGS[app])
    preset = folder / "preset.yaml"
    preset.write_text(preset_text(entries, source=file.name))
    for entry in entries:
        assert f"{entry.theirs}: " in preset.read_text()
    return load_config(CONFIGS[app], presets=[preset])


def test_an_accelerate_file_of_zero_3_becomes_a_preset(tmp_path: Path) -> None:
    config = imported(tmp_path, ZERO_3)
    zero = config.actor.zero
    assert (zero.stage, zero.offload.optimizer, zero.offload.param) == (3, "cpu", "cpu")
    assert (zero.overlap_comm, zero.reduce_bucket_bytes) == (True, 10**9)
    assert zero.deepspeed == {"stage3_max_live_parameters": 5 * 10**8, "stage3_max_reuse_distance": 10**9}
    assert (config.actor.dtype, config.actor.optim.grad_clip) == ("float16", 1.0)
    assert (config.trainer.num_ranks, config.trainer.export_model) == (2, True)
    assert "# refused" not in (tmp_path / "preset.yaml").read_text()


def test_a_deepspeed_json_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(JSON_FILE))
    config = imported(tmp_path, with_file("ds.json"), "sft")
    zero = config.engine.zero
    assert (zero.stage, zero.offload.optimizer, zero.offload.param) == (3, "cpu", "none")
    assert zero.deepspeed == {"sub_group_size": 10**9}
    assert (config.micro_batch_size, config.supervised.batch_size) == (4, 64)
    assert (config.supervised.optim.lr, config.supervised.optim.betas) == (5e-6, (0.9, 0.95))
    assert (config.supervised.optim.schedule, config.supervised.optim.warmup_steps) == ("constant", 10)
    assert config.trainer.export_model
    refused = re.findall(r"^# refused: (\S+):", (tmp_path / "preset.yaml").read_text(), re.MULTILINE)
    assert refused == ["ds.json:flops_profiler"]


def test_several_machines_join_a_cluster(tmp_path: Path) -> None:
    config = imported(tmp_path, ZERO_2 | {"num_machines": 2})
    assert config.trainer.ray_address == "auto"


@pytest.mark.parametrize("app", ["grpo", "sft"])
@pytest.mark.parametrize("name", deepspeed_configs.CONFIGS)
def test_public_configs_become_presets_that_load(tmp_path: Path, name: str, app: str) -> None:
    tree, settings, refused = deepspeed_configs.CONFIGS[name]
    config = imported(tmp_path, tree, app)
    engine, optim = (config.engine, config.supervised.optim) if app == "sft" else (config.actor, config.actor.optim)
    assert engine.zero.stage == settings.get("zero.stage", engine.zero.stage)
    assert optim.lr == settings.get("optim.lr", optim.lr)
    assert config.trainer.num_ranks == tree.get("num_processes", config.trainer.num_ranks)
    shown = re.findall(r"^# refused: (\S+):", (tmp_path / "preset.yaml").read_text(), re.MULTILINE)
    counts_responses = app == "grpo" and isinstance(tree.get("train_batch_size"), int)
    assert sorted(shown) == sorted([*refused, *(["train_batch_size"] if counts_responses else [])])


CLI = {
    "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e8, "reduce_bucket_size": 1e8},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": "auto"}},
}


def started(config_cls: Any, *argv: str) -> tuple[Any, list[tuple[Any, str]]]:
    """The exit code of an app's command line, and the configuration and comment of its config.yaml."""
    seen: list[tuple[Any, str]] = []

    def app(config: Any) -> None:
        seen.append((config, ResolvedConfig(config=config).comment()))

    with pytest.raises(SystemExit) as ended:
        run_job_cli(
            config_cls,
            app,
            ["model.path=m", *argv, "trainer.device=cpu"],
        )
    return ended.value.code, seen


@pytest.mark.parametrize(
    ("config_cls", "section", "optim"),
    [(JobConfig, "actor", "actor.optim"), (SupervisedJobConfig, "engine", "supervised.optim")],
)
def test_an_app_takes_the_file_below_keys_of_the_command_line(
    tmp_path: Path, config_cls: Any, section: str, optim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CLI))
    data = {"actor": "data.train=[d]", "engine": "supervised.files=[d]"}[section]
    given = f"{data} {optim}.lr=2e-6 {section}.deepspeed={file}".split()
    code, [(config, comment)] = started(config_cls, *given)
    assert code == 0
    assert value_of(config, f"{section}.zero.stage") == 3
    assert value_of(config, f"{section}.zero.deepspeed") == {"stage3_max_live_parameters": 10**8}
    assert value_of(config, f"{optim}.lr") == 2e-6
    assert capsys.readouterr().err == f"{optim}.lr overrides optimizer.params.lr=1e-05 of {file}\n"
    assert comment.splitlines()[:2] == ["Given by files:", f"{section}.zero.stage=3: zero_optimization.stage of {file}"]
    assert f"{optim}.lr" not in comment
    assert started(config_cls, *given, "--print-config") == (0, [])
    printed = capsys.readouterr().out
    assert printed.startswith(f"# {section}.zero.stage: zero_optimization.stage of {file}\n")
    assert yaml.safe_load(printed)[section]["zero"]["stage"] == 3
    own = tmp_path / "own.yaml"
    own.write_text(f"{section}: {{zero: {{stage: 2}}}}\n")
    code, [(config, comment)] = started(config_cls, *given, f"config={own}")
    assert value_of(config, f"{section}.zero.stage") == 2
    assert value_of(config, f"{section}.zero.deepspeed") == {}, "DeepSpeed reads it at stage 3 only"
    assert f"{section}.zero.stage overrides" in capsys.readouterr().err


def test_an_app_refuses_keys_of_the_file_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    tree = {**CLI, "train_batch_size": 64, "zero_optimization": {"stage": 2, "zenflow": {}, "overlap_com": True}}
    file.write_text(json.dumps(tree))
    code, seen = started(JobConfig, f"actor.deepspeed={file}")
    assert (code, seen) == (2, [])
    printed = capsys.readouterr().err
    for text in (
        "train_batch_size: got 64",
        "set batch.mini_batch_size",
        "zenflow: got {}",
        "nearest: zero_optimization.overlap_comm",
    ):
        assert text in printed
    file.write_text(json.dumps({**CLI, "zero_optimization": {"stage": 4}}))
    assert started(JobConfig, f"actor.deepspeed={file}") == (2, [])
    printed = capsys.readouterr().err
    assert "actor.zero.stage: got 4" in printed
    assert f"(from actor.deepspeed={file})" in printed
    assert started(JobConfig, "actor.deepspeed=missing.json") == (2, [])
    assert "actor.deepspeed: got 'missing.json'" in capsys.readouterr().err
    file.write_text(json.dumps({**CLI, "train_batch_size": 64}))
    assert started(JobConfig, f"actor.deepspeed={file}", "batch.mini_batch_size=16")[0] == 0


@pytest.mark.parametrize("key", ["deepspeed", "actor.deepspeed", "critic.deepspeed"])
def test_the_key_of_another_program_or_app_names_that_of_this_one(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert started(SupervisedJobConfig, "supervised.files=[d]", f"{key}=ds.json") == (2, [])
    assert f"{key}: unknown key; nearest: engine.deepspeed " in capsys.readouterr().err


@given(
    stage=st.sampled_from([1, 2, 3]),
    optimizer=st.sampled_from(["none", "cpu"]),
    param=st.sampled_from(["none", "cpu"]),
    precision=st.sampled_from(["no", "fp16", "bf16"]),
    app=st.sampled_from(list(CONFIGS)),
)
@settings(deadline=None, derandomize=True, max_examples=12)
def test_all_answers_of_accelerate_config_load(
    tmp_path_factory: pytest.TempPathFactory, stage: int, optimizer: str, param: str, precision: str, app: str
) -> None:
    if stage == 3 and optimizer == "none":
        param = "none"  # our config refuses parameters that DeepSpeed steps on the CPU
    keys = {"zero_stage": stage, "offload_optimizer_device": optimizer, "offload_param_device": param}
    tree = {**ZERO_2, "mixed_precision": precision, "deepspeed_config": keys}
    config = imported(tmp_path_factory.mktemp("accelerate"), tree, app)
    engine = config.engine if isinstance(config, SupervisedJobConfig) else config.actor
    assert engine.zero.stage == stage
    assert engine.zero.offload.optimizer == optimizer
    assert engine.zero.offload.param == (param if stage == 3 else "none")
    assert engine.dtype == {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}[precision]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("distributed_type: FSDP\n", "distributed_type: got 'FSDP'"),
        ("a: 1\n", "no key"),
        (": :", "cannot be read"),
        ("- a\n", "cannot be read"),
        (yaml.safe_dump(with_file("missing.json")), "missing.json"),
        (changed(ZERO_3, offload_optimizer_device="none"), "offload.optimizer"),
        (changed(ZERO_2, zero_stage=4), "actor.zero.stage"),
        (changed(ZERO_2, zero_stage={}), "zero_optimization.stage"),
    ],
)
def test_files_that_cannot_be_converted_are_refused(
    tmp_path: Path, text: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.yaml").write_text(text)
    assert main([str(tmp_path / "file.yaml")]) == 2
    printed = capsys.readouterr()
    assert word in printed.err
    assert not printed.out


def test_the_command_prints_the_preset_and_names_refused_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.yaml").write_text(changed(ZERO_3, enable_msamp=True))
    assert main([str(tmp_path / "file.yaml")]) == 0
    printed = capsys.readouterr()
    assert "# mapped: deepspeed_config.zero_stage: 3: actor.zero.stage\n" in printed.out
    assert yaml.safe_load(printed.out)["actor"]["zero"]["stage"] == 3
    assert printed.err == "warning: the preset lacks deepspeed_config.enable_msamp; its comments say why\n"
    assert main([str(tmp_path / "file.yaml"), "dpo"]) == 0
    assert "\nengine:\n" in capsys.readouterr().out
