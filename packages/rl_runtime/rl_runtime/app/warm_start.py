"""The model folder that a run starts from: the configured one, or the result of supervised fine-tuning before it."""

import shutil
from collections.abc import Callable

from ds_engine import EngineConfig

from ..ranks.model_handle import ModelHandle
from ..training.supervised import train_supervised
from ..training.supervised_config import SupervisedConfig
from .training_run import TrainingRun


def starting_folder(
    run: TrainingRun, warm_start: SupervisedConfig, engine: EngineConfig, handle: Callable[[], ModelHandle]
) -> str:
    """The folder to build the run's models from, which all ranks can read; takes the warm start's steps first.

    Args:
        engine: of the warm start, with its optimizer.
        handle: makes the model that takes the steps, at temperature 1.
    """
    if not warm_start.trains:
        return run.for_ranks(run.inputs.model_path)
    folder = run.warm_start_folder
    if folder.is_dir():  # the run continues after it has lost its ranks
        return run.for_ranks(folder)
    if run.resumed is not None:  # the copy of the resumed run; kept here too, for the next resume
        shutil.copytree(run.resumed.path.parent.parent / folder.name, folder)
    else:
        model = handle()
        model.build(run.for_ranks(run.inputs.model_path), engine, total_steps=warm_start.steps)
        train_supervised(
            model,
            run.inputs.demonstrations,
            warm_start,
            seed=run.trainer.seed,
            on_step=run.tracker.log_supervised,
        )
        model.export(str(folder), str(run.inputs.model_path))
    if run.uploader is not None:  # before the first checkpoint, which is useless without it
        run.uploader.add_folder(folder)
    return run.for_ranks(folder)
