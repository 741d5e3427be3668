"""The frozen weights that the adapters of several engines of a process share."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import EngineConfigError

if TYPE_CHECKING:
    from torch import nn

    from ..batch import Head
    from ..config import EngineConfig


class SharedBase:
    """Models of folders whose frozen weights LoRA engines share (`ZeroEngine.from_pretrained(base=...)`).

    Each engine has modules, adapters, gradients and an optimizer of its own, so that its steps have the bits of an
    engine alone, whatever the others do in between. Dropout draws from the generators of the process.
    """

    def __init__(self) -> None:
        self._models: dict[Any, nn.Module] = {}

    def model(self, model_path: str, config: EngineConfig, head: Head, load: Callable[[], nn.Module]) -> nn.Module:
        """A model without adapters, with the weights of the first one that `load` returned for these settings.

        Raises:
            EngineConfigError: an engine with these settings cannot share its weights.
        """
        if config.lora is None or head != "lm":
            raise EngineConfigError("without adapters, or with a value head, all weights are its own", field="base")
        if config.zero.stage == 3:
            problem = "weights that an engine shards cannot be shared"
            raise EngineConfigError(problem, field="zero.stage", value=3, allowed="1, 2")
        # The base does not depend on the other settings of adapters, nor on those of steps.
        lora = type(config.lora)(base_format=config.lora.base_format)
        key = model_path, repr(replace(config, seed=0, optim=type(config.optim)(), lora=lora))
        if key not in self._models:
            self._models[key] = load()
        first = self._models[key]
        return deepcopy(first, {id(weight): weight for weight in first.parameters()})
