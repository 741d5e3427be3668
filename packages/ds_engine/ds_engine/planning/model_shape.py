"""Sizes of a decoder from its Hugging Face config.json, by its architecture on the meta device, without memory."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import LoraConfig
from ..errors import EngineConfigError, ModelError
from ..upstream import auto_class, text_part, transformers_message

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders whose activations are known to the byte."""
COMPILED = (*FAMILIES, "qwen3_moe")
"""Families whose compiled layers were measured on GPUs."""
_KNOWN = {*FAMILIES, "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}
"""The families, and text models of vision-language models that have the layers of one."""
TABLES = ("embed_tokens", "lm_head", "score")
"""Weights that are no matrices for an optimizer."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter of a model."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def layer(self) -> str:
        """The last name before `.weight`, such as q_proj."""
        return self.name.removesuffix(".weight").rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """Sizes of the vision tower and projector of a vision-language model."""

    weights: tuple[Weight, ...]
    num_layers: int
    hidden: int
    layer_width: int
    """Inputs and outputs of all matrices of a layer."""
    patches_per_token: int
    """Patches of which a placeholder's feature is made."""
    pixels_per_patch: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model that determine its memory."""

    vocab: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    qk_norm: bool
    is_exact: bool
    """True for a known family; otherwise the sizes but for `counted` are too large rather than too small."""
    counted: tuple[Weight, ...]
    """All parameters but those of `vision`."""
    family: str = ""
    """`model_type` of the configuration."""
    vision: VisionShape | None = None

    @classmethod
    def read(cls, model: str | Path | Mapping[str, Any]) -> ModelShape:
        """The shape of any architecture that transformers knows.

        Outside of the known families, what a layer keeps is bounded from above: as the intermediate size counts half of
        all inputs and outputs of the largest layer's matrices, of a mixture those of as many experts as a token uses. A
        model without attention heads counts as if it had one as wide as the model.

        Args:
            model: a config.json, its folder, or its content.

        Raises:
            ValueError: the file does not exist, transformers cannot build the model, or the configuration lacks a size.
        """
        import torch
        from transformers import AutoConfig

        if not isinstance(model, Mapping):
            _check_file(Path(model))
        try:
            if isinstance(model, Mapping):
                config = AutoConfig.for_model(**model)
            else:
                config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            text = config.get_text_config()
            with torch.device("meta"):
                built = auto_class(config, "lm").from_config(config, trust_remote_code=False)
            heads = int(getattr(text, "num_attention_heads", None) or 1)  # state-space models have none
            layers, width = int(text.num_hidden_layers), int(text.hidden_size)
        except Exception as error:  # from_config runs the architecture's own code
            reason = f"{type(error).__name__}: {transformers_message(error)}"
            name = model.get("model_type") if isinstance(model, Mapping) else str(model)
            raise ModelError(f"its sizes cannot be counted: {reason}", value=name) from error
        vision = _vision_shape(built, config)
        of_vision = {w.name for w in vision.weights} if vision is not None else set[str]()
        is_exact = text.model_type in _KNOWN and (vision is not None or text is config)
        experts = int(getattr(text, "num_experts_per_tok", None) or 1)
        tables = (built.get_input_embeddings(), built.get_output_embeddings())
        outer = {id(p) for module in tables if module is not None for p in module.parameters()}
        return cls(
            vocab=int(text.vocab_size),
            hidden=width,
            intermediate=int(text.intermediate_size) if is_exact else _widest_layer(built, outer, experts) // 2,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or width // heads),
            tied=tables[1] is None or len(outer) == 1,
            qk_norm=not is_exact or text.model_type.startswith("qwen3"),
            is_exact=is_exact,
            counted=tuple(
                Weight(name=_plain_name(built, p, name), shape=tuple(p.shape))
                for name, p in built.named_parameters()
                if name not in of_vision
            ),
            family=str(config.model_type),
            vision=vision,
        )

    @property
    def query_width(self) -> int:
        """Query features per token."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Key features per token; values have the same number."""
        return self.num_kv_heads * self.head_dim

    def linear_layers(self) -> list[Weight]:
        """Weight matrices of one layer; outside of the known families, of a dense layer with the same widths."""
        hidden, inner = self.hidden, self.intermediate
        shapes = {
            "q_proj": (self.query_width, hidden),
            "k_proj": (self.kv_width, hidden),
            "v_proj": (self.kv_width, hidden),
            "o_proj": (hidden, self.query_width),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        return [Weight(name=name, shape=shape) for name, shape in shapes.items()]

    @property
    def largest_layer(self) -> int:
        """Elements of the largest layer, in a mixture with all its experts. Stage 3 gathers a layer at once."""
        sizes: Counter[str] = Counter()
        for weight in self.counted:
            sizes[_layer_of(weight.name)] += weight.size
        return max((size for layer, size in sizes.items() if layer), default=0)

    def weights(self, head: Literal["lm", "value"] = "lm") -> list[Weight]:
        """All parameters without those of `vision`, in no particular order; a tied LM head is not listed."""
        value_head = [Weight(name="score", shape=(1, self.hidden))] if head == "value" else []
        return [w for w in self.counted if head == "lm" or w.name != "lm_head"] + value_head

    def adapters(self, lora: LoraConfig) -> list[Weight]:
        """LoRA parameters: A [rank, in] and B [out, rank] for each adapted matrix of every layer.

        Raises:
            EngineConfigError: `target_modules` names none of the matrices.
        """
        wanted, layers = lora.target_modules, self.linear_layers()
        names = {last for name in wanted for last in (name, name.rpartition(".")[2])}
        adapted = [w for w in layers if wanted == "all-linear" or w.name in names]
        if not adapted:
            known = ", ".join(sorted({w.name for w in layers}))
            raise EngineConfigError(
                "the model has no such linear layer", field="lora.target_modules", value=wanted, allowed=str(known)
            )
        a = [Weight(name="A", shape=(lora.rank, w.shape[1])) for w in adapted]
        b = [Weight(name="B", shape=(w.shape[0], lora.rank)) for w in adapted]
        return (a + b) * self.num_layers


def _vision_shape(model: Any, config: Any) -> VisionShape | None:
    """None for a model without a vision tower, or with one whose sizes have other names."""
    backbone = getattr(model, "model", model)
    text = text_part(backbone)
    vision: Any = getattr(config, "vision_config", None)
    if text is backbone or vision is None or not isinstance(getattr(vision, "patch_size", None), int):
        return None
    patch = int(vision.patch_size)
    outer = (text, model.get_output_embeddings())
    of_text = {id(p) for part in outer if part is not None for p in part.parameters()}
    sizes = {name: p for name, p in model.named_parameters() if id(p) not in of_text}
    sides = {"spatial_merge_size": vision, "scale_factor": config}
    side = next((int(getattr(one, name)) for name, one in sides.items() if hasattr(one, name)), 1)
    if tokens := getattr(config, "mm_tokens_per_image", None):
        side = int(vision.image_size) // patch // math.isqrt(int(tokens))
    channels = int(getattr(vision, "in_channels", 0) or getattr(vision, "num_channels", 3))
    widths = Counter[str]()
    for name, p in sizes.items():
        widths[_layer_of(name)] += sum(p.shape) if p.ndim == 2 else 0
    return VisionShape(
        weights=tuple(Weight(name=name, shape=tuple(p.shape)) for name, p in sizes.items()),
        num_layers=int(getattr(vision, "depth", None) or vision.num_hidden_layers),
        hidden=int(vision.hidden_size),
        layer_width=max((width for layer, width in widths.items() if layer), default=0),
        patches_per_token=side**2,
        pixels_per_patch=channels * patch**2 * int(getattr(vision, "temporal_patch_size", 1)),
    )


def _plain_name(model: Any, parameter: Any, name: str) -> str:
    """`embed_tokens` and `lm_head` for the two tables, whatever the architecture calls them."""
    for plain, module in (("embed_tokens", model.get_input_embeddings()), ("lm_head", model.get_output_embeddings())):
        if module is not None and any(p is parameter for p in module.parameters()):
            return plain
    return name


def _widest_layer(model: Any, outer: set[int], experts: int) -> int:
    """The sum of rows and columns of all matrices of the layer that has the most."""
    widths: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and id(parameter) not in outer:
            layer = _layer_of(name)
            copies = min(experts, int(parameter.shape[0])) if parameter.ndim == 3 else 1
            widths[layer] = widths.get(layer, 0) + copies * sum(parameter.shape[-2:])
    return max(widths.values(), default=0)


def _layer_of(name: str) -> str:
    """The beginning of a parameter's name, up to the number of its layer; empty outside of layers."""
    number = re.match(r"(.*?\.\d+)\.", name)
    return number[1] if number else ""


def _check_file(path: Path) -> None:
    """Raises ModelError, in one line, unless there is a configuration."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is not None
        hint = f"; the model of this name is fetched by: hf download {path}" if is_name else ""
        raise ModelError(f"neither a config.json nor a folder that contains one{hint}", value=str(path))
