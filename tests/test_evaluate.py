"""The evaluation app: which models it finds, its table, its comparisons, and a sweep with a real server."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from apps.evaluate import evaluator
from apps.evaluate.checks import check
from apps.evaluate.comparison import Comparison, compare_all
from apps.evaluate.config import CheckpointsConfig, EvaluateConfig
from apps.evaluate.evaluator import resolve_servers
from apps.evaluate.main import cli
from apps.evaluate.report import results_tsv, write_results
from apps.evaluate.results import Evaluation, check_same_settings, in_order, load_compared, load_evaluations
from apps.evaluate.targets import Target, find_targets, is_missing
from plinth_testing import raises
from rl_data import DataConfig, build_tiny_model, write_task
from rl_runtime import InputError, ModelConfig, PlacementError, PromptResult, SampleResult
from rl_runtime.rollout.scoring_config import ScoringConfig
from rollout_vllm import RolloutConfig, RolloutConfigError, SamplingConfig, ServerGroup
from rollout_vllm.servers.device import detect_device
from run_kit import ConfigError, MetricsTable, load_config, to_yaml
from run_kit.cluster.slurm import submission
from run_kit.runs import list_runs

PRESETS = Path(__file__).resolve().parents[1] / "apps" / "evaluate" / "presets"


def prompt(name: str, marks: list[bool], *, votes: list[int] | None = None, text: str = "1 + 1?") -> PromptResult:
    samples = [
        SampleResult(
            index=i,
            response=f"<b>{mark}</b> & so",
            score=float(mark),
            is_right=mark,
            finish_reason="stop",
            num_tokens=3,
        )
        for i, mark in enumerate(marks)
    ]
    return PromptResult(
        prompt_id=name,
        prompt=text,
        ground_truth="2",
        data_source="gsm8k",
        samples=tuple(samples),
        votes=None if votes is None else tuple(votes),
        failures=(),
    )


def evaluation(*prompts: PromptResult, name: str = "model", step: int | None = None, n: int = 2) -> Evaluation:
    return Evaluation(
        name=name, step=step, source="/models/m", digest="0" * 64, num_samples=n, seconds=1.0, prompts=prompts
    )


CONFIG = EvaluateConfig(num_resamples=200, sampling=SamplingConfig(n=2))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["pass_at=[1,9]", "sampling.n=8"], "pass_at"),
        (["confidence=1.0"], "confidence"),
        (["num_resamples=0"], "num_resamples"),
        (["seed=-1"], "seed"),
        (["checkpoints.steps=[3]"], "checkpoints"),
        (["checkpoints.folder=a", "checkpoints.steps=[3]", "checkpoints.newest=true"], "newest"),
        (["rollout.urls=[http://a:1]", "checkpoints.folder=a"], "checkpoints.folder"),
        (["only_compare=true"], "only_compare"),
        (["resume_from=a"], "resume_from"),
        (["data.train=[a.parquet]"], "data.train"),
        (["experiment='a b'"], "experiment"),
        (["sampling.temperature=0", "sampling.n=2"], "sampling"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(settings: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config(EvaluateConfig, overrides=settings)


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_a_preset_is_that_of_the_training_run(preset: str) -> None:
    config = load_config(EvaluateConfig, presets=[PRESETS / f"{preset}.yaml"])
    from apps.grpo.config import GrpoConfig

    trained = load_config(GrpoConfig, presets=[PRESETS.parents[1] / "grpo" / "presets" / f"{preset}.yaml"])
    assert config.model == trained.model
    assert (config.data.val, config.data.max_prompt_length) == (trained.data.val, trained.data.max_prompt_length)
    assert config.sampling.max_tokens == trained.validation.max_tokens
    assert (config.reward.method, config.task, config.seed) == (
        trained.reward.method,
        trained.task,
        trained.trainer.seed,
    )


def test_a_slurm_job_finds_the_keys_by_which_it_resumes() -> None:
    assert submission(["evaluate"])[-2:] == ["resume=auto", "experiment=evaluate_demo-@JOB_ID@"]


def test_servers_have_the_gpus_to_themselves() -> None:
    config = replace(CONFIG, rollout=RolloutConfig(tensor_parallel_size=2))
    chosen = resolve_servers(config, num_gpus=8).config.rollout
    assert (chosen.num_servers, chosen.gpu_memory_utilization, chosen.enforce_eager) == (4, 0.9, False)
    assert chosen.max_model_len == config.data.max_prompt_length + config.sampling.max_tokens
    on_cpu = resolve_servers(CONFIG, num_gpus=0).config.rollout
    assert (on_cpu.num_servers, on_cpu.gpu_memory_utilization, on_cpu.enforce_eager) == (1, None, None)
    with pytest.raises(PlacementError):
        resolve_servers(replace(config, rollout=replace(config.rollout, num_servers=4)), num_gpus=2)


def run_folder(path: Path, *steps: int, config: str = "model: {path: 'builtin:tiny'}\n") -> Path:
    for step in steps:
        (path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (path / "config.yaml").write_text(config)
    return path


def sweep(folder: Path, **settings: Any) -> EvaluateConfig:
    return EvaluateConfig(checkpoints=CheckpointsConfig(folder=str(folder), **settings))


def refused_field(config: EvaluateConfig) -> str | None:
    """The key of the error for which no models are found."""
    with pytest.raises(InputError) as caught:
        find_targets(config)
    return caught.value.field


def test_the_checkpoints_of_a_run_come_with_its_model_and_prompts(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 3, 20)
    (run / "task").mkdir()
    (run / "task" / "val.parquet").touch()
    for given in (run, run / "checkpoints"):
        found = find_targets(sweep(given))
        assert [(target.name, target.step) for target in found.targets] == [("step_00000003", 3), ("step_00000020", 20)]
        assert found.config.model.path == str(run / "initial_model")
        assert found.config.data.val == (str(run / "task" / "val.parquet"),)
        assert len(found.notes) == 2
    (run / "warm_start_model").mkdir()
    assert find_targets(sweep(run)).config.model.path == str(run / "warm_start_model")
    assert [target.step for target in find_targets(sweep(run, newest=True)).targets] == [20]
    assert [target.step for target in find_targets(sweep(run, steps=(20, 3))).targets] == [3, 20]
    assert refused_field(sweep(run, steps=(3, 7))) == "checkpoints.steps"
    assert refused_field(EvaluateConfig(model=ModelConfig(path=str(run)))) == "model.path"


def test_what_the_user_gives_is_not_taken_from_the_run(tmp_path: Path) -> None:
    run = run_folder(tmp_path, 1, config="model: {path: /models/a}\ndata: {val: [a.parquet, b.parquet]}\n")
    assert find_targets(sweep(run)).config.data.val == ("a.parquet", "b.parquet")
    given = replace(sweep(run), model=ModelConfig(path="/models/b"), data=DataConfig(val=("c.parquet",)))
    found = find_targets(given)
    assert (found.config, found.notes) == (given, ())


def test_a_run_with_adapters_knows_how_to_merge_them_or_says_why_not(tmp_path: Path) -> None:
    plain = "model: {path: /models/a}\nactor: {lora: {rank: 4, alpha: 8, rslora: true, base_format: FORMAT}}\n"
    run = run_folder(tmp_path, 1, config=plain.replace("FORMAT", "plain"))
    assert find_targets(sweep(run)).targets[0].lora == {"lora_alpha": 8, "use_rslora": True}
    (run / "config.yaml").write_text(plain.replace("FORMAT", "plain").replace("actor", "engine"))
    assert find_targets(sweep(run)).targets[0].lora is not None
    assert find_targets(sweep(run)).targets[0].nf4 is None
    (run / "config.yaml").write_text(plain.replace("FORMAT", "nf4"))
    assert refused_field(sweep(run)) == "checkpoints.folder"
    (run / "config.yaml").write_text(plain.replace("FORMAT", "nf4").replace("actor: {", "actor: {dtype: float16, "))
    nf4 = find_targets(sweep(run)).targets[0].nf4
    assert nf4 is not None
    assert nf4.model_dtype == "float16"


def test_folders_of_checkpoints_are_found_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (100, 20):
        build_tiny_model(tmp_path / f"checkpoint-{step}", seed=step)
    found = find_targets(sweep(tmp_path))
    assert [(target.name, target.kind) for target in found.targets] == [
        ("checkpoint-20", "folder"),
        ("checkpoint-100", "folder"),
    ]
    assert found.config.model.path == str(tmp_path / "checkpoint-100")
    digests = [target.digest() for target in found.targets]
    assert len(set(digests)) == 2
    assert digests == [target.digest() for target in find_targets(sweep(tmp_path)).targets]
    (tmp_path / "checkpoint-20" / "tokenizer.json").write_text("{}")
    assert refused_field(sweep(tmp_path)) == "checkpoints.folder"
    (tmp_path / "checkpoint-20" / "model.safetensors").unlink()
    with pytest.raises(InputError, match="checkpoint-20"):
        find_targets(sweep(tmp_path))


def test_an_adapter_needs_its_base_model(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "adapter_config.json").write_text("{}")
    assert refused_field(sweep(tmp_path)) == "model.path"
    given = replace(sweep(tmp_path), model=ModelConfig(path="/models/a"))
    assert find_targets(given).targets[0].kind == "adapter"


def test_folders_without_checkpoints_are_refused(tmp_path: Path) -> None:
    assert refused_field(sweep(tmp_path)) == refused_field(sweep(tmp_path / "nowhere")) == "checkpoints.folder"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (EvaluateConfig(model=ModelConfig(path="/models/a")), "data.val"),
        (EvaluateConfig(rollout=RolloutConfig(urls=("http://127.0.0.1:9",))), "model.path"),
        (EvaluateConfig(compare=("nowhere",), only_compare=True), "compare"),
        (EvaluateConfig(reward=ScoringConfig(function="nowhere:f")), "reward.function"),
        (EvaluateConfig(sampling=SamplingConfig(n=1), rollout=RolloutConfig(max_model_len=100)), "max_model_len"),
        (EvaluateConfig(rollout=RolloutConfig(api_key_file="~nobody-here/key")), "rollout.api_key_file"),
    ],
)
def test_inputs_that_cannot_work_are_refused_before_anything_starts(config: EvaluateConfig, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        check(config)


def test_vllm_built_for_another_device_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the CUDA image on a host without a GPU; here with the build that is installed."""
    gpus = ["0"] if detect_device()[0] == "cpu" else []
    monkeypatch.setattr(evaluator, "visible_gpus", lambda: gpus)
    with raises(RolloutConfigError, field="rollout.urls"):
        check(CONFIG)


