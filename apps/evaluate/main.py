"""Evaluates models on held-out prompts: `plinth evaluate model.path=FOLDER data.val=FILE [key=value ...]`.

`--help` lists every key. It samples `sampling.n` responses to each prompt, scores them as training scores them, and
reports pass@k, mean@n and maj@n with bootstrap intervals over the prompts. `checkpoints.folder` evaluates all
checkpoints of a run on the same servers, `rollout.urls` existing servers; `compare` shows where models disagree.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import rl_runtime
import run_kit
from apps.evaluate.config import EvaluateConfig

if TYPE_CHECKING:
    from apps.evaluate.evaluator import Evaluator
    from apps.evaluate.results import Evaluation, Table
    from apps.evaluate.targets import Target


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is evaluated and compared."""

    config: EvaluateConfig
    """Without open settings."""
    targets: "tuple[Target, ...]"
    compared: "dict[str, Evaluation]"
    folder: Path | None
    """The folder to continue; None: a new one."""
    notes: tuple[str, ...]
    inputs: "rl_runtime.Inputs | None"
    """None: those of the built-in model, which the evaluation writes into its folder."""


def check(config: EvaluateConfig) -> Plan:
    """Refuses settings that cannot work before any process starts; finds the models."""
    from apps.evaluate.checks import check_inputs, find_folder
    from apps.evaluate.evaluator import choose_servers, usable_gpus
    from apps.evaluate.results import load_compared
    from apps.evaluate.targets import find_targets
    from rl_runtime.ranks.environment import why_cpu

    found = find_targets(config)
    compared = load_compared(config)
    choice = choose_servers(found.config, num_gpus=len(usable_gpus(config)) if found.targets else 0)
    if found.targets and not config.rollout.urls:
        choice = replace(choice, warning=why_cpu(config.rollout.device))
    inputs, warnings = check_inputs(choice.config) if found.targets else (None, [])
    notes = (*found.notes, *choice.lines(), *warnings, *(inputs.lines if inputs is not None else ()))
    folder = find_folder(choice.config)
    return Plan(
        config=choice.config, targets=found.targets, compared=compared, folder=folder, notes=notes, inputs=inputs
    )


def main(config: EvaluateConfig) -> int:
    """Evaluates the models that the table lacks and writes the report; returns 1 if a model could not be evaluated."""
    from apps.evaluate.checks import open_run
    from apps.evaluate.report import write_results
    from apps.evaluate.results import Table

    plan = check(config)
    with open_run(plan.config, plan.folder, num_models=len(plan.targets)) as run:
        print("\n".join([f"{run.path}: {len(plan.targets)} models", *plan.notes]), flush=True)
        table = Table(run.path)
        missing = [target for target in plan.targets if table.lacks(target)]
        if there := [target.name for target in plan.targets if target not in missing]:
            print(f"already in the table: {', '.join(there)}")
        failed = evaluate_all(missing, plan, run.path, table) if missing else {}
        if table.evaluations or plan.compared:
            write_results(run.path, plan.config, table.evaluations, plan.compared)
            print(f"{run.path / 'report.html'}, with results.tsv and summary.json")
        for name, reason in failed.items():
            print(f"failed: {name}: {reason}")
    return 1 if failed else 0


def evaluate_all(missing: "Sequence[Target]", plan: Plan, folder: Path, table: "Table") -> dict[str, str]:
    """Evaluates models on the same servers; returns name -> why one could not be evaluated."""
    from apps.evaluate.evaluator import open_evaluator
    from apps.evaluate.report import interval_text, write_results
    from ckpt import CheckpointError
    from weight_sync import WeightSyncError

    config, failed = plan.config, {}
    supervised = rl_runtime.SupervisedConfig()
    inputs = plan.inputs or rl_runtime.load_inputs(
        config.model, config.data, supervised, config.task, folder=folder, seed=config.seed
    )
    with open_evaluator(config, inputs, folder, several_models=len(missing) > 1) as evaluator:
        for target in missing:
            try:
                table.add(evaluate(target, evaluator, config, folder))
            except (CheckpointError, WeightSyncError, rl_runtime.RolloutFailed) as error:
                failed[target.name] = str(error)
                print(f"warning: {target.name} is skipped: {error}", flush=True)
                continue
            found = write_results(folder, config, table.evaluations, plan.compared)
            metrics = [f"{name} {interval_text(interval)}" for name, interval in found[target.name].items()]
            print(f"{target.name}: {', '.join(metrics)}", flush=True)
    return failed


def evaluate(target: "Target", evaluator: "Evaluator", config: EvaluateConfig, folder: Path) -> "Evaluation":
    """Loads one model into the servers, and samples and scores all prompts."""
    from apps.evaluate.results import Evaluation

    if target.path is None:
        evaluator.load(None)
    else:
        with target.open(config, folder) as model:
            evaluator.load(model)
    began = time.monotonic()
    validation = evaluator.evaluate(target.name)
    if validation.num_failed:
        share = f"{validation.num_failed} of {validation.num_failed + validation.num_samples}"
        print(f"warning: {target.name}: {share} samples failed and are in no metric: {validation.failure}", flush=True)
    return Evaluation(
        name=target.name,
        step=target.step,
        source=str(target.path or target.kind),
        digest=target.digest(),
        num_samples=config.sampling.n,
        seconds=time.monotonic() - began,
        prompts=validation.prompts,
    )


def cli(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the app from its command line; `argv` defaults to the arguments of the process."""
    run_kit.run_cli(
        EvaluateConfig,
        main,
        app_name="apps.evaluate.main",
        preset_dir=Path(__file__).with_name("presets"),
        argv=argv,
        default_preset="demo",
        default_preset_unless=("model.path", "checkpoints.folder", "data.val", "rollout.urls", "compare"),
    )


if __name__ == "__main__":
    cli()
