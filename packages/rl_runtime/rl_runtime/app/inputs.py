"""Checks and loads the inputs of a run: model folder, tokenizer, prompts, examples. Writes the built-in ones first."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from plinth_base import model_folder
from plinth_base.model_folder import check_model_folder, find_model_folder
from rl_data import (
    DataConfig,
    DataError,
    Demonstration,
    ImageFiles,
    Prompt,
    Reward,
    TaskFiles,
    VisionProcessor,
    build_tiny_model,
    check_demonstrations,
    check_files,
    check_preferences,
    load_demonstrations,
    load_labeled,
    load_pairs,
    load_prompts,
    load_tokenizer,
    write_task,
)
from rl_data.rendering import uses_chat_template
from rl_data.tasks.tiny_model import build_tiny_tokenizer
from rollout_vllm import ChatFormat, SamplingConfig

from ..config import BUILTIN_MODEL, ModelConfig
from ..errors import InputError, naming_key
from ..job_config import InputsConfig
from ..supervised_job_config import ExampleKind
from ..training.engines import check_optimizer_steps
from ..training.supervised import sequences_in
from ..training.supervised_config import SupervisedConfig

INITIAL_MODEL, TASK = "initial_model", "task"
"""Folders of a run with the built-in model and its task."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The loaded inputs: prompts, or the examples of supervised training."""

    model_path: Path
    tokenizer: Any
    train_prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    demonstrations: Sequence[Demonstration]
    examples: Sequence[Any] = ()
    """Demonstrations, pairs or labeled responses to train on, as `SupervisedJobConfig.examples` says."""
    held_out: Sequence[Any] = ()
    task: TaskFiles | None = None
    """The files of the built-in task, if the model is the built-in one."""
    vision: VisionProcessor | None = None
    """The processor of the model, which loads when images need it."""
    lines: Sequence[str] = ()
    """Lines for the user about the files: how messages became text, what was left out."""

    @property
    def images_in(self) -> str:
        """The key of files whose rows have images; empty if none has."""
        rows = {"data.train": self.train_prompts, "data.val": self.val_prompts, "files": self.demonstrations}
        return next((key for key, part in rows.items() if any(getattr(one, "images", ()) for one in part)), "")

    def image_files(self, folder: Path) -> ImageFiles | None:
        """The files of images below a run folder."""
        return None if self.vision is None else ImageFiles(folder / "images", self.vision)


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collects what rl_data logs in the block, for a log that does not exist yet: each line once."""
    lines: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        line = f"{'warning: ' if record.levelno >= logging.WARNING else ''}{record.getMessage()}"
        if line not in lines:
            lines.append(line)
        return False

    logger, handler = logging.getLogger("rl_data"), logging.Handler()
    handler.addFilter(keep)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def naming_file(key: str) -> Iterator[None]:
    """Errors about a file or its rows begin with the configuration key that names it.

    Raises InputError for rl_data.DataError.
    """
    try:
        yield
    except DataError as error:
        if error.file is None:
            raise
        raise InputError(error.explanation, field=key) from error


def load_ahead(config: InputsConfig, supervised: SupervisedConfig, *, seed: int) -> Inputs | None:
    """The inputs of a user's model before there is a run folder; None for the built-in ones, which are written there.

    Raises InputError for a row that the chat template refuses, for example.
    """
    if config.model.path == BUILTIN_MODEL:
        return None
    return load_inputs(config, supervised, folder=Path(), seed=seed)


def load_inputs(
    config: InputsConfig,
    supervised: SupervisedConfig,
    *,
    folder: Path,
    seed: int,
    with_prompts: bool = True,
    max_prompts: int | None = None,
    section: str = "warm_start",
) -> Inputs:
    """Loads prompts and demonstrations; writes the built-in model and its task to `folder` first.

    Args:
        section: the configuration section of `supervised`.
        max_prompts: limit of the prompts for training and of those for validation; None: `data` says it.
    """
    model, data = config.model, config.data
    model_path, written = find_model_folder(model.path), None
    train, val, demonstrations = data.train, data.val, supervised.files
    if model.path == BUILTIN_MODEL:
        model_path = build_tiny_model(folder / INITIAL_MODEL, seed=seed)
        written = write_task(folder / TASK, seed=seed, **asdict(config.task))
        train, val, demonstrations = (str(written.train),), (str(written.val),), (str(written.demonstrations),)
    if not with_prompts:
        train, val = (), ()
    tokenizer, vision = load_tokenizer(model_path), VisionProcessor(model_path)

    def prompts(key: str, files: Sequence[str], most: int | None) -> list[Prompt]:
        with naming_file(key):
            loaded = load_prompts(files, tokenizer, data, max_prompts=most, vision=vision) if files else []
        check_token_ids(model_path, tokenizer, ((prompt.id, prompt.token_ids) for prompt in loaded), key=key)
        return loaded

    with log_lines() as lines:
        return Inputs(
            model_path=model_path,
            tokenizer=tokenizer,
            train_prompts=prompts("data.train", train, max_prompts),
            val_prompts=prompts("data.val", val, max_prompts or data.max_val_prompts),
            demonstrations=load_examples(
                "demonstrations", demonstrations, tokenizer, model_path, data, supervised, section=section
            )
            if supervised.trains
            else [],
            task=written,
            vision=vision,
            lines=[] if written is not None else lines,
        )


def load_examples(
    kind: ExampleKind,
    files: Sequence[str],
    tokenizer: Any,
    model_path: Path,
    data: DataConfig,
    supervised: SupervisedConfig,
    *,
    seed: int = 0,
    section: str = "supervised",
    key: str = "files",
) -> list[Any]:
    """The demonstrations, pairs or labeled responses of these files, tokenized.

    Args:
        seed: chooses the unrelated responses of labeled ones.
        section: the configuration section of `supervised`.
        key: that of the files in it.
    """
    most, turns, examples, vision = supervised.max_length, supervised.turns, list[Any](), VisionProcessor(model_path)
    with naming_file(f"{section}.{key}"):
        if kind == "pairs":
            examples = list(load_pairs(files, tokenizer, data, max_length=most, section=section))
        elif kind == "labeled":
            examples = list(load_labeled(files, tokenizer, data, max_length=most, seed=seed, section=section))
        else:
            examples += load_demonstrations(
                files, tokenizer, data, turns=turns, max_length=most, section=section, vision=vision
            )
    named = ((f"example {number}", part) for number, one in enumerate(examples) for part in sequences_in(one))
    sequences = ((name, [*part.prompt_ids, *part.response_ids]) for name, part in named)
    check_token_ids(model_path, tokenizer, sequences, key=f"{section}.{key}")
    return examples


def check_token_ids(
    model_path: Path, tokenizer: Any, sequences: Iterable[tuple[str, Sequence[int]]], *, key: str
) -> None:
    """Refuses token ids that the embedding of the model lacks, as those of tokens that were added to the tokenizer.

    Args:
        sequences: name and token ids of each prompt or example.
        key: the configuration key that names their files.

    Raises InputError.
    """
    rows = vocab_size(model_path)
    if max(tokenizer.get_vocab().values()) < rows:
        return
    for name, ids in sequences:
        if (largest := max(ids, default=0)) >= rows:
            token = tokenizer.convert_ids_to_tokens(largest)
            raise InputError(
                f"{name} has the token {token!r}, number {largest}, and the embedding of model.path has {rows} rows",
                field=key,
                remedy="use the tokenizer that the model was trained with, or save the model after "
                "`resize_token_embeddings(len(tokenizer))`",
            )


def vocab_size(folder: Path) -> int:
    """Rows of the embedding of a model folder, by its configuration."""
    config = read_model_config(folder)
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


def chat_format(inputs: Inputs, data: DataConfig) -> ChatFormat:
    """The format in which turns of a conversation become tokens, as in the prompts of `load_prompts`."""
    with_template, vision = uses_chat_template(inputs.tokenizer, data), inputs.vision

    @lru_cache(maxsize=1024)  # the episodes of a group begin alike
    def ids_of(text: str, images: tuple[str, ...]) -> tuple[int, ...]:
        assert vision is not None
        return vision(text, images)[0]

    return ChatFormat(
        inputs.tokenizer,
        with_template=with_template,
        template_kwargs=data.chat_template_kwargs,
        vision=None if vision is None else lambda text, images: ids_of(text, tuple(images)),
    )


def policy_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of the policy, before a run has written the built-in one. Raises InputError."""
    if model.path == BUILTIN_MODEL:
        return build_tiny_tokenizer()
    with naming_key("model.path"):
        return load_tokenizer(find_model_folder(model.path))


