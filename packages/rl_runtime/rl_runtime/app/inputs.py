"""Loads the inputs of a run: model folder, tokenizer, prompts, demonstrations. Writes the built-in ones first."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_data import (
    DataConfig,
    Demonstration,
    Prompt,
    TaskFiles,
    build_tiny_model,
    find_model_folder,
    load_demonstrations,
    load_labeled,
    load_pairs,
    load_prompts,
    load_tokenizer,
    write_task,
)
from rl_data.prompts import uses_chat_template
from rollout_vllm import ChatFormat

from ..config import BUILTIN_MODEL, ModelConfig
from ..training.supervised_config import SupervisedConfig
from .supervised_job_config import ExampleKind
from .task_config import TaskSize

INITIAL_MODEL, TASK = "initial_model", "task"
"""Folders of a run with the built-in model and its task."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The loaded inputs; an SFT app has no prompts."""

    model_path: Path
    tokenizer: Any
    train_prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    demonstrations: Sequence[Demonstration]
    task: TaskFiles | None = None
    """The files of the built-in task, if the model is the built-in one."""


def load_inputs(
    model: ModelConfig,
    data: DataConfig,
    supervised: SupervisedConfig,
    task: TaskSize,
    *,
    folder: Path,
    seed: int,
    with_prompts: bool = True,
    max_prompts: int | None = None,
) -> Inputs:
    """Loads prompts and demonstrations; writes the built-in model and its task to `folder` first.

    Args:
        max_prompts: limit of the prompts for training and of those for validation; None: `data` says it.
    """
    model_path, written = find_model_folder(model.path), None
    train, val, demonstrations = data.train, data.val, supervised.files
    if model.path == BUILTIN_MODEL:
        model_path = build_tiny_model(folder / INITIAL_MODEL, seed=seed)
        written = write_task(folder / TASK, seed=seed, **asdict(task))
        train, val, demonstrations = (str(written.train),), (str(written.val),), (str(written.demonstrations),)
    if not with_prompts:
        train, val = (), ()
    tokenizer = load_tokenizer(model_path)
    return Inputs(
        model_path=model_path,
        tokenizer=tokenizer,
        train_prompts=load_prompts(train, tokenizer, data, max_prompts=max_prompts) if train else [],
        val_prompts=load_prompts(val, tokenizer, data, max_prompts=max_prompts or data.max_val_prompts) if val else [],
        demonstrations=load_examples("demonstrations", demonstrations, tokenizer, data, supervised, seed=seed)
        if supervised.trains
        else [],
        task=written,
    )


def load_examples(
    kind: ExampleKind,
    files: Sequence[str],
    tokenizer: Any,
    data: DataConfig,
    supervised: SupervisedConfig,
    *,
    seed: int,
) -> list[Any]:
    """The demonstrations, pairs or labeled responses of these files, tokenized.

    Args:
        seed: chooses the unrelated responses of labeled ones.
    """
    if kind == "pairs":
        return list(load_pairs(files, tokenizer, data, max_length=supervised.max_length))
    if kind == "labeled":
        return list(load_labeled(files, tokenizer, data, max_length=supervised.max_length, seed=seed))
    return list(load_demonstrations(files, tokenizer, data, turns=supervised.turns, max_length=supervised.max_length))


def chat_format(tokenizer: Any, data: DataConfig) -> ChatFormat:
    """How the turns of a conversation become tokens, as in the prompts of `load_prompts`."""
    with_template = uses_chat_template(tokenizer, data)
    return ChatFormat(tokenizer, with_template=with_template, template_kwargs=data.chat_template_kwargs)
