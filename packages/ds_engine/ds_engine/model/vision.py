"""Images of vision-language models: their features take the places of placeholder tokens in a packed row.

The vision tower and its projector run once per micro batch, by upstream's `get_image_features`, over the images of all
prompts; sequences of one prompt share its features. Then the text model runs on the packed embeddings. Its positions
are those of the model's own `get_rope_index` (M-RoPE), features of deeper layers enter where upstream adds them
(deepstack), and tokens of an image attend to each other where upstream's do (Gemma 3).

The tower runs without gradients unless one of its parameters is trained. Each sequence-parallel rank runs it for all
images and uses the features of its own tokens, so that the sum of their gradients is the gradient.

Shapes: T tokens of the row, S sequences, I image tokens among this rank's tokens, F features of all prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import BatchError
from ..upstream import text_part
from .parts import find_backbone

ImageInputs = Mapping[str, Tensor]
"""Images of a prompt as the model's image processor returns them. Arguments of `get_image_features` are used."""
NUM_PLACEHOLDERS = "num_placeholders"
"""May be among them: number of placeholders of the images. Those that are sampled, and later ones, are text."""


@dataclass(frozen=True, kw_only=True)
class SeenImages:
    """The images of a micro batch."""

    inputs: ImageInputs
    """Images of all prompts, on the CPU."""
    num_features: int | None
    """F; None for images that no token shows."""
    features_T: Tensor
    """int64, on the CPU: the feature of each token, -1 for text."""
    positions_AT: Tensor | None
    """Positions with three axes; None if the model has one."""
    blocks_T: Tensor | None
    """int64: number of the image to which a token belongs, -1 for text; None in models with causal images only."""

    def pick(self, tokens: slice, missing: int, device: torch.device) -> SeenImages:
        """The images of some tokens of the row, padded with `missing` tokens of text; blocks stay those of the row."""
        features_T = F.pad(self.features_T, (0, missing), value=-1)[tokens]
        blocks_T = None if self.blocks_T is None else F.pad(self.blocks_T, (0, missing), value=-1).to(device)
        return replace(self, features_T=features_T, blocks_T=blocks_T)


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Reads the images of batches for one model."""

    placeholder: int
    """Id of the token that stands for a feature."""
    rope_index: Callable[..., Any] | None
    """The model's own positions of a sequence with images."""
    has_blocks: bool
    """Tokens of an image attend to each other."""
    arguments: frozenset[str]
    """Names of the model's `get_image_features`."""
    smallest: ImageInputs
    """A made-up image."""
    always: bool = False
    """Run the tower also for batches without images: its collectives are those of all ranks."""

    @classmethod
    def of(cls, model: Any, *, always: bool = False) -> Vision | None:
        """None for a model without a vision tower."""
        backbone: Any = find_backbone(model)[1]
        if backbone is None or text_part(backbone) is backbone:
            return None
        return cls(
            placeholder=int(model.config.image_token_id),
            rope_index=getattr(backbone, "get_rope_index", None),
            has_blocks="token_type_ids" in inspect.signature(type(backbone).forward).parameters,
            arguments=frozenset(inspect.signature(type(backbone).get_image_features).parameters),
            smallest=made_up_images(model),
            always=always,
        )

    def see(
        self, images: Sequence[Any], ids_T: Tensor, positions_T: Tensor, lengths: Sequence[int], text_N: Tensor
    ) -> SeenImages | None:
        """The images of a batch: per sequence a safetensors file, `ImageInputs` or None; None if there are none.

        text_N: places of placeholders that a policy sampled, which are text.

        Raises:
            BatchError: there are as many as sequences, or a sequence has fewer placeholders than features.
        """
        if not any(image is not None for image in images):
            if not self.always:
                return None
            no_place_T = torch.full((len(ids_T),), -1)  # a made-up image that no token shows
            return SeenImages(
                inputs=self.smallest, num_features=None, features_T=no_place_T, positions_AT=None, blocks_T=None
            )
        if len(images) != len(lengths):
            raise BatchError(field="images", value=len(images), allowed=f"one of each of {len(lengths)} sequences")
        prompts: dict[Any, tuple[int, int, ImageInputs]] = {}
        features_T, num_features = torch.full_like(ids_T, -1), 0
        positions = []
        is_place_T = (ids_T == self.placeholder).index_fill(0, text_N, False)
        split = [each.split(list(lengths)) for each in (ids_T, is_place_T, features_T, positions_T)]
        for image, ids, is_place, features, own in zip(images, *split, strict=True):
            if image is None:
                positions.append(own.expand(3, -1))
                continue
            places = (ids == self.placeholder).nonzero()[:, 0]
            key = image if isinstance(image, str) else id(image)
            if key not in prompts:
                inputs, count = self._read(image)
                prompts[key] = num_features, len(places) if count is None else count, inputs
                num_features += prompts[key][1]
            first, count, inputs = prompts[key]
            if len(places) > count:
                places = is_place.nonzero()[:, 0]
            if len(places) < count:
                raise _unlike(len(places), f"at least {count}")
            features[places[:count]] = torch.arange(first, first + count)
            positions.append(self._positions(ids, features, inputs) if self.rope_index else own)
        return SeenImages(
            inputs=_joined([inputs for _, _, inputs in prompts.values()]),
            num_features=num_features,
            features_T=features_T,
            positions_AT=torch.cat(positions, dim=1) if self.rope_index else None,
            blocks_T=_blocks(features_T, lengths) if self.has_blocks else None,
        )

    def _read(self, image: Any) -> tuple[ImageInputs, int | None]:
        """Arguments of `get_image_features`, and the number of placeholders."""
        if isinstance(image, str):
            from safetensors.torch import load_file

            image = load_file(image)
        count = image.get(NUM_PLACEHOLDERS)
        inputs = {name: image[name] for name in sorted(self.arguments & image.keys())}
        return inputs, None if count is None else int(count)

    def _positions(self, ids_L: Tensor, features_L: Tensor, inputs: ImageInputs) -> Tensor:
        """[3, L]: the model's own up to the last image, then counted on from the largest."""
        assert self.rope_index is not None
        is_image = features_L >= 0
        end = int(is_image.nonzero()[-1]) + 1 if bool(is_image.any()) else 0
        if not end:
            return torch.arange(len(ids_L)).expand(3, -1)
        grids = inputs["image_grid_thw"]
        try:
            positions, _ = self.rope_index(ids_L[None, :end], is_image[None, :end].int(), image_grid_thw=grids)
        except (RuntimeError, StopIteration) as error:
            raise _unlike(int(is_image.sum()), f"grids {grids.tolist()}") from error
        rest = torch.arange(len(ids_L) - end) + int(positions.max()) + 1
        return torch.cat((positions[:, 0], rest.expand(3, -1)), dim=1)


