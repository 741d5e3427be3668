"""What a checkpoint was written from: names, shapes and dtypes of a model's parameters, compared before a load.

A load that finds out half-way that the model is another leaves one that is neither. So the one who saves gives
`publish(models={"actor": describe_model(model)})`, which becomes `models.json` in the checkpoint, and the one who loads
calls `check_model(checkpoint, "actor", model)` before anything is touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .errors import ArchitectureMismatchError, CheckpointDamagedError
from .manifest import MANIFEST_NAME, Manifest, ManifestError, check_files

if TYPE_CHECKING:
    from .reader import Checkpoint

__all__ = ["MODELS_NAME", "check_model", "describe_model"]

MODELS_NAME = "models.json"
_NUM_SHOWN = 3


def describe_model(model: Any) -> dict[str, dict[str, Any]]:
    """`{"shape": [...], "dtype": "bfloat16"}` by parameter name, JSON-able; tied parameters once.

    `model` is a torch module, or pairs of name and tensor. A parameter that ZeRO-3 has partitioned counts with its
    whole shape. Nothing is gathered and no value is read.
    """
    pairs: Iterable[tuple[str, Any]] = model.named_parameters() if hasattr(model, "named_parameters") else model
    return {
        name: {
            "shape": [int(size) for size in getattr(tensor, "ds_shape", tensor.shape)],
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        for name, tensor in pairs
    }


def check_model(checkpoint: Checkpoint, name: str, model: Any) -> bool:
    """Compare `model` with what the checkpoint recorded under `name`; True when names and shapes are the same.

    `model` as for `describe_model`, or what it returned elsewhere. dtypes may differ: loading casts. False when the
    checkpoint recorded nothing under that name. Nothing is loaded.

    Raises ArchitectureMismatchError, naming what differs, and CheckpointDamagedError when the record is damaged.
    """
    problem: object = None
    saved: Mapping[str, Any] | None = None
    try:
        manifest = Manifest.read(checkpoint.path)
        if MODELS_NAME not in manifest.files:
            return False
        problem = next(iter(check_files(checkpoint.path, manifest, [MODELS_NAME])), None)
        saved = json.loads((checkpoint.path / MODELS_NAME).read_text(encoding="utf-8")).get(name)
    except ManifestError as error:
        problem = f"{MANIFEST_NAME}: {error}"
    except (OSError, ValueError) as error:
        problem = problem or f"{MODELS_NAME}: is no JSON: {error}"
    if problem is not None:
        raise CheckpointDamagedError(
            f"{checkpoint.path}: the checkpoint is damaged: {problem}", step=checkpoint.step, files=(MODELS_NAME,)
        )
    if saved is None:
        return False
    here = dict(model) if isinstance(model, Mapping) else describe_model(model)
    differences = _differences(saved, here)
    if differences:
        raise ArchitectureMismatchError(
            f"{checkpoint.path}: was written from another {name!r} than the one here: {'; '.join(differences)}. "
            "Nothing was loaded. Load it into the model it was written from."
        )
    return True


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    found = []
    reshaped = [
        f"{name} {saved[name]['shape']} there, {list(here[name]['shape'])} here"
        for name in saved
        if name in here and list(saved[name]["shape"]) != list(here[name]["shape"])
    ]
    for what, names in (
        ("only in the checkpoint", [name for name in saved if name not in here]),
        ("only here", [name for name in here if name not in saved]),
        ("of another shape", reshaped),
    ):
        if names:
            more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
            found.append(f"{what}: {', '.join(names[:_NUM_SHOWN])}{more}")
    return found
