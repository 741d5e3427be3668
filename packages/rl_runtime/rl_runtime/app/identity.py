"""Identity of a run: its settings and digests of its inputs. A resume compares them with those of the checkpoint."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ckpt import Checkpoint
from plinth_base.model_folder import TOKENIZER_FILES, find_model_folder, weight_files
from run_kit.config.redaction import yaml_without_secrets

from ..config import BUILTIN_MODEL
from ..errors import InputError, naming_key

INPUTS_FILE = "inputs.json"
"""File of a run folder with the digests of its inputs."""
_FILES = {
    "tokenizer": (*TOKENIZER_FILES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json"),
    "template": ("chat_template.jinja", "chat_template.json"),
    "config.json": ("config.json",),
}
"""Part of a model folder -> its files."""
_BLOCK_BYTES = 1 << 20
_WHOLE_BYTES = 256 << 20
"""A larger file is read in `_NUM_BLOCKS` blocks at equal distances, which any training changes."""
_NUM_BLOCKS = 64

_DEFINING = {
    **dict.fromkeys(("actor.lora", "actor.optim", "critic.lora", "critic.optim", "engine.lora", "engine.optim"), ""),
    **dict.fromkeys(("algorithm", "dynamic_sampling", "oversampling", "sampling", "task"), ""),
    **dict.fromkeys(("batch.train_batch_size", "batch.mini_batch_size"), ""),
    **dict.fromkeys(("actor.router_replay", "rollout.kv_cache_dtype", "rollout.quantization"), ""),
    "data": "max_val_prompts",
    "episode": "isolated max_environments memory_gib start_timeout_s step_timeout_s timeout_s",
    "reward": "api_key api_key_file num_workers start_timeout_s timeout_s url",
    "supervised": "epochs num_samples sample_tokens steps",
    "teacher": "gpus server",
}
"""Settings and sections that decide what is learned from what -> exceptions: places, time limits, the run's length."""
_INPUTS = (
    *("data.train", "data.val", "model.path", "reward.model", "teacher.model"),
    *("supervised.files", "supervised.val_files", "warm_start.files"),
)
"""Settings that name an input, whose digest is compared instead."""
_UNREAD = ("trainer.resume", "trainer.resume_from", "trainer.allow_changes", "trainer.start_over_if_damaged")
_NAMED_BY_USERS = ("states_from", "terms", "options", "loss_options", "chat_template_kwargs")
_NOT_RESUMED = ("data.val", "supervised.val_files", "warm_start.files")
"""Inputs that no later step trains on."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting or an input that a resumed run does not have in common with the checkpoint."""

    key: str
    there: Any
    here: Any
    is_defining: bool
    """True if the difference changes what is trained on, so that a resume refuses it."""

    def __str__(self) -> str:
        return f"{self.key}: {self.there} in the checkpoint, {self.here} here"


def input_digests(config: Any, rows: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """Key -> digest of each input of a run; the built-in model and its task, which follow from settings, have none.

    Args:
        rows: the loaded prompts and examples by the key of their files.
    """
    if config.model.path == BUILTIN_MODEL:
        digests = {}
    else:
        digests = {key: _digest(repr(row).encode() for row in part) for key, part in rows.items() if part}
        digests |= _folder_digests("model.path", config.model.path)
    for section in ("reward", "teacher"):
        path = getattr(getattr(config, section, None), "model", None)
        if path is not None and path != BUILTIN_MODEL:
            digests |= _folder_digests(f"{section}.model", path)
    return digests


def check_same_run(
    checkpoint: Checkpoint, config: Any, digests: Mapping[str, str], *, allows_changes: bool
) -> list[str]:
    """A line for each difference from the run that wrote the checkpoint.

    Raises:
        InputError: a difference makes this another run, and `allows_changes` is False.
    """
    state = checkpoint.state
    there, here = (yaml.safe_load(text or "{}") for text in (state.get("config"), yaml_without_secrets(config)))
    differences, lines = compare_settings(there, here), []
    if "inputs" in state:
        differences += compare_inputs(state["inputs"], digests, keeps_weights=_keeps_weights(config))
    elif digests:
        lines.append("resume: the checkpoint has no digests of its inputs, which were not compared")
    defining = [difference for difference in differences if difference.is_defining]
    if defining and not allows_changes:
        first, others = defining[0], [f"; {difference}" for difference in defining[1:]]
        raise InputError(
            f"the run of {checkpoint.path} cannot be continued with other settings or inputs{''.join(others)}",
            field=first.key,
            value=first.here,
            allowed=f"{first.there}, as in that run",
            remedy="trainer.allow_changes=true goes on anyway",
        )
    return [*(f"resume: {difference}" for difference in differences), *lines]


def compare_settings(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """Differences of two configurations; a section that only one of them has belongs to another app."""
    sections = [
        Difference(key=key, there=_presence(key in there), here=_presence(key in here), is_defining=True)
        for key in sorted(there.keys() ^ here.keys())
        if there and isinstance(there.get(key, here.get(key)), Mapping)
    ]
    return sections + [
        Difference(key=key, there=before, here=after, is_defining=_defines(key))
        for key, before, after in _different_values(there, here)
        if key not in _UNREAD
    ]


def _different_values(
    there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Keys that both have, with other values. Other versions have other keys; those of `_NAMED_BY_USERS` are values."""
    for name in (name for name in here if name in there):
        before, after = there[name], here[name]
        if isinstance(before, Mapping) and isinstance(after, Mapping) and name not in _NAMED_BY_USERS:
            yield from _different_values(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}", before, after


def compare_inputs(there: Mapping[str, str], here: Mapping[str, str], *, keeps_weights: bool) -> list[Difference]:
    """Differences of digests; `keeps_weights`: the run goes on reading the weights of `model.path`."""
    unread = (*_NOT_RESUMED, *(() if keeps_weights else ("model.path weights",)))
    return [
        Difference(key=key, there=there.get(key), here=here.get(key), is_defining=key not in unread)
        for key in dict.fromkeys((*here, *there))
        if there.get(key) != here.get(key)
    ]


def _keeps_weights(config: Any) -> bool:
    """True if the base model stays: below adapters, or as a reference; after a warm start, its result does."""
    adapters = any(model.engine.lora is not None for model in config.models)
    return not config.first_stage.trains and (adapters or getattr(config, "keeps_reference", False))


def _defines(key: str) -> bool:
    for section, exceptions in _DEFINING.items():
        rest = f"{key}.".removeprefix(f"{section}.")
        if rest != f"{key}.":
            return rest.partition(".")[0] not in exceptions.split() and key not in _INPUTS
    return False


def _presence(is_there: bool) -> str:
    return "a section" if is_there else "no such section"


def _folder_digests(key: str, path: str) -> dict[str, str]:
    folder = find_model_folder(path)
    parts = {name: [folder / file for file in files] for name, files in _FILES.items()}
    with naming_key(key):
        parts["weights"] = list(weight_files(folder))
    return {
        f"{key} {name}": _digest(block for path in files if path.is_file() for block in _blocks(path))
        for name, files in parts.items()
        if any(path.is_file() for path in files)
    }


def _blocks(path: Path) -> Iterable[bytes]:
    """The bytes of a file; of a large one its size and some blocks, the first (names and shapes) among them."""
    size = path.stat().st_size
    step = _BLOCK_BYTES if size <= _WHOLE_BYTES else size // _NUM_BLOCKS
    yield str(size).encode()
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            yield file.read(_BLOCK_BYTES)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
