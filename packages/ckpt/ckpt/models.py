"""Records names, shapes and dtypes of a model's parameters in a checkpoint and compares them before a load.

A load that fails half-way leaves a model with mixed weights. So a save calls `publish(models={"actor":
describe_model(model)})`, which writes `models.json` into the checkpoint, and a load first calls
`check_model(checkpoint, "actor", model)`.
"""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from plinth_base.errors import listed

from .errors import ArchitectureMismatchError, CheckpointDamagedError
from .manifest import MANIFEST_NAME, CheckpointManifest, ManifestError, check_files

if TYPE_CHECKING:
    from .reader import Checkpoint


MODELS_NAME = "models.json"


def describe_model(model: Any) -> dict[str, dict[str, Any]]:
    """`{"shape": [...], "dtype": "bfloat16"}` by parameter name, JSON-serializable; tied parameters once.

    `model` is a torch module, or pairs of name and tensor. A parameter that ZeRO-3 has partitioned has its whole shape.
    Gathers nothing and reads no values.
    """
    pairs: Iterable[tuple[str, Any]] = model.named_parameters() if hasattr(model, "named_parameters") else model
    return {
        name: {
            "shape": [int(size) for size in getattr(tensor, "ds_shape", tensor.shape)],
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        for name, tensor in pairs
    }


def check_model(checkpoint: "Checkpoint", name: str, model: Any) -> bool:
    """Compare `model` with the checkpoint's record `name`; True when names and shapes are equal.

    `model` is an argument of `describe_model`, or its result. dtypes may differ: loading casts. Returns False when the
    checkpoint has no record of that name. Loads nothing.

    Raises ArchitectureMismatchError, which names the differences, or CheckpointDamagedError for a damaged record.
    """
    problem: object = None
    saved: Mapping[str, Any] | None = None
    try:
        manifest = CheckpointManifest.read(checkpoint.path)
        if MODELS_NAME not in manifest.files:
            return False
        problem = next(iter(check_files(checkpoint.path, manifest, [MODELS_NAME])), None)
        saved = json.loads((checkpoint.path / MODELS_NAME).read_text(encoding="utf-8")).get(name)
    except ManifestError as error:
        problem = f"{MANIFEST_NAME}: {error}"
    except (OSError, ValueError, RecursionError) as error:
        problem = problem or f"{MODELS_NAME}: is not JSON: {error}"
    if problem is not None:
        raise CheckpointDamagedError(
            f"{checkpoint.path}: the checkpoint is damaged: {problem}", step=checkpoint.step, files=(MODELS_NAME,)
        )
    if saved is None:
        return False
    here = dict(model) if isinstance(model, Mapping) else describe_model(model)
    lost, added = ([name for name in one if name not in other] for one, other in ((saved, here), (here, saved)))
    reshaped = [name for name in saved if name in here and list(saved[name]["shape"]) != list(here[name]["shape"])]
    if lost or added or reshaped:
        shapes = [f"{name} {saved[name]['shape']} in the checkpoint, {here[name]['shape']} here" for name in reshaped]
        differences = [
            f"{kind}: {listed(names)}"
            for kind, names in (("only in the checkpoint", lost), ("only here", added), ("with another shape", shapes))
            if names
        ]
        raise ArchitectureMismatchError(
            f"{checkpoint.path} was written from another model than this one: {'; '.join(differences)}. "
            "Nothing was loaded",
            field=name,
            remedy="load it into the model that it was written from",
            only_in_checkpoint=tuple(lost),
            only_here=tuple(added),
            reshaped=tuple(reshaped),
        )
    return True
