"""The models that a command evaluates: a model folder, checkpoints of a run, a folder of checkpoints, or servers."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import ds_engine
from apps.evaluate.config import EvaluateConfig
from apps.evaluate.results import Evaluation
from ckpt import CheckpointError, describe_files, export_deepspeed, export_merged
from ckpt.manifest import folder_name
from ckpt.reader import CheckpointReader
from ckpt.tools.lora_export import ADAPTER_CONFIG
from plinth_base.model_folder import check_model_folder, find_model_folder, weight_files
from rl_runtime import InputError
from rl_runtime.app.inputs import INITIAL_MODEL, TASK
from rl_runtime.config import BUILTIN_MODEL
from rl_runtime.errors import naming_key
from rl_runtime.training.run_files import WARM_START_MODEL
from run_kit.config.yaml import YamlError, parse_typed

_HF_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_DIGESTED = ("adapter_model.safetensors", "config.json", "adapter_config.json", "tokenizer*", "chat_template*")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model to evaluate."""

    name: str
    """Name in the results; each of an evaluation has another."""
    step: int | None = None
    kind: Literal["folder", "adapter", "checkpoint", "servers", "builtin"]
    """A Hugging Face folder; a PEFT adapter of `model.path`; a checkpoint of a run; the servers at `rollout.urls`; the
    built-in model. The last two have no path."""
    path: Path | None = None
    lora: dict[str, Any] | None = None
    """Settings of the adapters in a checkpoint of a run."""
    nf4: ds_engine.EngineConfig | None = None
    """The engine that trained these adapters on a base in NF4; None: on a plain one."""

    def digest(self) -> str | None:
        """SHA-256 over the checksums of the files that make the model; None without a path.

        Raises:
            ckpt.CheckpointDamagedError: the checkpoint has no manifest.
            ModelFolderError: the index of the weights is damaged, or names a missing file.
        """
        if self.path is None:
            return None
        if self.kind == "checkpoint":
            return CheckpointReader(self.path.parent).manifest(self.step or 0).checksum
        # An adapter beside a model is not part of it.
        patterns = _DIGESTED if self.kind == "adapter" else _DIGESTED[1:]
        others = (path for pattern in patterns for path in self.path.glob(pattern) if path.is_file())
        files = {path.name: path for path in (*weight_files(self.path), *others)}
        lines = [f"{name} {entry.checksum}" for name, entry in sorted(describe_files(files).items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @contextmanager
    def open(self, config: EvaluateConfig, folder: Path) -> Iterator[Path | None]:
        """The model as a Hugging Face folder: its own, or one below `folder` that is deleted afterwards.

        Raises:
            ckpt.CheckpointError: the checkpoint is damaged, or cannot be exported.
        """
        if self.path is None or self.kind == "folder":
            yield self.path
            return
        base = find_model_folder(config.model.path)
        with TemporaryDirectory(dir=folder, prefix="export_") as temporary:
            out = Path(temporary) / self.name
            if self.kind == "adapter":
                export_merged(self.path, out, base=base)
            else:
                checkpoint = CheckpointReader(self.path.parent).load(self.step or 0)
                rounded = None if self.nf4 is None else ds_engine.nf4_base(str(base), self.nf4)
                role = config.checkpoints.role
                export_deepspeed(checkpoint.path, out, model_files_from=base, tag=role, lora=self.lora, base=rounded)
            yield out


def is_missing(target: Target, table: Mapping[str, Evaluation]) -> bool:
    """True for a model that is not in the table, or whose files have changed since."""
    try:
        return target.name not in table or table[target.name].digest != target.digest()
    except CheckpointError:  # names the fault when the model is opened
        return True


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The models to evaluate, and the configuration with base model and prompts that their folder names."""

    config: EvaluateConfig
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    """Settings that were taken from the folder, one line each."""


def find_targets(config: EvaluateConfig) -> Targets:
    """The models that `config` names, in the order of their steps.

    Raises:
        InputError: a folder has no checkpoints, lacks a step, or its base model is not known.
    """
    if config.only_compare:
        return Targets(config=config)
    if config.checkpoints.folder is not None:
        folder = Path(config.checkpoints.folder)
        root = _run_root(folder)
        return _of_folders(config, folder) if root is None else _of_run(config, root)
    if config.rollout.urls:
        return Targets(config=config, targets=(Target(name="servers", kind="servers"),))
    if config.model.path == BUILTIN_MODEL:
        return Targets(config=config, targets=(Target(name="builtin_tiny", kind="builtin"),))
    path = find_model_folder(config.model.path)
    if _run_root(path) is not None:
        allowed = f"no run folder; give checkpoints.folder={path}, or {path / 'model'}"
        raise InputError(field="model.path", value=str(path), allowed=allowed)
    name = re.sub(r"[^\w.+=-]", "_", Path(config.model.path).name) or "model"
    return Targets(config=config, targets=(Target(name=name, kind="folder", path=path),))


def _run_root(folder: Path) -> Path | None:
    """The folder of checkpoints of a run, given the run folder or that folder; None for other folders."""
    return next((root for root in (folder / "checkpoints", folder) if CheckpointReader(root).steps()), None)


def _selected(config: EvaluateConfig, available: list[int]) -> list[int]:
    """The steps among `available` (ascending) that the configuration asks for."""
    wanted = config.checkpoints
    if missing := [step for step in wanted.steps if step not in available]:
        allowed = f"{', '.join(map(str, available))} (in {wanted.folder})"
        raise InputError(field="checkpoints.steps", value=missing[0], allowed=allowed)
    return sorted(set(wanted.steps)) or (available[-1:] if wanted.newest else available)


# ---------------------------------------------------------------- checkpoints of a run


def _of_run(config: EvaluateConfig, root: Path) -> Targets:
    run, role, notes = root.parent, config.checkpoints.role, []
    tree = _run_config(run)
    section = role if _value(tree, role, "lora") else "engine"  # engine: of the SFT app
    lora = _value(tree, section, "lora")
    nf4 = _nf4(tree, run, section)
    if lora is not None:  # as PEFT has it
        lora = {"lora_alpha": lora["alpha"], "use_rslora": bool(lora.get("rslora"))}
    targets = [
        Target(name=folder_name(step), step=step, kind="checkpoint", path=root / folder_name(step), lora=lora, nf4=nf4)
        for step in _selected(config, CheckpointReader(root).steps())
    ]
    if config.model.path == BUILTIN_MODEL:
        path = _base_model(run, tree)
        notes.append(f"model.path={path}: config and tokenizer of the run")
        config = replace(config, model=replace(config.model, path=path))
    if not config.data.val:
        given, written = _value(tree, "data", "val") or (), run / TASK / "val.parquet"
        files = (given,) if isinstance(given, str) else tuple(map(str, given))
        files = (str(written),) if not files and written.is_file() else files
        notes.append(f"data.val={', '.join(files)}: the held-out prompts of the run")
        config = replace(config, data=replace(config.data, val=files))
    return Targets(config=config, targets=tuple(targets), notes=tuple(notes))


def _run_config(run: Path) -> dict[str, Any]:
    """The run's config.yaml; empty if there is none."""
    try:
        tree = parse_typed((run / "config.yaml").read_text(encoding="utf-8"), None)
    except FileNotFoundError:
        return {}
    except (OSError, YamlError) as error:
        problem = f"config.yaml cannot be read: {error}"
        raise InputError(problem, field="checkpoints.folder", value=str(run)) from error
    return tree if isinstance(tree, dict) else {}


def _value(tree: Any, *path: str) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _base_model(run: Path, tree: dict[str, Any]) -> str:
    """The model folder that the run started from."""
    if (run / WARM_START_MODEL).is_dir():
        return str(run / WARM_START_MODEL)
    path = _value(tree, "model", "path")
    if not isinstance(path, str):
        remedy = "its config.yaml has no model.path; give model.path"
        raise InputError(field="checkpoints.folder", value=str(run), remedy=remedy)
    return str(run / INITIAL_MODEL) if path == BUILTIN_MODEL else path


def _nf4(tree: dict[str, Any], run: Path, section: str) -> ds_engine.EngineConfig | None:
    """The run's engine, if it rounds its base to NF4: the checkpoint has the adapters, the model folder the base."""
    if _value(tree, section, "lora", "base_format") != "nf4":
        return None
    dtype = _value(tree, section, "dtype")
    if dtype is None:
        problem = f"its config.yaml lacks {section}.dtype, in which its NF4 base is computed"
        remedy = f"evaluate the merged model that the run exports at its end: model.path={run / 'model'}"
        raise InputError(problem, field="checkpoints.folder", value=str(run), remedy=remedy)
    return ds_engine.EngineConfig(dtype=dtype)


# ---------------------------------------------------------------- folders checkpoint-100, checkpoint-200, ...


def _of_folders(config: EvaluateConfig, folder: Path) -> Targets:
    paths = folder.iterdir() if folder.is_dir() else ()
    by_step = {int(match[1]): path for path in paths if (match := _HF_CHECKPOINT.fullmatch(path.name))}
    if not by_step:
        allowed = "a run folder with checkpoints, or a folder with folders checkpoint-100, ..."
        remedy = "one model folder is given as model.path"
        raise InputError(field="checkpoints.folder", value=str(folder), allowed=allowed, remedy=remedy)
    targets = []
    for step in _selected(config, sorted(by_step)):
        path = by_step[step]
        is_adapter = (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()
        targets.append(Target(name=path.name, step=step, kind="adapter" if is_adapter else "folder", path=path))
    _check_folders([by_step[target.step or 0] for target in targets if target.kind == "folder"])
    if config.model.path != BUILTIN_MODEL:
        return Targets(config=config, targets=tuple(targets))
    if adapter := next((target for target in targets if target.kind == "adapter"), None):
        allowed = f"the base model of the adapter {adapter.path}"
        raise InputError(field="model.path", value=BUILTIN_MODEL, allowed=allowed)
    config = replace(config, model=replace(config.model, path=str(targets[-1].path)))
    note = f"model.path={config.model.path}: the tokenizer of the newest checkpoint"
    return Targets(config=config, targets=tuple(targets), notes=(note,))


def _check_folders(folders: list[Path]) -> None:
    """Refuses folders that lack something, and other tokenizers: all models get the same token ids."""
    for folder in folders:
        with naming_key("checkpoints.folder"):
            check_model_folder(folder)
        first, own = folders[0] / "tokenizer.json", folder / "tokenizer.json"
        if first.is_file() and own.is_file() and first.read_bytes() != own.read_bytes():
            problem = f"{folder.name} has another tokenizer than {folders[0].name}"
            remedy = "evaluate them one at a time (model.path), and compare the results"
            raise InputError(problem, field="checkpoints.folder", remedy=remedy)
