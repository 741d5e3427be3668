"""benchmarks/: the plans' commands and keys are accepted, and logs and metrics are read as they are written."""

import argparse
import importlib
import json
import math
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from apps.bench.config import SixCaseConfig, StageGateConfig
from apps.distill.config import DistillConfig
from apps.grpo.config import GrpoConfig
from apps.sft.config import SftConfig
from benchmarks.distill_step import compare as distill_step
from benchmarks.flops import training_mfu
from benchmarks.grpo_step import workload
from benchmarks.grpo_step.cases import Result, mfu, planned_gib
from benchmarks.random_model import CONFIGS
from benchmarks.reliability.run import command as bench_command
from benchmarks.runs import Run, first_step_s, run_folder
from benchmarks.scaling.run import COLUMNS
from benchmarks.session.plan import PLANS, read_plan
from benchmarks.sft_step import compare as sft_step
from benchmarks.small_cards.run import PRESETS, keys
from ds_engine import ModelShape
from run_kit import MetricsTable, load_config

APPS = Path(__file__).resolve().parents[1] / "apps"


class Parsed(Exception):
    def __init__(self, known: argparse.Namespace, extra: list[str]) -> None:
        self.known, self.extra = known, extra


def parsed(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, argparse.Namespace, list[str]]:
    """The module of a command `python -m …`, and what its argument parser makes of the rest."""
    assert words[:2] == ["python", "-m"]
    at = max(index for index, word in enumerate(words) if word == "-m") + 1  # behind torch's launcher
    module, parse_known_args = words[at], argparse.ArgumentParser.parse_known_args

    def stop(self: Any, args: Any = None, namespace: Any = None) -> Any:
        raise Parsed(*parse_known_args(self, words[at + 1 :]))

    def stop_strictly(self: Any, args: Any = None, namespace: Any = None) -> Any:
        known, extra = parse_known_args(self, words[at + 1 :])
        assert not extra, f"{module} has no arguments {extra}"
        raise Parsed(known, extra)

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        patched.setattr(argparse.ArgumentParser, "parse_args", stop_strictly)
        patched.setattr(sys, "argv", [module])
        try:
            importlib.import_module(module).main()
        except Parsed as result:
            return module, result.known, result.extra
        except SystemExit as error:
            raise AssertionError(f"{shlex.join(words)} is refused") from error
    raise AssertionError(f"{module} parses no arguments")


def check_keys(module: str, known: argparse.Namespace, extra: list[str], folder: Path) -> None:
    """Loads the configuration of every run that the command starts; raises ConfigError for an unknown key."""
    if module.endswith(("scaling.run", "staleness.run", "memory_turns.run")):
        for case in map(importlib.import_module(module).CASES.get, known.cases):
            own = workload.settings(folder, known.steps, num_prompts=case.num_prompts)
            config = load_config(GrpoConfig, overrides=[*own, *case.keys, *extra])
            assert config.trainer.total_training_steps == known.steps
    elif module.endswith("grpo_step.compare"):
        load_config(GrpoConfig, overrides=[*workload.settings(folder, known.steps), *extra])
    elif module.endswith("small_cards.run"):
        for part in known.parts:
            preset, *own = keys(folder, part, known.steps, known.gpus)
            assert preset == f"preset={PRESETS[part]}"
            file = APPS / part / "presets" / f"{PRESETS[part]}.yaml"
            load_config({"sft": SftConfig, "grpo": GrpoConfig}[part], presets=[file], overrides=[*own, *extra])
    elif module.endswith("reliability.run"):
        words = bench_command(folder, known.kind, known.steps, known.more, extra)[4:]
        kind = {"six_case": SixCaseConfig, "stage_gate": StageGateConfig}[known.kind]
        load_config(kind, overrides=[word for word in words if not word.startswith("overlay=")])
    else:
        assert not extra, f"{module} has no arguments {extra}"