def test_lengths_that_exceed_the_models_context_are_named_by_their_keys(tmp_path: Path) -> None:
    config = EvaluateConfig(model=ModelConfig(path=str(build_tiny_model(tmp_path / "model"))))
    task = write_task(tmp_path / "task", num_train=1, num_val=1, num_demonstrations=1)
    with raises(InputError, field="data.max_prompt_length, sampling.max_tokens"):
        check(replace(config, data=DataConfig(val=(str(task.val),))))


def test_a_table_keeps_its_models_until_their_files_change(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "checkpoint-1", seed=1)
    target = Target(name="checkpoint-1", step=1, kind="folder", path=tmp_path / "checkpoint-1")
    assert is_missing(target, load_evaluations(tmp_path))
    first = replace(evaluation(prompt("a", [True, False], votes=[0, 1])), name=target.name, digest=target.digest())
    first.save(tmp_path)
    assert load_evaluations(tmp_path) == {target.name: first}
    assert not is_missing(target, load_evaluations(tmp_path))
    (tmp_path / "checkpoint-1" / "config.json").write_text("{}")
    assert is_missing(target, load_evaluations(tmp_path))
    (tmp_path / "models" / "checkpoint-1" / "model.json").unlink()  # as a process that was killed leaves it
    assert load_evaluations(tmp_path) == {}