def _unlike(placeholders: int, features: str) -> BatchError:
    problem = "prompts have not as many placeholders as their images have features"
    return BatchError(problem, field="images", value=placeholders, allowed=features)


def _joined(parts: Sequence[ImageInputs]) -> ImageInputs:
    """Several prompts' images, one after another; dimensions behind the first one are padded to the largest."""
    if len(parts) == 1:
        return parts[0]
    joined = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
        joined[name] = torch.cat([_padded(tensor, largest) for tensor in tensors])
    return joined


def _padded(tensor: Tensor, largest: Sequence[int]) -> Tensor:
    missing = [(0, most - size) for size, most in zip(tensor.shape[1:], largest, strict=True)]
    return F.pad(tensor, [end for pair in reversed(missing) for end in pair]) if any(map(max, missing)) else tensor


def _blocks(features_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Numbers of the images: neighboring image tokens of a sequence are one image."""
    is_image = features_T >= 0
    goes_on = F.pad(is_image, (1, 0))[:-1]
    goes_on[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = False
    starts = is_image & ~goes_on
    return torch.where(is_image, starts.cumsum(0) - 1, -1)


def install_vision(backbone: Any) -> None:
    """Add `seen=SeenImages(...)` to the backbone's forward, in place, beside the arguments of the text model."""
    original: Callable[..., Any] = backbone.forward
    text = text_part(backbone)
    own = tuple(vision_parameters(backbone))

    def forward(*args: Any, seen: SeenImages | None = None, **kwargs: Any) -> Any:
        if seen is None:
            return original(*args, **kwargs)
        ids_1T = kwargs.pop("input_ids")
        places_I = (seen.features_T >= 0).nonzero()[:, 0]
        index_I, rows_I = places_I.to(ids_1T.device), seen.features_T[places_I].to(ids_1T.device)
        # The placeholder may be outside of the vocabulary.
        hidden_1TH = text.get_input_embeddings()(ids_1T.index_fill(1, index_I, 0))
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(p.requires_grad for p in own)):
            features_FH, deeper = _features(backbone, seen, hidden_1TH)
        hidden_1TH = hidden_1TH.index_copy(1, index_I, features_FH[rows_I][None])
        if deeper:
            kwargs |= {
                "visual_pos_masks": torch.zeros_like(ids_1T, dtype=torch.bool).index_fill(1, index_I, True),
                "deepstack_visual_embeds": [layer_FH[rows_I] for layer_FH in deeper],
            }
        return text(inputs_embeds=hidden_1TH, **kwargs)

    backbone.forward = forward


