"""The engines of a run: checks of their settings against the run, the model and the ranks."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from ds_engine import (
    EngineConfig,
    EngineConfigError,
    Head,
    ModelError,
    OptimConfig,
    UntriedModelError,
    check_deepspeed,
    check_finite,
    check_model,
    check_weights,
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
            raise InputError.of(error, under=section) from error
        raise InputError(f"its engine is set up as the actor's: {error}", field=key, value=path) from error


def check_engine(engine: EngineConfig, *, section: str, num_updates: int, is_saved: bool = False) -> None:
    """Checks the engine of a policy or critic, and its schedule over the run's `num_updates` optimizer steps.

    Raises InputError.
    """
    if engine.dropout:
        problem = "policy and value updates compare outputs of training with outputs computed without noise"
        raise InputError(problem, field=f"{section}.dropout", value=True, allowed="false")
    check_states(engine, section=section, is_saved=is_saved)
    if engine.optim.total_steps is not None:
        field, steps = f"{section}.optim.total_steps", engine.optim.total_steps
        raise InputError(f"the run sets it ({num_updates})", field=field, value=steps, allowed="null")
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
    offload = engine.zero.offload
    if is_saved and offload.optimizer == "nvme":
        raise InputError(
            "no checkpoint holds files on NVMe",
            field=f"{section}.zero.offload.optimizer",
            value="nvme",
            allowed="cpu, or nvme with trainer.save_freq=0",
        )
    if offload.nvme_path is not None and not os.path.isdir(offload.nvme_path):
        field = f"{section}.zero.offload.nvme_path"
        raise InputError(field=field, value=offload.nvme_path, allowed="an existing folder, on a local NVMe drive")


def check_sequence_parallel(engine: EngineConfig, *, section: str, num_ranks: int) -> None:
    """Raises InputError unless the number of ranks is a multiple of sequence_parallel."""
    if num_ranks % engine.sequence_parallel:
        fits = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
        raise InputError(
            f"it does not divide trainer.num_ranks ({num_ranks})",
            field=f"{section}.sequence_parallel",
            value=engine.sequence_parallel,
            allowed=fits,
        )


def check_model_weights(model: ModelConfig, *, key: str = "model.path") -> None:
    """Raises InputError if the files of a language model lack a weight, or hold one that is inf or NaN, with its
    name."""
    folder = str(find_model_folder(model.path))
    with _naming_model(model, key):
        check_weights(folder)
        check_finite(folder)


@contextmanager
def _naming_model(model: ModelConfig, key: str) -> Iterator[None]:
    """Errors in the model's files name the key that gave it. Raises InputError for ds_engine.ModelError."""
    try:
        yield
    except ModelError as error:
        raise InputError(error.problem, field=key, value=model.path, remedy=error.remedy) from error


def check_sight(model: ModelConfig, engines: Mapping[str, EngineConfig], *, on_gpu: bool, key: str) -> list[str]:
    """Raises InputError unless the engines compute sequences with images exactly; `key`: of the files with images.

    Returns warnings of what servers on the CPU compute in another way.
    """
    warnings: list[str] = []
    for section, engine in engines.items():
        head: Head = "value" if section == "critic" else "lm"
        try:
            trial = check_model(str(find_model_folder(model.path)), engine, head=head, new_head=True)
        except UntriedModelError:
            if on_gpu:
                continue
            raise
        if not trial.sees:
            problem = f"its rows have images, and {model.path} sees none ({trial.why_blind or 'no vision tower'})"
            raise InputError(problem, field=key, allowed="rows of text")
        # vLLM 0.32 chooses a backend with such a mask on GPUs; that of CPUs has none.
        if trial.joins_images and not on_gpu:
            warnings = [
                "warning: vLLM's attention on CPUs is causal within images, unlike the model's: log-probs differ"
            ]
    return warnings


def check_architectures(
    model: ModelConfig,
    engines: Mapping[str, EngineConfig],
    *,
    on_gpu: bool,
    value_heads: Collection[str] = ("critic",),
    trained: bool = True,
    key: str = "model.path",
) -> list[str]:
    """Checks that the model's files hold all of its weights, none of them NaN, and that the engines compute it exactly,
    on a small random copy; returns a line for each way, and a warning of tensors that the models do not use.

    Args:
        engines: configuration section -> engine.
        value_heads: sections whose engines have a value head.
        trained: a value head may be missing, and is drawn.
        on_gpu: the ranks have GPUs; they try a model whose kernels need one.
        key: the configuration key that names the model.

    Raises InputError.
    """
    for section, engine in engines.items():
        if not on_gpu and engine.attention not in ("auto", "sdpa"):
            problem, field = "it needs a GPU, and the ranks run on the CPU", f"{section}.attention"
            raise InputError(problem, field=field, value=engine.attention, allowed="auto, sdpa")
    if model.path == BUILTIN_MODEL:
        return []
    folder = str(find_model_folder(model.path))
    lines, unused = list[str](), list[str]()
    for section, engine in engines.items():
        head: Head = "value" if section in value_heads else "lm"
        try:
            with naming_engine(section, key=key, path=model.path):
                lines.append(str(check_model(folder, engine, head=head, new_head=trained, report=unused.append)))
        except ModelError as error:
            if not (on_gpu and isinstance(error, UntriedModelError)):
                if error.field in (None, "model_path"):
                    raise InputError(error.problem, field=key, value=model.path, remedy=error.remedy) from error
                raise InputError.of(error, under=section) from error
            lines.append(f"{error}; the ranks try it before the first step")
    with _naming_model(model, key):
        check_finite(folder)
    return list(dict.fromkeys([*(f"warning: {line}" for line in unused), *lines]))
