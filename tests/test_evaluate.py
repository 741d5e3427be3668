"""The evaluation app: models it selects, its files, its comparisons, and short runs on the real stack."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from apps.evaluate import evaluator
from apps.evaluate.checks import check
from apps.evaluate.config import CheckpointsConfig, EvaluateConfig
from apps.evaluate.evaluator import resolve_servers
from apps.evaluate.main import cli
from apps.evaluate.report import prompt_rows, write_results
from apps.evaluate.results import Evaluation, compare_all
from apps.evaluate.targets import find_targets
from apps.tables import tsv_text
from plinth_base import PlinthError
from plinth_testing import raises
from rl_data import DataConfig, build_tiny_model, write_task
from rl_runtime import InputError, ModelConfig, PromptResult, SampleResult
from rollout_vllm import RolloutConfig, RolloutConfigError, SamplingConfig, ServerGroup
from rollout_vllm.servers.device import detect_device
from run_kit import ConfigError, MetricsTable, RunFolderError, load_config

PRESETS = Path(__file__).resolve().parents[1] / "apps" / "evaluate" / "presets"


def prompt(name: str, marks: list[bool], *, votes: tuple[int, ...] | None = None, text: str = "1 + 1?") -> PromptResult:
    samples = (
        SampleResult(
            index=i,
            response=f"<b>{mark}</b> &\u2028so",
            score=float(mark),
            is_right=mark,
            finish_reason="stop",
            num_tokens=3,
        )
        for i, mark in enumerate(marks)
    )
    return PromptResult(
        prompt_id=name, prompt=text, ground_truth="2", data_source="gsm8k", samples=tuple(samples), votes=votes
    )


def evaluation(*prompts: PromptResult, name: str = "model", step: int | None = None) -> Evaluation:
    return Evaluation(name=name, step=step, num_samples=2, seconds=1.0, prompts=prompts)


CONFIG = EvaluateConfig(num_resamples=200, sampling=SamplingConfig(n=2))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["pass_at=[1,9]", "sampling.n=8"], "pass_at"),
        (["confidence=1.0"], "confidence"),
        (["num_resamples=0"], "num_resamples"),
        (["seed=-1"], "seed"),
        (["checkpoints.steps=[3]"], "checkpoints.folder"),
        (["checkpoints.folder=a", "checkpoints.steps=[3]", "checkpoints.newest=true"], "checkpoints.newest"),
        (["rollout.urls=[http://a:1]", "checkpoints.folder=a"], "checkpoints.folder"),
        (["data.train=[a.parquet]"], "data.train"),
        (["experiment='a b'"], "experiment"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(settings: list[str], key: str) -> None:
    with raises(ConfigError, field=key):
        load_config(EvaluateConfig, overrides=settings)


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_a_preset_is_that_of_the_training_run(preset: str) -> None:
    config = load_config(EvaluateConfig, presets=[PRESETS / f"{preset}.yaml"])
    from apps.grpo.config import GrpoConfig

    trained = load_config(GrpoConfig, presets=[PRESETS.parents[1] / "grpo" / "presets" / f"{preset}.yaml"])
    assert config.model == trained.model
    assert (config.data.val, config.data.max_prompt_length) == (trained.data.val, trained.data.max_prompt_length)
    assert config.sampling.response_tokens == trained.validation.response_tokens
    assert (config.reward.method, config.task, config.seed) == (
        trained.reward.method,
        trained.task,
        trained.trainer.seed,
    )


def test_servers_have_the_gpus_to_themselves() -> None:
    config = replace(CONFIG, rollout=RolloutConfig(tensor_parallel_size=2))
    chosen = resolve_servers(config, num_gpus=8).config.rollout
    assert (chosen.num_servers, chosen.gpu_memory_utilization, chosen.enforce_eager) == (4, 0.9, False)
    assert chosen.max_model_len == config.data.max_prompt_length + config.sampling.response_tokens
    on_cpu = resolve_servers(CONFIG, num_gpus=0).config.rollout
    assert (on_cpu.num_servers, on_cpu.gpu_memory_utilization, on_cpu.enforce_eager) == (1, None, None)
    with raises(InputError, field="rollout.num_servers", value=4):
        resolve_servers(replace(config, rollout=replace(config.rollout, num_servers=4)), num_gpus=2)


ACTOR = "actor: {dtype: float16, lora: {rank: 4, alpha: 8, rslora: true, base_format: plain}}\n"


def run_folder(path: Path, *steps: int, model: str = "builtin:tiny", val: str = "[]", engine: str = ACTOR) -> Path:
    for step in steps:
        (path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (path / "config.yaml").write_text(f"model: {{path: '{model}'}}\ndata: {{val: {val}}}\n{engine}")
    return path


def sweep(folder: Path, **settings: Any) -> EvaluateConfig:
    return EvaluateConfig(checkpoints=CheckpointsConfig(folder=str(folder), **settings))


def test_the_checkpoints_of_a_run_come_with_its_model_and_prompts(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 3, 20)
    (run / "task").mkdir()
    (run / "task" / "val.parquet").touch()
    config, targets, notes = find_targets(sweep(run))
    assert [(target.name, target.step) for target in targets] == [("step_00000003", 3), ("step_00000020", 20)]
    assert config.model.path == str(run / "initial_model")
    assert config.data.val == (str(run / "task" / "val.parquet"),)
    assert len(notes) == 2
    (run / "warm_start_model").mkdir()
    assert find_targets(sweep(run))[0].model.path == str(run / "warm_start_model")
    assert [target.step for target in find_targets(sweep(run, newest=True))[1]] == [20]
    assert [target.step for target in find_targets(sweep(run, steps=(20, 3)))[1]] == [3, 20]
    with raises(InputError, field="checkpoints.steps"):
        find_targets(sweep(run, steps=(3, 7)))
    with raises(InputError, field="model.path"):
        find_targets(EvaluateConfig(model=ModelConfig(path=str(run))))


def test_model_and_prompts_of_the_user_are_not_taken_from_the_run(tmp_path: Path) -> None:
    run = run_folder(tmp_path, 1, model="/models/a", val="[a.parquet, b.parquet]")
    assert find_targets(sweep(run))[0].data.val == ("a.parquet", "b.parquet")
    given = replace(sweep(run), model=ModelConfig(path="/models/b"), data=DataConfig(val=("c.parquet",)))
    config, _, notes = find_targets(given)
    assert (config, notes) == (given, [])


@pytest.mark.parametrize("section", ["actor", "engine"])
def test_adapters_are_merged_into_the_base_that_the_run_computed_with(tmp_path: Path, section: str) -> None:
    engine = ACTOR.replace("actor", section)
    (plain,) = find_targets(sweep(run_folder(tmp_path / "plain", 1, engine=engine)))[1]
    assert (plain.lora, plain.nf4) == ({"lora_alpha": 8, "use_rslora": True}, None)
    run = run_folder(tmp_path / "nf4", 1, engine=engine.replace("plain", "nf4"))
    nf4 = find_targets(sweep(run))[1][0].nf4
    assert nf4 is not None
    assert nf4.model_dtype == "float16"
    (full,) = find_targets(sweep(run_folder(tmp_path / "full", 1, engine=f"{section}: {{lora: null}}\n")))[1]
    assert (full.lora, full.nf4) == (None, None)


@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_folders_that_are_no_runs_are_refused(tmp_path: Path, has_checkpoints: bool) -> None:
    if has_checkpoints:
        (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    else:
        build_tiny_model(tmp_path / "checkpoint-20")
    with raises(InputError, field="checkpoints.folder", value=str(tmp_path)):
        find_targets(sweep(tmp_path))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (EvaluateConfig(model=ModelConfig(path="/models/a")), "data.val"),
        (EvaluateConfig(rollout=RolloutConfig(urls=("http://127.0.0.1:9",))), "model.path"),
        (
            EvaluateConfig(sampling=SamplingConfig(n=1), rollout=RolloutConfig(max_model_len=100)),
            "rollout.max_model_len",
        ),
        (EvaluateConfig(rollout=RolloutConfig(api_key_file="~nobody-here/key")), "rollout.api_key_file"),
    ],
)
def test_inputs_that_cannot_work_are_refused_before_anything_starts(config: EvaluateConfig, key: str) -> None:
    with raises(PlinthError, field=key):
        check(config)


def test_vllm_built_for_another_device_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the CUDA image on a host without a GPU; here with the build that is installed."""
    gpus = ["0"] if detect_device()[0] == "cpu" else []
    monkeypatch.setattr(evaluator, "visible_gpus", lambda: gpus)
    with raises(RolloutConfigError, field="rollout.urls"):
        check(load_config(EvaluateConfig, presets=[PRESETS / "demo.yaml"]))