def check_prompt_files(model: ModelConfig, data: DataConfig, *, rewards: Sequence[Reward] | None = None) -> None:
    """Checks the model folder and every row of the prompt files, with `rewards` as `rl_data.check_files` takes them.

    Raises InputError, naming the key and the file or folder.
    """
    if model.path != BUILTIN_MODEL:
        with naming_key("model.path"):
            check_model_folder(find_model_folder(model.path))
    elif data.train or data.val:
        raise InputError(
            "its vocabulary knows the built-in task only",
            field="model.path",
            value=BUILTIN_MODEL,
            allowed="a Hugging Face folder, with data.train and data.val",
        )
    for key, files in (("data.train", data.train), ("data.val", data.val)):
        with naming_key(key):
            check_files(files, data, rewards=rewards)


def check_train_prompts(model: ModelConfig, data: DataConfig) -> None:
    """Raises InputError for a model of the user without training prompts: those of the built-in task are not for it."""
    if model.path != BUILTIN_MODEL and not data.train:
        raise InputError(
            "the built-in task belongs to the built-in model",
            field="data.train",
            allowed="files of parquet, JSON lines or CSV",
            remedy=f"or train the built-in model: model.path={BUILTIN_MODEL}",
        )


def check_supervised(
    model: ModelConfig,
    data: DataConfig,
    supervised: SupervisedConfig,
    *,
    section: str,
    examples: ExampleKind = "demonstrations",
) -> None:
    """Checks the examples and the schedule of supervised steps; `section` is their configuration section.

    Raises InputError.
    """
    if not supervised.trains:
        return
    if not supervised.files and (data.train or model.path != BUILTIN_MODEL):
        noun = "demonstrations" if examples == "demonstrations" else "preferences"
        raise InputError(
            f"the built-in {noun} belong to the built-in model",
            field=f"{section}.files",
            allowed="files of parquet, JSON lines or CSV",
            remedy=f"or train the built-in model: model.path={BUILTIN_MODEL}",
        )
    for key in ("files", "val_files"):
        files = getattr(supervised, key, ())
        if files and model.path == BUILTIN_MODEL:
            raise InputError(
                f"model.path is {BUILTIN_MODEL}, whose vocabulary knows its own task only",
                field=f"{section}.{key}",
                allowed="none",
                remedy="give model.path=<Hugging Face folder>",
            )
        with naming_key(f"{section}.{key}"):
            if examples == "demonstrations":
                check_demonstrations(files)
            else:
                check_preferences(files, examples)
    if supervised.steps:
        check_optimizer_steps(supervised.optim, supervised.steps, section=section)


def read_model_config(folder: Path, *, key: str = "model.path") -> dict[str, Any]:
    """The config.json of a model folder. Raises InputError."""
    with naming_key(key):
        return model_folder.read_model_config(folder)


def check_context(model: ModelConfig, samplings: Mapping[str, SamplingConfig]) -> None:
    """Raises InputError if a response could fill the whole context of the model, so that no prompt fits.

    Args:
        samplings: configuration section -> sampling. Models whose positions are scaled (YaRN) are left to vLLM.
    """
    if model.path == BUILTIN_MODEL:
        return
    settings = read_model_config(find_model_folder(model.path))
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    most = settings.get("max_position_embeddings")
    if not isinstance(most, int) or not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        return
    for section, sampling in samplings.items():
        if sampling.response_tokens >= most:
            raise InputError(
                f"the model at {model.path} has {most} positions (max_position_embeddings) for prompt and response",
                field=f"{section}.max_tokens",
                value=sampling.response_tokens,
                allowed=f"at most {most - 1}",
            )
