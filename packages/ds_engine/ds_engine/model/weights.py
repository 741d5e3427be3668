"""Weights of a model folder, compared with the model before a process loads them: names and shapes, and their values.

transformers draws what a folder lacks at random and leaves out what the model lacks, with a warning at most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from plinth_base.errors import listed
from plinth_base.model_folder import ModelFolderError, stored_tensors, weight_files

from ..errors import ModelError
from ..upstream import auto_class, transformers_message, warn_on_first_rank
from .parts import VALUE_HEAD

if TYPE_CHECKING:
    from ..batch import Head

_NEW_HEAD = f"{VALUE_HEAD}.weight"
_HEADS = ("lm_head.", "embed_out.", f"{VALUE_HEAD}.")


def read_config(model_path: str) -> Any:
    """The transformers configuration of a model folder.

    Raises:
        ModelError: there is none, or transformers does not know it.
    """
    from transformers import AutoConfig

    if not (Path(model_path) / "config.json").is_file():
        problem = "it is not a Hugging Face model folder: it has no config.json"
        raise ModelError(problem, field="model_path", value=model_path)
    try:
        return AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:  # transformers' strict configurations have exceptions of their own
        problem = f"its configuration cannot be loaded: {transformers_message(error)}"
        raise ModelError(problem, field="model_path", value=model_path) from error


def check_weights(
    model_path: str,
    *,
    head: Head = "lm",
    new_head: bool = True,
    report: Callable[[str], None] = warn_on_first_rank,
) -> None:
    """Check that the safetensors files hold every weight of the model in its shape. Reads only their headers, and both
    of two tied weights.

    transformers itself loads the files' tensors without data into the model without data, so that its renaming and
    fusing of tensors applies. Folders without safetensors are checked when they are loaded.

    Args:
        new_head: the value head may be missing, and is drawn.
        report: gets a line about tensors in the files that the model has no weight for.

    Raises:
        ModelError: a weight is missing or has another shape, two that the configuration ties differ, or a file is
            damaged.
    """
    from .trial import silenced_transformers

    stored, model_config = _stored(model_path), read_config(model_path)
    if not stored:
        return
    if head == "value":
        model_config.num_labels = 1
    try:
        with silenced_transformers():
            with torch.device("meta"):
                tensors = {
                    name: torch.empty(one.shape, dtype=getattr(torch, one.dtype, torch.uint8))
                    for name, one in stored.items()
                }
                model = auto_class(model_config, head).from_config(model_config, trust_remote_code=False)
            _, info = type(model).from_pretrained(
                None,
                config=model_config,
                state_dict=tensors,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (ImportError, NotImplementedError):
        return  # a conversion that needs data or a package, as of quantized folders: the loading itself checks these
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        problem = f"its tensors do not become a {model_config.model_type}: {transformers_message(error)}"
        raise ModelError(problem, field="model_path", value=model_path) from error
    refuse_incomplete(model_path, info, new_head=head == "value" and new_head)
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        if name in stored and source in stored and not _are_equal(model_path, name, source):
            problem = f"{name} and {source} differ, and its configuration ties them (tie_word_embeddings)"
            remedy = "set tie_word_embeddings to false in config.json, or remove the tensor that is not used"
            raise ModelError(problem, field="model_path", value=model_path, remedy=remedy)
    if unused := [name for name in info["unexpected_keys"] if not name.startswith(_HEADS)]:
        names = listed(sorted(unused))
        report(f"{model_path}: tensors that are no weights of the model are not used ({len(unused)}): {names}")


def refuse_incomplete(model_path: str, info: Mapping[str, Any], *, new_head: bool) -> bool:
    """Refuse a folder by transformers' loading info; returns True if the value head is missing and may be.

    Raises:
        ModelError: another weight is missing or has another shape.
    """
    missing = set(info["missing_keys"])
    lacks_head = _NEW_HEAD in missing
    if lacks_head and new_head:
        missing.remove(_NEW_HEAD)
    elif missing == {_NEW_HEAD}:
        problem = f"it has no value head ({_NEW_HEAD}), which a model that is not trained needs"
        raise ModelError(problem, field="model_path", value=model_path)
    for name, there, here in sorted(info["mismatched_keys"]):
        problem = f"{name} has shape {tuple(there)}, and the configuration says {tuple(here)}"
        raise ModelError(problem, field="model_path", value=model_path)
    if missing:
        unused = set(info["unexpected_keys"])
        remedy = f"it has {listed(sorted(unused))}, which no weight of the model is called" if unused else None
        problem = f"it lacks weights of the model: {listed(sorted(missing))}"
        raise ModelError(problem, field="model_path", value=model_path, remedy=remedy)
    return lacks_head


def _are_equal(model_path: str, *names: str) -> bool:
    """True if two stored tensors have the same values."""
    tensors = [tensor for path in weight_files(model_path) for _, tensor in _tensors(path, names)]
    return torch.equal(*tensors)


def check_finite(model_path: str) -> None:
    """Check that no weight in the files is inf or NaN. Reads all of them: 4 to 8 GB a second and core.

    Raises:
        ModelError: a weight is, or a file is damaged.
    """
    _stored(model_path)
    for path in weight_files(model_path):
        for name, tensor in _tensors(path):
            if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
                continue
            # Far faster than isfinite, and passes NaN on.
            if tensor.numel() and not all(bool(end.isfinite()) for end in torch.aminmax(tensor)):
                problem = f"{name} in {path.name} contains inf or NaN"
                raise ModelError(problem, field="model_path", value=model_path)


def _tensors(path: Path, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a weight file with their names; None: all. Raises ModelError for a damaged .bin file."""
    from safetensors import safe_open

    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # the file is no mapping
                if names is None or name in names:
                    yield name, file.get_tensor(name)
        return
    try:
        with path.open("rb") as stream:
            is_zip = stream.read(2) == b"PK"  # torch's own format since 1.6, which can be mapped
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (OSError, EOFError, RuntimeError, ValueError, AttributeError, UnpicklingError) as error:
        problem = f"{path.name} cannot be read: {transformers_message(error)}"
        raise ModelError(problem, field="model_path", value=str(path.parent), remedy="copy it again") from error
    yield from ((name, tensor) for name, tensor in tensors.items() if names is None or name in names)


def _stored(model_path: str) -> Mapping[str, Any]:
    try:
        return stored_tensors(model_path)
    except ModelFolderError as error:
        problem = f"{Path(str(error.value)).name}: {error.problem}"
        raise ModelError(problem, field="model_path", value=model_path, remedy=error.remedy) from error