def test_lengths_that_exceed_the_models_context_are_named_by_their_keys(tmp_path: Path) -> None:
    config = EvaluateConfig(model=ModelConfig(path=str(build_tiny_model(tmp_path / "model"))))
    task = write_task(tmp_path / "task", num_train=1, num_val=1, num_demonstrations=1)
    with raises(InputError, field="data.max_prompt_length, sampling.max_tokens"):
        check(replace(config, data=DataConfig(val=(str(task.val),))))


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match="bytes are free"):
        evaluation(prompt("a", [True])).append_to(tmp_path)


def test_the_tsv_has_a_row_for_each_prompt_and_number_of_samples() -> None:
    one = evaluation(prompt("a", [True, False], votes=(0, 1)), prompt("b", [True]), prompt("c", []), step=4)
    rows = list(csv.DictReader(tsv_text(prompt_rows(one, CONFIG)).splitlines(), delimiter="\t"))
    assert [(row["prompt_id"], row["k"], row["pass_at_k"], row["num_failed"]) for row in rows] == [
        ("a", "1", "0.5", "0"),
        ("a", "2", "1", "0"),
        ("b", "1", "1", "1"),
        ("b", "2", "", "1"),  # one sample failed: there is no pass@2, not 0
        ("c", "1", "", "2"),
        ("c", "2", "", "2"),
    ]
    assert [row["majority"] for row in rows[:2]] == ["0.5", "0.5"]
    assert {(row["model"], row["step"]) for row in rows} == {("model", "4")}


