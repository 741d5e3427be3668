"""The models that a command evaluates: a model folder, the checkpoints of a run, or the model of running servers."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ds_engine
from apps.evaluate.config import EvaluateConfig
from ckpt import export_deepspeed
from ckpt.manifest import folder_name
from ckpt.reader import CheckpointReader
from plinth_base.model_folder import find_model_folder
from rl_runtime import InputError
from rl_runtime.app.inputs import INITIAL_MODEL, TASK
from rl_runtime.config import BUILTIN_MODEL
from rl_runtime.rules import check_value
from rl_runtime.training.run_files import WARM_START_MODEL
from run_kit.config.schema import MISSING
from run_kit.config.trees import value_at
from run_kit.config.yaml import YamlError, parse_typed


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model to evaluate."""

    name: str
    """Name in the results; each of an evaluation has another."""
    step: int | None = None
    """Step of a checkpoint; None: the path is a Hugging Face folder."""
    path: Path | None = None
    """None: the servers' own model, or the built-in one."""
    lora: dict[str, Any] | None = None
    """PEFT's settings of the adapters in the checkpoint."""
    nf4: ds_engine.EngineConfig | None = None
    """The engine that trained these adapters on a base in NF4; None: on a plain one."""

    @contextmanager
    def open(self, config: EvaluateConfig, folder: Path) -> Iterator[Path | None]:
        """The model as a Hugging Face folder: its own, or one below `folder` that is deleted afterwards.

        Raises CheckpointError for a checkpoint that is damaged, or cannot be exported.
        """
        if self.path is None or self.step is None:
            yield self.path
            return
        base = find_model_folder(config.model.path)
        with TemporaryDirectory(dir=folder, prefix="export_") as temporary:
            out = Path(temporary) / self.name
            checkpoint = CheckpointReader(self.path.parent).load(self.step)
            rounded = None if self.nf4 is None else ds_engine.nf4_base(str(base), self.nf4)
            export_deepspeed(checkpoint.path, out, model_files_from=base, tag="actor", lora=self.lora, base=rounded)
            yield out


def find_targets(config: EvaluateConfig) -> tuple[EvaluateConfig, tuple[Target, ...], list[str]]:
    """The models that `config` names, in the order of their steps.

    For a run also the configuration with its base model and held-out prompts, unless they were given, and a line each.
    Raises InputError for a folder that is no run, or lacks a step.
    """
    if config.checkpoints.folder is not None:
        return _of_run(config, Path(config.checkpoints.folder))
    if config.rollout.urls:
        return config, (Target(name="servers"),), []
    if config.model.path == BUILTIN_MODEL:
        return config, (Target(name="builtin_tiny"),), []
    path = find_model_folder(config.model.path)
    is_run = bool(CheckpointReader(path / "checkpoints").steps())
    check_value(config, "model.path", not is_run, f"no run folder; give checkpoints.folder={path}, or {path / 'model'}")
    name = re.sub(r"[^\w.+=-]", "_", Path(config.model.path).name) or "model"
    return config, (Target(name=name, path=path),), []


def _of_run(config: EvaluateConfig, run: Path) -> tuple[EvaluateConfig, tuple[Target, ...], list[str]]:
    reader, wanted = CheckpointReader(run / "checkpoints"), config.checkpoints
    steps, tree, notes = reader.steps(), _run_config(run), []
    check_value(config, "checkpoints.steps", set(wanted.steps) <= set(steps), ", ".join(map(str, steps)))
    if config.model.path == BUILTIN_MODEL:
        path = str(value_at(tree, "model.path"))
        path = str(run / INITIAL_MODEL) if path == BUILTIN_MODEL else path
        path = str(run / WARM_START_MODEL) if (run / WARM_START_MODEL).is_dir() else path
        notes.append(f"model.path={path}: config and tokenizer of the run")
        config = replace(config, model=replace(config.model, path=path))
    if not config.data.val:
        written = run / TASK / "val.parquet"
        files = (str(written),) if written.is_file() else tuple(value_at(tree, "data.val") or ())
        notes.append(f"data.val={', '.join(files)}: the held-out prompts of the run")
        config = replace(config, data=replace(config.data, val=files))
    lora, nf4 = _adapters(tree)
    chosen = sorted(set(wanted.steps)) or (steps[-1:] if wanted.newest else steps)
    targets = (
        Target(name=folder_name(step), step=step, path=reader.root / folder_name(step), lora=lora, nf4=nf4)
        for step in chosen
    )
    return config, tuple(targets), notes


def _run_config(run: Path) -> Any:
    """The configuration of a run that has checkpoints."""
    try:
        if not CheckpointReader(run / "checkpoints").steps():
            raise FileNotFoundError("it has no checkpoints")
        return parse_typed((run / "config.yaml").read_text(encoding="utf-8"), None)
    except (OSError, YamlError) as error:
        remedy = "give one model folder as model.path, such as model.path=FOLDER/checkpoint-100"
        allowed = "the folder of a run with checkpoints"
        raise InputError(
            str(error), field="checkpoints.folder", value=str(run), allowed=allowed, remedy=remedy
        ) from error


def _adapters(tree: Any) -> tuple[dict[str, Any] | None, ds_engine.EngineConfig | None]:
    """PEFT's settings of a run's adapters, and the engine that computes their base if that is in NF4."""
    engine = next(own for section in ("actor", "engine") if (own := value_at(tree, section)) is not MISSING)
    lora = engine["lora"]
    if lora is None:
        return None, None
    nf4 = ds_engine.EngineConfig(dtype=engine["dtype"]) if lora["base_format"] == "nf4" else None
    return {"lora_alpha": lora["alpha"], "use_rslora": lora["rslora"]}, nf4
