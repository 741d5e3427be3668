"""What a run reads: a model folder, a tokenizer, prompts, demonstrations. Checked first, loaded later.

`check_inputs` runs before any process starts and imports no torch; `load_inputs` reads everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rl_data import (
    ArithmeticTask,
    DataConfig,
    Demonstration,
    Prompt,
    build_tiny_model,
    check_files,
    check_model_folder,
    load_demonstrations,
    load_prompts,
    load_tokenizer,
    write_task,
)
from rollout_vllm import RolloutConfig, check_launch

from .config import ModelConfig, SupervisedConfig, TaskSize, TrainerConfig
from .errors import InputError

BUILTIN_MODEL = "builtin:tiny"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything read."""

    model_path: Path
    tokenizer: Any
    train_prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    demonstrations: Sequence[Demonstration]


def check_inputs(model: ModelConfig, data: DataConfig, supervised: SupervisedConfig) -> None:
    """Refuses, before any process starts, files and folders that cannot be used.

    Raises:
        InputError, rl_data.DataError: with the file or folder and what to do.
    """
    if model.path != BUILTIN_MODEL:
        check_model_folder(model.path)
    check_files([*data.train, *data.val, *supervised.files])
    if data.train and supervised.steps and not supervised.files:
        raise InputError(
            f"warm_start.steps is {supervised.steps} but warm_start.files is empty: the built-in demonstrations belong "
            "to the built-in task; give demonstrations for data.train or set warm_start.steps=0"
        )
    if model.path == BUILTIN_MODEL and data.train:
        raise InputError(
            f"model.path is {BUILTIN_MODEL}, whose vocabulary knows the built-in task only; "
            "give model.path=<Hugging Face folder> with data.train"
        )


def check_resume(trainer: TrainerConfig) -> None:
    """Refuses to resume from what is not a run folder. One without a checkpoint yet starts at step 1.

    Raises:
        InputError: with the path.
    """
    if trainer.resume == "auto" and not (Path(trainer.resume_from or "") / "config.yaml").is_file():
        raise InputError(
            f"trainer.resume_from is {trainer.resume_from}, which is no run folder (it has no config.yaml); "
            "give the folder of the run to go on from, or trainer.resume=never"
        )


def check_servers(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Refuses, before any process starts, server settings that cannot work with the model.

    Raises:
        rollout_vllm.RolloutConfigError: a port in use, too little memory for the KV cache, a folder vLLM cannot serve.
    """
    if model.path != BUILTIN_MODEL:
        check_launch(model.path, rollout)
        return
    with TemporaryDirectory() as folder:
        check_launch(build_tiny_model(folder), rollout)


def load_inputs(
    model: ModelConfig, data: DataConfig, supervised: SupervisedConfig, task: TaskSize, *, folder: Path, seed: int
) -> Inputs:
    """Reads prompts and demonstrations; writes the built-in model and task into `folder` first where they are used."""
    model_path = Path(model.path)
    if model.path == BUILTIN_MODEL:
        model_path = build_tiny_model(folder / "initial_model", seed=seed)
    tokenizer = load_tokenizer(model_path)
    train, val, demonstrations = data.train, data.val, supervised.files
    if not train:
        written: ArithmeticTask = write_task(
            folder / "task",
            num_train=task.num_train,
            num_val=task.num_val,
            num_demonstrations=task.num_demonstrations,
            seed=seed,
        )
        train, val = (str(written.train),), val or (str(written.val),)
        demonstrations = demonstrations or (str(written.demonstrations),)
    return Inputs(
        model_path=model_path,
        tokenizer=tokenizer,
        train_prompts=load_prompts(train, tokenizer, data),
        val_prompts=load_prompts(val, tokenizer, data) if val else [],
        demonstrations=load_demonstrations(demonstrations, tokenizer, data) if supervised.steps else [],
    )