@pytest.mark.parametrize("name", sorted(path.stem for path in PLANS.glob("*.yaml")))
@pytest.mark.parametrize("trial", [False, True])
def test_scripts_and_apps_accept_every_command_of_a_plan(
    name: str, trial: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in read_plan(PLANS / f"{name}.yaml", trial=trial):
        words = each.arguments(tmp_path)
        words = words[words.index("python") :]
        if words[:3] == ["python", "-m", "pytest"]:
            paths = [word for word in words if word.startswith("packages/")]
            assert paths
            assert all((APPS.parent / path).is_dir() for path in paths)
        else:
            module, known, extra = parsed(words, monkeypatch)
            check_keys(module, known, extra, tmp_path)


def test_a_plan_with_a_wrong_measurement_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    row = "{name: a, command: x, gpus: 1, seconds: 5}"
    for text, error in (
        (f"measurements: [{row}]", TypeError),
        (f"common: {{limit: 9}}\nmeasurements: [{row}, {row}]", ValueError),
        (f"common: {{limit: 4}}\nmeasurements: [{row}]", ValueError),
        (f"common: {{limit: 9, other: 1}}\nmeasurements: [{row}]", TypeError),
    ):
        path.write_text(text)
        with pytest.raises(error):
            read_plan(path)


@pytest.mark.parametrize("case", distill_step.CASES)
def test_the_distillation_app_accepts_the_keys_of_its_benchmark(case: str, tmp_path: Path) -> None:
    config = load_config(DistillConfig, overrides=distill_step.settings(tmp_path, case, 3))
    assert config.batch.mini_batch_size == config.batch.train_batch_size * config.sampling.num_samples, (
        "one update, as the peer"
    )


@pytest.mark.parametrize("case", sft_step.CASES.values())
def test_the_sft_app_accepts_the_keys_of_its_benchmark(case: Any, tmp_path: Path) -> None:
    config = load_config(SftConfig, overrides=sft_step.settings(tmp_path, case, 6))
    assert (config.engine.lora is None) == (not case.app)


def test_columns_read_logs_and_metrics(tmp_path: Path) -> None:
    made = tmp_path / "outputs" / "x_20260101_000000"
    made.mkdir(parents=True)
    for step, seconds in enumerate((9.0, 2.0, 4.0), 1):
        lengths = {"prompt_length/mean": 100.0, "response_length/mean": 300.0, "rollout/num_samples": 8}
        # eight responses of 300 tokens share a prompt of 100
        tokens = {"actor/tokens_per_update": 3200, "actor/computed_tokens_per_update": 2500}
        values = {"timing_s/step": seconds, "timing_s/update_actor": seconds / 2, **lengths, **tokens}
        MetricsTable(made / "metrics.tsv").log(step, values)
    (made / "config.yaml").write_text("trainer: {num_ranks: 2}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3", **CONFIGS["qwen3-4b"]}))
    run = Run("x", [], tmp_path / "x.log", "0")
    run.log.write_text(
        "memory of a GPU in turns: 89.7 GiB for a rank at its peak and 3.0 GiB for a sleeping server; 22.2 GiB for the "
        "server (weights 14.2, KV cache 3.9) and 7.9 GiB for a waiting rank, of 140.4 GiB free\n"
        "ready after 20.5 s: inputs 1\nranks diverge in x\n"
    )
    result = Result(model=tmp_path / "model", run=run, folder=run_folder(tmp_path, "x"))
    assert planned_gib(result) == pytest.approx(92.7)
    run.started = datetime(2025, 12, 31, 23, 59, 52).astimezone().timestamp()
    assert first_step_s(run, result.folder) == pytest.approx(8 + 29.5)
    shape = ModelShape.read(result.model)
    work = {"response": 300.0, "sequences": 8.0, "gpu_seconds": 2 * 1.5}
    assert mfu(result) == pytest.approx(training_mfu(shape, prompt=100.0, shared_by=8, **work))
    assert 0 < training_mfu(shape, prompt=0.0, **work) < mfu(result) < training_mfu(shape, prompt=100.0, **work)
    row = {name: column(result) for name, column in COLUMNS.items()}
    assert (row["step"], row["divergences"], row["restarts of ranks"]) == (3.0, 1, 0)
    assert math.isnan(float(row["sync"]))


def test_steps_of_peers_are_read_from_their_output() -> None:
    log = "x\ntrl step 1: 9.00 s, 1.5 GB reserved\ntrl step 2: 3.00 s, 2.5 GB reserved\n"
    assert distill_step.trl_row(log).startswith("| TRL, full | 9.00 | 3.00 | 2.5 |")
    lines = [json.dumps({"step": 1, "tokens": 7.0, "seconds": 2.0, "peak_gb": 1.5}), "{'loss': 1.0}", "noise"]
    assert sft_step.trl_steps("\n".join(lines)) == [sft_step.Step(tokens=7.0, seconds=2.0, peak_gb=1.5)]