def test_a_comparison_pairs_the_prompts_and_counts_flips_both_ways() -> None:
    marks = [([True, True], [True, False]), ([False, False], [True, True]), ([True, False], [True, False])]
    before = evaluation(*(prompt(str(i), one) for i, (one, _) in enumerate(marks)), prompt("d", []), name="a")
    after = evaluation(*(prompt(str(i), one) for i, (_, one) in enumerate(marks)), prompt("d", [True, True]), name="b")
    one, same = compare_all([before, after, before], CONFIG)
    assert (one.baseline, one.other, one.num_gains, one.num_losses) == ("a", "b", 1, 1)
    assert one.differences["pass@1"].mean == pytest.approx((-0.5 + 1.0 + 0.0) / 3)
    assert one.differences["pass@1"].num_values == 3
    assert (same.num_gains, same.num_losses) == (0, 0)
    assert all((d.mean, d.low, d.high) == (0, 0, 0) for d in same.differences.values())


def test_page_and_summary_compare_the_models(tmp_path: Path) -> None:
    before = evaluation(prompt("a", [True, True]), prompt("b", [False, False]), name="step_1", step=1)
    after = evaluation(prompt("a", [False, False]), prompt("b", [True, False]), name="step_2", step=2)
    config = replace(CONFIG, rollout=RolloutConfig(api_key="hidden-key"))
    write_results(tmp_path, config, [before, after])
    text = (tmp_path / "report.html").read_text()
    assert "<b>True</b>" not in text, "responses are text, not markup"
    assert "-0.250 [" in text
    assert not any("hidden-key" in path.read_text() for path in tmp_path.iterdir())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [model["label"] for model in summary["models"]] == ["step_1", "step_2"]
    assert summary["models"][0]["metrics"]["pass@1"]["mean"] == 0.5
    assert (summary["comparisons"][0]["num_gains"], summary["comparisons"][0]["num_losses"]) == (1, 1)
    assert summary["comparisons"][0]["differences"]["pass@1"]["mean"] == -0.25
    assert summary["versions"]["python"]
    assert summary["settings"]["seed"] == 1