def test_malformed_results_are_an_error_with_their_folder(tmp_path: Path) -> None:
    evaluation(prompt("a", [True])).save(tmp_path)
    (tmp_path / "models" / "model" / "samples.jsonl").write_text('{"prompt_id": 1}\n')
    with pytest.raises(InputError, match="models/model"):
        load_evaluations(tmp_path)


def test_a_table_is_continued_with_the_same_settings_only(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(CONFIG))
    check_same_settings(replace(CONFIG, resume="auto", num_resamples=7, compare=("x",)), tmp_path)
    for changed, key in (
        (replace(CONFIG, sampling=SamplingConfig(n=3)), "sampling.n"),
        (replace(CONFIG, seed=5), "seed"),
        (replace(CONFIG, reward=ScoringConfig(method="flexible")), "reward.method"),
    ):
        with raises(InputError, field=key):
            check_same_settings(changed, tmp_path)
    with raises(InputError, field="resume_from"):
        check_same_settings(CONFIG, tmp_path / "nowhere")


def test_two_folders_of_one_name_cannot_be_compared(tmp_path: Path) -> None:
    evaluation(prompt("a", [True])).save(tmp_path)
    with raises(InputError, field="compare"):
        load_compared(replace(CONFIG, compare=(str(tmp_path), str(tmp_path))))


def test_the_tsv_has_a_row_for_each_prompt_and_number_of_samples() -> None:
    found = evaluation(prompt("a", [True, False], votes=[0, 1]), prompt("b", [True]), prompt("c", []), step=4)
    rows = list(csv.DictReader(results_tsv(in_order([found]), CONFIG).splitlines(), delimiter="\t"))
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


