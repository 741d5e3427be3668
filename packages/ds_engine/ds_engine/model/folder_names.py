"""Maps a model's tensors to those of its Hugging Face folder, whose names and shapes may differ.

transformers 5 renames and fuses tensors while it loads a folder: the experts of a mixture become one parameter a layer.
`revert_weight_conversion` is what `save_pretrained` undoes that with. It runs here once, on meta tensors: a tensor of
the folder that is a view of one parameter can then be cut out of it at any time, without copies of other tensors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..upstream import FENCE

NAMES = FENCE.patch(
    name="names of the model folder",
    reason="exports and weight syncs carry the folder's names and shapes, not those that transformers gives them",
    otherwise="refused",
    reads={
        "torch:UntypedStorage": ("_cdata",),
        "torch.nn:Module": ("_non_persistent_buffers_set",),
        "transformers.core_model_loading": ("revert_weight_conversion(model, state_dict)", "_weight_conversions"),
        "transformers.core_model_loading:WeightTransform": ("was_used()",),
    },
)


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """Part of a tensor of the model: the tensor `name` of the folder. Units of stride and offset are elements."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    offset: int

    def unpack(self, whole: Tensor) -> Tensor:
        """The part of `whole`, which is contiguous; shares its memory."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


def folder_views(module: nn.Module, metas: Mapping[str, Tensor]) -> dict[str, list[TensorView]]:
    """The tensors of the model folder that lie in each tensor of the model, by the model's names.

    A tensor from which transformers computes the folder's with more than views keeps its name, with a warning;
    transformers loads such a folder as well.

    Args:
        metas: the model's tensors on the meta device, by the model's names, tied ones once.

    Raises:
        EngineConfigError: this version of transformers is not tested.
    """
    NAMES.check()
    from transformers.core_model_loading import revert_weight_conversion

    sources = {meta.untyped_storage()._cdata: name for name, meta in metas.items()}
    with _WithoutCopies():
        tensors = revert_weight_conversion(module, dict(metas))
    views: dict[str, list[TensorView]] = {name: [] for name in metas}
    for name, part in tensors.items():
        source = sources.get(part.untyped_storage()._cdata)
        if source is not None:
            views[source].append(_view(name, part))
    kept = [name for name in views if sum(math.prod(view.shape) for view in views[name]) != metas[name].numel()]
    if kept:
        warnings.warn(
            f"{type(module).__name__}: {len(kept)} tensors are exported under transformers' own names, such as "
            f"{kept[0]}, because the model folder's cannot be cut out of them",
            stacklevel=2,
        )
    return views | {name: [_view(name, metas[name])] for name in kept}


def drop_unused_conversions(model: Any) -> None:
    """Forget conversions that matched nothing in the folder: with ZeRO-3, transformers keeps all of them.

    Reverted, they would rename tensors that they never touched (`LayerNorm.weight` to `LayerNorm.gamma`).

    Raises:
        EngineConfigError: this version of transformers is not tested.
    """
    NAMES.check()
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        model._weight_conversions = [one for one in conversions if one.was_used()]


def _view(name: str, part: Tensor) -> TensorView:
    offset = int(part.storage_offset())
    return TensorView(name=name, shape=tuple(part.shape), dtype=part.dtype, stride=part.stride(), offset=offset)


class _WithoutCopies(TorchDispatchMode):
    """Lets copies be views, so that the storage of a result names its source."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))