def responses(folder: Path, name: str) -> list[str]:
    records = map(json.loads, (folder / "samples.jsonl").open())
    return [sample["response"] for record in records if record["name"] == name for sample in record["samples"]]


def evaluated(folder: Path, *settings: str) -> tuple[object, Path]:
    """Exit code and folder of an evaluation."""
    with pytest.raises(SystemExit) as ended:
        cli(argv=["preset=demo", f"output_dir={folder}", "num_resamples=100", *settings])
    (run,) = folder.iterdir()
    return ended.value.code, run


def assert_last_checkpoint_is_exported_model(run: Path, folder: Path) -> None:
    """The last checkpoint, with adapters merged, is for servers the model that the run exported."""
    config, targets, _ = find_targets(sweep(run))
    with targets[-1].open(config, folder) as merged:
        assert merged is not None
        ours, of_run = (load_file(one / "model.safetensors") for one in (merged, run / "model"))
    assert ours.keys() == of_run.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor, of_run[name], atol=1e-6, err_msg=name)


@pytest.mark.e2e
@pytest.mark.thorough
def test_an_environment_scores_the_model_of_a_running_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = build_tiny_model(tmp_path / "model", seed=1)
    task = write_task(tmp_path / "task", kind="stones", num_train=1, num_val=8, num_demonstrations=1)
    rollout = RolloutConfig(dtype="float32", max_model_len=128, kv_cache_gib=0.1, cpu_threads=1, api_key="secret-key")
    with ServerGroup.launch(model, rollout, log_dir=tmp_path / "servers") as servers:
        servers.wait_ready()
        (tmp_path / "key").write_text("secret-key")
        settings = [f"rollout.urls=[{servers.endpoints[0].url}]", f"rollout.api_key_file={tmp_path / 'key'}"]
        settings += [f"model.path={model}", f"data.val={task.val}", "episode.environment=apps.grpo.stones:StoneGame"]
        code, run = evaluated(tmp_path / "out", *settings, "sampling.max_tokens=64", "sampling.n=2")
    assert code == 0, capfd.readouterr().out
    (one,) = json.loads((run / "summary.json").read_text())["models"]
    assert (one["label"], one["num_samples"], one["num_failed"]) == ("servers", 16, 0)
    assert set(one["metrics"]) == {"pass@1", "pass@2", "mean@2"}, "a game has no answer to vote on"
    assert not any("secret-key" in path.read_text() for path in run.glob("*.*"))


@pytest.mark.e2e
@pytest.mark.thorough
def test_checkpoints_of_a_run_on_an_nf4_base_are_the_models_that_it_trained(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    sizes = ("trainer.total_training_steps=2", "task.num_val=16", "warm_start.steps=0", "validation.n=2")
    adapters = ("actor.lora.rank=4", "actor.lora.alpha=16", "actor.lora.base_format=nf4", "actor.optim.lr=1e-2")
    app = start_app(tmp_path / "trained", *sizes, *adapters, "trainer.save_freq=1", "trainer.val_after_train=false")
    run = app.succeeded()
    assert MetricsTable(run / "metrics.tsv").series("val/pass@2")[0] == [0], "the validation before the first step"
    assert_last_checkpoint_is_exported_model(run, tmp_path)