def compared(before: Evaluation, after: Evaluation) -> Comparison:
    (found,) = compare_all({"before": before, "after": after}, CONFIG)
    return found


def test_a_comparison_pairs_the_prompts_and_counts_flips_both_ways() -> None:
    before = evaluation(
        prompt("a", [True, True]),
        prompt("b", [False, False]),
        prompt("c", [True, False], text="old template"),
        prompt("d", []),
        prompt("e", [True, True]),
    )
    after = evaluation(
        prompt("d", [True, True]),
        prompt("c", [True, False], text="new template"),
        prompt("b", [True, True]),
        prompt("a", [True, False]),
        prompt("f", [True, True]),
    )
    found = compared(before, after)
    flips = {"num_gains": 1, "num_losses": 1}
    assert found.counts == {
        **flips,
        "num_prompts": 4,
        "num_unmatched": 2,
        "num_other_text": 1,
        "num_unscored": 1,
    }
    assert found.differences["pass@1"].mean == pytest.approx((-0.5 + 1.0 + 0.0) / 3)
    assert found.differences["pass@1"].num_values == 3


def test_a_model_compared_with_itself_has_no_difference_and_one_without_common_prompts_no_value() -> None:
    one = evaluation(*(prompt(str(i), [i % 2 == 0, i % 3 == 0]) for i in range(20)))
    same = compared(one, one)
    assert (same.counts["num_gains"], same.counts["num_losses"]) == (0, 0)
    assert all((d.mean, d.low, d.high) == (0, 0, 0) for d in same.differences.values())
    assert compared(one, evaluation(prompt("other", [True]))).differences == {}


def test_page_and_summary_compare_the_models(tmp_path: Path) -> None:
    before = evaluation(prompt("a", [True, True]), prompt("b", [False, False]), name="step_1", step=1)
    after = evaluation(prompt("a", [False, False]), prompt("b", [True, False]), name="step_2", step=2)
    found = write_results(
        tmp_path, replace(CONFIG, rollout=RolloutConfig(api_key="hidden-key")), in_order([before, after]), {}
    )
    assert found["step_1"]["pass@2"].mean == 0.5
    text = (tmp_path / "report.html").read_text()
    assert "<b>True</b>" not in text, "responses are text, not markup"
    assert ">Differences</h2>" in text
    assert "Over the steps" in text
    assert not any("hidden-key" in path.read_text() for path in tmp_path.iterdir())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [model["label"] for model in summary["models"]] == ["step_1", "step_2"]
    assert summary["models"][0]["metrics"]["pass@1"]["mean"] == 0.5
    assert (summary["comparisons"][0]["num_gains"], summary["comparisons"][0]["num_losses"]) == (1, 1)
    assert summary["comparisons"][0]["differences"]["pass@1"]["mean"] == -0.25
    assert summary["versions"]["python"]
    assert summary["settings"]["seed"] == 1


def test_earlier_evaluations_are_compared_without_servers(tmp_path: Path) -> None:
    for name, mark in (("one", True), ("two", False)):
        evaluation(prompt("a", [mark, mark]), prompt("b", [True, False])).save(tmp_path / name)
    with pytest.raises(SystemExit) as ended:
        cli([f"compare=[{tmp_path / 'one'},{tmp_path / 'two'}]", "only_compare=true", f"output_dir={tmp_path / 'out'}"])
    assert ended.value.code == 0
    (run,) = list_runs(tmp_path / "out")
    assert run.state == "finished"
    text = (tmp_path / "out" / run.name / "report.html").read_text()
    assert "two/model" in text


def responses(folder: Path, name: str) -> list[str]:
    lines = (folder / "models" / name / "samples.jsonl").read_text().splitlines()
    return [sample["response"] for line in lines for sample in json.loads(line)["samples"]]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.e2e