def _features(backbone: Any, seen: SeenImages, like: Tensor) -> tuple[Tensor, list[Tensor]]:
    inputs = {name: value.to(like.device, non_blocking=True) for name, value in seen.inputs.items()}
    out = backbone.get_image_features(**inputs, return_dict=True)
    features_FH = _flat(out.pooler_output).to(like.dtype)
    if seen.num_features not in (None, len(features_FH)):
        raise _unlike(int(seen.num_features or 0), str(len(features_FH)))
    return features_FH, [_flat(layer).to(like.dtype) for layer in getattr(out, "deepstack_features", None) or ()]


def _flat(features: Any) -> Tensor:
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))


def vision_parameters(backbone: Any) -> Iterator[nn.Parameter]:
    """Parameters of the vision tower and its projector."""
    of_text = {id(parameter) for parameter in text_part(backbone).parameters()}
    return (parameter for parameter in backbone.parameters() if id(parameter) not in of_text)


def side_of(size: Any) -> int:
    """Pixels of a side of images or patches, which some configurations state for both sides."""
    return int(size[0]) if isinstance(size, list | tuple) else int(size)


def made_up_images(model: Any, *, sizes: Sequence[tuple[int, int]] = ((1, 1),)) -> dict[str, Tensor]:
    """Random images on the CPU as the model's own image processor would return them.

    Args:
        sizes: rows and columns of tokens of each image, for a model whose images have any size.
    """
    config: Any = model.config
    vision = config.vision_config
    generator = torch.Generator().manual_seed(2)
    if hasattr(vision, "spatial_merge_size"):
        merge = int(vision.spatial_merge_size)
        grid = torch.tensor([[1, rows * merge, columns * merge] for rows, columns in sizes], device="cpu")
        width = int(vision.in_channels) * int(vision.temporal_patch_size) * side_of(vision.patch_size) ** 2
        pixels = torch.randn(int(grid.prod(-1).sum()), width, generator=generator, device="cpu")
        return {"pixel_values": pixels, "image_grid_thw": grid}
    number, side = len(sizes), side_of(vision.image_size)
    backbone: Any = find_backbone(model)[1]
    arguments = inspect.signature(type(backbone).get_image_features).parameters
    pixels = torch.randn(number, int(vision.num_channels), side, side, generator=generator, device="cpu")
    if getattr(config, "image_grid_pinpoints", None):
        tiles = 1
        if number == 1 or "batch_num_images" not in arguments:
            from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

            tiles = int(image_size_to_num_patches((side, side), config.image_grid_pinpoints, side))
        return {
            "pixel_values": pixels[:, None].repeat(1, tiles, 1, 1, 1),
            "image_sizes": torch.tensor([[side, side]] * number, device="cpu"),
            "batch_num_images": torch.tensor([number], device="cpu"),
        }
    if "image_sizes" in arguments and arguments["image_sizes"].default is inspect.Parameter.empty:
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[side, side]] * number, device="cpu")}
    if "pixel_attention_mask" in arguments:
        mask = torch.ones(1, number, side, side, dtype=torch.int64, device="cpu")
        return {"pixel_values": pixels[None], "pixel_attention_mask": mask}
    return {"pixel_values": pixels}
