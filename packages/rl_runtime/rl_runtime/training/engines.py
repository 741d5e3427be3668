"""The engines of a run: checks of their settings against the run, the model and the ranks."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from ds_engine import (
    EngineConfig,
    EngineConfigError,
    EngineError,
    ModelError,
    OptimConfig,
    UntriedModelError,
    check_deepspeed,
    check_model,
)
from ds_engine.config import check_schedule
from plinth_base.model_folder import find_model_folder

from ..config import BUILTIN_MODEL, ModelConfig
from ..errors import InputError


@contextmanager
def naming_engine(section: str, *, key: str = "model.path", path: str = "") -> Iterator[None]:
    """Errors in an engine's settings name its configuration section; those of another model, the key that gave it.

    Args:
        key: the configuration key that names the model.
        path: the value of `key`.

    Raises InputError for ds_engine.EngineConfigError.
    """
    try:
        yield
    except EngineConfigError as error:
        if key == "model.path":
            raise _as_input_error(error, section) from error
        raise InputError(f"its engine is set up as the actor's: {error}", field=key, value=path) from error


def _as_input_error(error: EngineError, section: str) -> InputError:
    field = error.under(section).field
    return InputError(error.problem, field=field, value=error.value, allowed=error.allowed, remedy=error.remedy)


def check_engine(engine: EngineConfig, *, section: str, num_updates: int, is_saved: bool = False) -> None:
    """Checks the engine of a policy or critic, and its schedule over the run's `num_updates` optimizer steps.

    Raises InputError.
    """
    if engine.dropout:
        raise InputError(
            f"{section}.dropout is true, but policy and value updates compare outputs of training with outputs "
            "computed without noise; allowed: false"
        )
    check_states(engine, section=section, is_saved=is_saved)
    if engine.optim.total_steps is not None:
        raise InputError(
            f"{section}.optim.total_steps is {engine.optim.total_steps}, but the run sets it ({num_updates}); remove it"
        )
    check_optimizer_steps(engine.optim, num_updates, section=section)


def check_optimizer_steps(optim: OptimConfig, num_steps: int, *, section: str) -> None:
    """Raises InputError for a learning rate schedule that does not suit the number of optimizer steps."""
    with naming_engine(section):
        check_schedule(optim, num_steps)


def check_states(engine: EngineConfig, *, section: str, is_saved: bool) -> None:
    """Raises InputError unless the engine's states have their place and can be saved if needed, or for unknown keys of
    DeepSpeed."""
    with naming_engine(section):
        check_deepspeed(engine)
    if is_saved and engine.zero.offload.optimizer == "nvme":
        raise InputError(
            f"{section}.zero.offload.optimizer is nvme, whose files no checkpoint holds; "
            "use cpu, or trainer.save_freq=0"
        )
    if (folder := engine.zero.offload.nvme_path) is not None and not os.path.isdir(folder):
        raise InputError(
            f"{section}.zero.offload.nvme_path is {folder!r}; allowed: an existing folder, on a local NVMe drive"
        )


def check_sequence_parallel(engine: EngineConfig, *, section: str, num_ranks: int) -> None:
    """Raises InputError unless the number of ranks is a multiple of sequence_parallel."""
    if num_ranks % engine.sequence_parallel:
        fits = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
        raise InputError(
            f"{section}.sequence_parallel is {engine.sequence_parallel}, which does not divide trainer.num_ranks "
            f"({num_ranks}); allowed: {fits}"
        )


def check_architectures(
    model: ModelConfig,
    engines: Mapping[str, EngineConfig],
    *,
    on_gpu: bool,
    value_heads: Collection[str] = ("critic",),
    key: str = "model.path",
) -> list[str]:
    """Checks that the engines compute the model exactly, on a small random copy; returns a line for each way.

    Args:
        engines: configuration section -> engine.
        value_heads: sections whose engines have a value head.
        on_gpu: the ranks have GPUs; they try a model whose kernels need one.
        key: the configuration key that names the model.

    Raises InputError.
    """
    for section, engine in engines.items():
        if not on_gpu and engine.attention not in ("auto", "sdpa"):
            raise InputError(
                f"{section}.attention is {engine.attention}, which needs a GPU, but the ranks run on the CPU; "
                "allowed: auto, sdpa"
            )
    if model.path == BUILTIN_MODEL:
        return []
    folder = str(find_model_folder(model.path))
    lines = []
    for section, engine in engines.items():
        try:
            with naming_engine(section, key=key, path=model.path):
                lines.append(str(check_model(folder, engine, head="value" if section in value_heads else "lm")))
        except ModelError as error:
            if not (on_gpu and isinstance(error, UntriedModelError)):
                if error.field in (None, "model_path"):
                    raise InputError(error.problem, field=key, value=model.path, remedy=error.remedy) from error
                raise _as_input_error(error, section) from error
            lines.append(f"{error}; the ranks try it before the first step")
    return list(dict.fromkeys(lines))
