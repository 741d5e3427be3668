"""Evaluates models on held-out prompts: `plinth evaluate model.path=FOLDER data.val=FILE [key=value ...]`.

`--help all` lists all keys. It samples `sampling.n` responses to each prompt, scores them as training scores them, and
reports pass@k, mean@n and maj@n with bootstrap intervals over the prompts. `checkpoints.folder` evaluates all
checkpoints of a run on the same servers, `rollout.urls` existing servers; `compare` shows how much models differ.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import rl_runtime
import run_kit
from apps.evaluate.config import EvaluateConfig
from rl_runtime.app.cli import COMMON_KEYS

if TYPE_CHECKING:
    from apps.evaluate.checks import Plan
    from apps.evaluate.evaluator import Evaluator
    from apps.evaluate.results import Evaluation
    from apps.evaluate.targets import Target


def main(config: EvaluateConfig) -> int:
    """Evaluates the models that the table lacks and writes the report; returns 1 if a model could not be evaluated."""
    from apps.evaluate.checks import check, open_run
    from apps.evaluate.report import write_results
    from apps.evaluate.results import in_order, load_evaluations
    from apps.evaluate.targets import is_missing

    plan = check(config)
    with open_run(plan.config, plan.folder, num_models=len(plan.targets)) as run:
        print("\n".join([f"{run.path}: {len(plan.targets)} models", *plan.notes]), flush=True)
        table = load_evaluations(run.path)
        missing = [target for target in plan.targets if is_missing(target, table)]
        if present := [target.name for target in plan.targets if target not in missing]:
            print(f"already in the table: {', '.join(present)}")
        failed = evaluate_all(missing, plan, run.path, table) if missing else {}
        if table or plan.compared:
            write_results(run.path, plan.config, in_order(list(table.values())), plan.compared)
            print(f"{run.path / 'report.html'}, with results.tsv and summary.json")
        for name, reason in failed.items():
            print(f"failed: {name}: {reason}")
    return 1 if failed else 0


def evaluate_all(
    missing: "Sequence[Target]", plan: "Plan", folder: Path, table: "dict[str, Evaluation]"
) -> Mapping[str, str]:
    """Evaluates models on the same servers and adds them to the table; returns name -> why one could not be."""
    from apps.evaluate.evaluator import Evaluator
    from apps.evaluate.report import interval_text
    from apps.evaluate.results import intervals
    from ckpt import CheckpointError
    from weight_sync import WeightSyncError

    config, failed = plan.config, {}
    supervised = rl_runtime.SupervisedConfig()
    inputs = plan.inputs or rl_runtime.load_inputs(
        config.model, config.data, supervised, config.task, folder=folder, seed=config.seed
    )
    with Evaluator(config, inputs, folder, several_models=len(missing) > 1) as evaluator:
        for target in missing:
            try:
                evaluation = evaluate(target, evaluator, config, folder)
            except (CheckpointError, WeightSyncError, rl_runtime.RolloutFailed) as error:
                failed[target.name] = str(error)
                print(f"warning: {target.name} is skipped: {error}", flush=True)
                continue
            evaluation.save(folder)
            table[target.name] = evaluation
            metrics = intervals(evaluation.columns(config.pass_at), config)
            print(f"{target.name}: {', '.join(f'{k} {interval_text(v)}' for k, v in metrics.items())}", flush=True)
    return failed


def evaluate(target: "Target", evaluator: "Evaluator", config: EvaluateConfig, folder: Path) -> "Evaluation":
    """Loads one model into the servers, and samples and scores all prompts."""
    from apps.evaluate.results import Evaluation

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
        common_keys=COMMON_KEYS,
        default_preset="demo",
        default_preset_unless=("model.path", "checkpoints.folder", "data.val", "rollout.urls", "compare"),
    )


if __name__ == "__main__":
    cli()
