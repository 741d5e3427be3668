"""The number of steps of a run that gives none."""

from __future__ import annotations

from rl_data import check_files

from ..errors import naming_key
from ..job_config import JobConfigT
from .resolved import ResolvedConfig


def resolve_steps(resolved: ResolvedConfig[JobConfigT]) -> ResolvedConfig[JobConfigT]:
    """`trainer.total_training_steps=null` decided: as many steps as see every row once.

    Raises InputError for files that cannot be read.
    """
    config = resolved.config
    if config.trainer.total_training_steps is not None:
        return resolved
    rows, size = config.task.num_train, config.batch.train_batch_size
    if config.data.train:
        with naming_key("data.train"):
            rows = check_files(config.data.train, config.data, rewards=())
    why = f"one epoch, {rows} prompts in steps of {size}"
    return resolved.with_default("trainer.total_training_steps", -(-rows // size), why)