def test_a_sweep_pushes_every_checkpoint_to_one_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints-of-a-trainer"
    for step in (1, 2):
        build_tiny_model(folder / f"checkpoint-{step}", seed=step)
    build_tiny_model(folder / "checkpoint-3", seed=3, num_layers=1)  # does not fit the others' server
    shutil.copytree(folder / "checkpoint-1", folder / "checkpoint-4")
    task = write_task(tmp_path / "task", num_train=1, num_val=12, num_demonstrations=1)
    settings = ["preset=demo", f"checkpoints.folder={folder}", f"data.val={task.val}", "sampling.n=3"]
    settings += [f"output_dir={tmp_path / 'out'}", "num_resamples=100"]
    with pytest.raises(SystemExit) as ended:
        cli(settings)
    printed = capfd.readouterr().out
    assert ended.value.code == 1, printed
    assert re.search(r"failed: checkpoint-3: .*model\.layers\.1\.", printed), printed
    (run,) = (tmp_path / "out").iterdir()
    assert len(list((run / "servers").iterdir())) == 1
    assert not list(run.glob("export_*"))
    first, second, last = (responses(run, f"checkpoint-{step}") for step in (1, 2, 4))
    assert len(first) == len(second) == len(last) == 36
    # The same seeds and weights: only rounding could differ between a started server and a pushed model.
    assert np.mean([one == other for one, other in zip(first, last, strict=True)]) > 0.9
    assert np.mean([one == other for one, other in zip(first, second, strict=True)]) < 0.3
    summary = json.loads((run / "summary.json").read_text())
    digests = [model["digest"] for model in summary["models"]]
    assert digests[0] == digests[2] != digests[1]
    assert {model["num_failed"] for model in summary["models"]} == {0}
    assert set(summary["models"][0]["metrics"]) == {"pass@1", "pass@2", "pass@3", "mean@3", "maj@3"}

    shutil.rmtree(folder / "checkpoint-3")
    with pytest.raises(SystemExit) as ended:
        cli([*settings, "resume=auto"])
    printed = capfd.readouterr().out
    assert ended.value.code == 0, printed
    assert "already in the table: checkpoint-1, checkpoint-2, checkpoint-4" in printed
    assert len(list((tmp_path / "out").iterdir())) == 1


@pytest.mark.slow
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
        settings += ["data.max_prompt_length=48", "sampling.max_tokens=64", "sampling.n=2"]
        with pytest.raises(SystemExit) as ended:
            cli([*settings, f"output_dir={tmp_path / 'out'}"])
    assert ended.value.code == 0, capfd.readouterr().out
    (run,) = (tmp_path / "out").iterdir()
    (found,) = json.loads((run / "summary.json").read_text())["models"]
    assert (found["label"], found["digest"], found["num_samples"], found["num_failed"]) == ("servers", None, 16, 0)
    assert set(found["metrics"]) == {"pass@1", "pass@2", "mean@2"}, "a game has no answer to vote on"
    assert not any("secret-key" in path.read_text() for path in run.glob("*.*"))


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.parametrize("base_format", ["plain", "nf4"])
def test_checkpoints_of_a_run_with_adapters_are_the_models_that_it_trained(
    tmp_path: Path, start_app: Callable[..., Any], capfd: pytest.CaptureFixture[str], base_format: str
) -> None:
    trained = start_app(
        tmp_path / "trained",
        *("trainer.total_training_steps=2", "trainer.save_freq=1", "task.num_val=16", "warm_start.steps=0"),
        *("validation.n=2", "trainer.val_after_train=false"),
        *("actor.lora.rank=4", "actor.lora.alpha=16", "actor.optim.lr=1e-2"),
        f"actor.lora.base_format={base_format}",
        *("reward.terms.brief.function=length", "reward.terms.brief.options.target=10"),
    )
    assert trained.finish() == 0, trained.output
    (run,) = (tmp_path / "trained").iterdir()
    assert MetricsTable(run / "metrics.tsv").series("val/pass@2")[0] == [0], "the validation before the first step"
    settings = ["preset=demo", "task.num_val=16", "sampling.n=1", "sampling.temperature=0"]
    for name, source in (
        ("checkpoints", [f"checkpoints.folder={run}"]),
        ("exported", [f"model.path={run / 'model'}", f"data.val={run / 'task' / 'val.parquet'}"]),
    ):
        with pytest.raises(SystemExit) as ended:
            cli([*settings, *source, f"output_dir={tmp_path / name}"])
        assert ended.value.code == 0, capfd.readouterr().out
    (checkpoints,), (exported,) = (tmp_path / "checkpoints").iterdir(), (tmp_path / "exported").iterdir()
    first, second = (responses(checkpoints, f"step_0000000{step}") for step in (1, 2))
    last = responses(exported, "model")
    assert len(last) == 16
    assert np.mean([one == other for one, other in zip(second, last, strict=True)]) > 0.9
    assert first != second
    with find_targets(sweep(run)).targets[-1].open(find_targets(sweep(run)).config, tmp_path) as merged:
        ours, of_run = (load_file(folder / "model.safetensors") for folder in (merged, run / "model"))
    assert ours.keys() == of_run.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor, of_run[name], atol=1e-6, err_msg=name)
