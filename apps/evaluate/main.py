"""Evaluates models on held-out prompts: `plinth evaluate model.path=FOLDER data.val=FILE [key=value ...]`.

`--help all` lists all keys. It samples `sampling.n` responses to each prompt, scores them as training scores them, and
reports pass@k, mean@n and maj@n with bootstrap intervals over the prompts. `checkpoints.folder` evaluates all
checkpoints of a run on the same servers and shows how much they differ; `rollout.urls` evaluates existing servers.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import rl_runtime
import run_kit
from apps.evaluate.config import EvaluateConfig
from rl_runtime.app.cli import COMMON_KEYS, servers_ahead
from rl_runtime.ranks.environment import prepare_imports
from run_kit.cli import INVOKED_AS
from run_kit.tracking.run_state import StateFile

if TYPE_CHECKING:
    from apps.evaluate.checks import Plan
    from apps.evaluate.evaluator import Evaluator
    from apps.evaluate.results import Evaluation
    from apps.evaluate.targets import Target


def main(config: EvaluateConfig) -> int:
    """Evaluates all models and writes the report; returns 1 if a model could not be evaluated."""
    prepare_imports()
    from apps.evaluate.checks import check
    from apps.evaluate.report import write_results

    with ExitStack() as stack:
        stack.enter_context(servers_ahead(config.rollout, pushes=config.checkpoints.folder is not None))
        plan = check(config)
        run = run_kit.RunFolder.create(config.output_dir, config.experiment, private=config.private_output)
        run.write_config(plan.config)
        state = StateFile(run.state_file, app=INVOKED_AS.get(), num_steps=len(plan.targets))
        stack.push(lambda _, error, __: state.close(error))
        stack.enter_context(run)
        print("\n".join([f"{run.path}: {len(plan.targets)} models", *plan.notes]), flush=True)
        evaluations, failed = evaluate_all(plan, run.path)
        if evaluations:
            write_results(run.path, plan.config, evaluations)
            print(f"{run.path / 'report.html'}, with results.tsv, summary.json and samples.jsonl")
        for name, reason in failed.items():
            print(f"failed: {name}: {reason}")
    return 1 if failed else 0


def evaluate_all(plan: "Plan", folder: Path) -> "tuple[list[Evaluation], dict[str, str]]":
    """Evaluates the models on the same servers; returns them, and name -> reason of those that failed."""
    from apps.evaluate.evaluator import Evaluator
    from apps.evaluate.report import interval_text
    from apps.evaluate.results import intervals
    from ckpt import CheckpointError
    from weight_sync import WeightSyncError

    config, evaluations, failed = plan.config, [], {}
    nothing = rl_runtime.SupervisedConfig()
    inputs = plan.inputs or rl_runtime.load_inputs(config, nothing, folder=folder, seed=config.seed)
    with Evaluator(config, inputs, folder) as evaluator:
        for target in plan.targets:
            try:
                evaluation = evaluate(target, evaluator, config, folder)
            except (CheckpointError, WeightSyncError, rl_runtime.RolloutFailed) as error:
                failed[target.name] = str(error)
                print(f"warning: {target.name} is skipped: {error}", flush=True)
                continue
            evaluation.append_to(folder)
            evaluations.append(evaluation)
            metrics = intervals(evaluation.columns(config.pass_at), config)
            print(f"{target.name}: {', '.join(f'{k} {interval_text(v)}' for k, v in metrics.items())}", flush=True)
    return evaluations, failed


def evaluate(target: "Target", evaluator: "Evaluator", config: EvaluateConfig, folder: Path) -> "Evaluation":
    """Loads one model into the servers, and samples and scores all prompts."""
    from apps.evaluate.results import Evaluation

    with target.open(config, folder) as model:
        evaluator.load(model)
    began, validation = time.monotonic(), evaluator.evaluate()
    if num := validation.num_failed:
        print(f"warning: {target.name}: {num} samples failed and are in no metric: {validation.failure}", flush=True)
    return Evaluation(
        name=target.name,
        step=target.step,
        num_samples=config.sampling.num_samples,
        seconds=time.monotonic() - began,
        prompts=validation.prompts,
    )


def cli(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the app from its command line."""
    run_kit.run_cli(
        EvaluateConfig,
        main,
        app_name="apps.evaluate.main",
        preset_dir=Path(__file__).with_name("presets"),
        argv=argv,
        common_keys=COMMON_KEYS,
        default_preset="demo",
        default_preset_unless=("model.path", "checkpoints.folder", "data.val", "rollout.urls"),
    )


if __name__ == "__main__":
    cli()
