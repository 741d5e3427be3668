"""Supervised fine-tuning: `python -m apps.sft.main [section.key=value ...]`, `--help` lists every key.

Demonstrations are files with `question` and `answer`, or with `messages` (`supervised.files`), or the built-in ones.
The trained model is written to `<run folder>/model` as a Hugging Face folder.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import rl_core
import rl_runtime
import run_kit
from apps.sft.config import SftConfig


def check(config: SftConfig) -> "rl_runtime.Placement":
    """Refuses settings that cannot work before any process starts; plans the devices."""
    rl_runtime.prepare_driver(config.trainer.device)
    run_kit.check_tracking(config.tracking)
    rl_runtime.check_sequence_parallel(config.engine, section="engine", num_ranks=config.trainer.rank_count)
    placement = rl_runtime.plan_ranks(config.trainer, sequence_parallel=config.engine.sequence_parallel)
    rl_runtime.check_prompt_files(config.model, config.data)
    rl_runtime.check_supervised(config.model, config.data, config.supervised, section="supervised")
    rl_runtime.check_cluster(config.model, config.trainer, placement)
    return placement


def main(config: SftConfig) -> None:
    """Trains on the demonstrations and writes the model, also when a signal stops it before the last step."""
    choice = rl_runtime.choose_supervised(
        config, model=config.model, trainer=config.trainer, engine=config.engine, token_budget=config.token_budget
    )
    config = choice.config
    placement = check(config)
    architectures = rl_runtime.check_architectures(config.model, {"engine": config.engine}, on_gpu=placement.on_gpu)
    trainer = config.trainer
    run = run_kit.RunFolder.create(trainer.output_dir, trainer.experiment, private=trainer.private_output)
    steps, stop = config.supervised.steps, run_kit.StopRequest()
    with run_kit.Tracker(run, config, num_steps=steps, supervised=True, comment=choice.comment()) as tracker:
        for line in (*choice.lines(), *architectures):
            tracker.info(line)
        inputs = rl_runtime.load_inputs(
            config.model,
            config.data,
            config.supervised,
            config.task,
            folder=run.path,
            seed=config.trainer.seed,
            with_prompts=False,
        )
        with rl_runtime.open_ranks(config.trainer, placement) as ranks:
            model = rl_runtime.ModelHandle(
                ranks,
                "actor",
                rl_core.BatchConfig(token_budget=config.token_budget),
                max_skipped_updates=config.trainer.max_skipped_updates,
                report=tracker.info,
            )
            engine = replace(config.engine, optim=config.supervised.optim)
            model.build(str(inputs.model_path), engine, total_steps=config.supervised.steps)
            with stop.listen("stopping after this step and writing the model; again: stop now, without"):
                taken = rl_runtime.train_supervised(
                    model,
                    inputs.demonstrations,
                    config.supervised,
                    seed=config.trainer.seed,
                    on_step=tracker.log_supervised,
                    stop=stop,
                )
            model.export(str(run.path / "model"), str(inputs.model_path))
        tracker.info(f"model written to {run.path / 'model'}")
        if stop.signal and taken < steps:
            tracker.info(f"stopped by {stop.signal.name} after step {taken} of {steps}")
            raise run_kit.RunStopped(stop.signal)


def cli(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the app from its command line; `argv` defaults to the arguments of the process."""
    run_kit.run_cli(SftConfig, main, app_name="apps.sft.main", argv=argv)


if __name__ == "__main__":
    cli()
