"""Images of rows: files, their places in messages, and their tokens and features by the model's own processor.

An image is named by the path of its file everywhere, so that it travels by reference. Bytes in a data file, as
`datasets` writes them, are written once to the cache folder, under their SHA-256.
"""

import hashlib
import json
import os
import shutil
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from plinth_base.errors import shown
from plinth_base.model_folder import check_model_folder

from .errors import DataError
from .files.table import Place, first_line
from .package_index import cache_folder

MARKER = "<image>"
"""Place of an image in a text, as verl and LLaMA-Factory write it."""
_GIVE = "Give a list of paths, bytes, or structs of `bytes` and `path`."


def ids_with_images(
    text: str, images: Sequence[str], vision: "VisionProcessor | None", place: Place, column: str
) -> tuple[int, ...]:
    """Token ids of a rendered text with images. Raises DataError, without a processor too."""
    if vision is None:
        raise place.error("the prompt has images", "Only text is trained on here: drop the row.", column=column)
    return vision.ids(text, images, place, column)


def image_files(place: Place, value: Any, column: str) -> tuple[str, ...]:
    """The files of the images in a column: a list or one of them. Raises DataError for what is no image file."""
    values = value if isinstance(value, list | tuple) else [value] if value else []
    return tuple(_file(place, one, column) for one in values)


def _file(place: Place, value: Any, column: str) -> str:
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}:
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return _kept(value)
    if not isinstance(value, str) or not value:
        raise place.error(f"no image: {shown(value)}", _GIVE, column=column)
    path = Path(place.file).absolute().parent / Path(value.removeprefix("file://")).expanduser()
    if not path.is_file():
        remedy = "A path is relative to the folder of the data file; nothing is downloaded."
        raise place.error(f"there is no image file {value!r}", remedy, column=column)
    return str(path)


def image_folder() -> Path:
    """The folder of images that come without a file."""
    return cache_folder() / "images"


def _kept(content: bytes) -> str:
    """The file of these bytes in the cache folder."""
    path = image_folder() / hashlib.sha256(content).hexdigest()
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(path)
    return str(path)


def content_of(place: Place, parts: list[Any], column: str) -> str | list[dict[str, Any]]:
    """The content of a message that is given as parts: text, or parts of which some are images.

    Raises DataError for a part that is neither text nor an image.
    """
    content: list[dict[str, Any]] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            content.append({"type": "text", "text": part["text"]})
        elif kind == "image":
            given = next((part[key] for key in ("image", "bytes", "path") if part.get(key)), None)
            content.append({"type": "image", **({} if given is None else {"image": given})})
        else:
            problem = f"a part of a message that is neither text nor an image: {shown(part)}"
            raise place.error(problem, "Give parts of `type` text or image; draw a video as images.", column=column)
    return content if any(part["type"] == "image" for part in content) else "".join(part["text"] for part in content)


def take_images(
    place: Place, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], column: str
) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """The messages without the images in their parts, and the files of all images: of the parts, or of the column.

    Raises DataError unless the messages have a place for each image, or none at all.
    """
    lists = [message["content"] for message in messages if isinstance(message["content"], list)]
    inside = [part.pop("image") for parts in lists for part in parts if "image" in part]
    images = image_files(place, inside or row.get(column), column)
    num_places = sum(_num_places(message["content"]) for message in messages)
    if num_places != len(images) and (lists or (images and num_places)):
        problem = f"{len(images)} images for {num_places} places in the messages"
        raise place.error(problem, "Give one image for each place, in order.", column=column)
    return tuple(messages), images


def as_parts(messages: Sequence[Mapping[str, Any]], num_images: int) -> tuple[Mapping[str, Any], ...]:
    """The messages with their contents as parts, in which each image has a place.

    Places are parts of `type` image, else markers `<image>`; without either, the images precede the first user message.
    """
    if not num_images:
        return tuple(messages)
    is_marked = any(_num_places(message["content"]) for message in messages)
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    placed = []
    for index, message in enumerate(messages):
        parts = [] if is_marked or index != first else [{"type": "image"}] * num_images
        content = message["content"]
        for number, text in enumerate(content.split(MARKER)) if isinstance(content, str) else ():
            parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": text}] * bool(text)
        placed.append({**message, "content": [*parts, *(content if isinstance(content, list) else ())]})
    return tuple(placed)


def with_markers(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with text as contents, in which `<image>` stands for an image."""

    def text(content: str | list[dict[str, Any]]) -> str:
        return content if isinstance(content, str) else "".join(part.get("text", MARKER) for part in content)

    return [{**message, "content": text(message["content"])} for message in messages]


def _num_places(content: str | list[dict[str, Any]]) -> int:
    if isinstance(content, str):
        return content.count(MARKER)
    return sum(part["type"] == "image" for part in content)


class VisionProcessor:
    """The processor of a model folder: what the model's tokens and vision tower get of a text with images."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = check_model_folder(folder, need_weights=False)

    @cached_property
    def processor(self) -> Any:
        """The processor. Raises DataError if the folder has none that takes images."""
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(self._folder, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds, ImportError for torchvision among them
            problem = f"the processor of {self._folder} cannot be loaded ({type(error).__name__}: {first_line(error)})"
            raise DataError(problem, "Images need one, and some processors need torchvision.") from error
        if getattr(processor, "image_processor", None) is None:
            raise DataError(f"the model at {self._folder} takes no images", "Use a vision-language model.")
        return processor

    @cached_property
    def _placeholder(self) -> int:
        """Token id of a part of an image; a processor's `image_token_id` may be that of a token before them (Gemma).

        Kept: to read a configuration takes ten times as long as to prepare an image.
        """
        from transformers import AutoConfig

        return int(AutoConfig.from_pretrained(self._folder, trust_remote_code=False).image_token_id)

    def count(self, text: str) -> int:
        """Images that have a place in a rendered text."""
        return text.count(str(self.processor.image_token))

    def ids(self, text: str, images: Sequence[str], place: Place, column: str) -> tuple[int, ...]:
        """Token ids of a rendered text, with the placeholders of each image. Raises DataError."""
        if (num_places := self.count(text)) != len(images):
            problem = f"the rendered text has {num_places} places for {len(images)} images: {shown(text)}"
            remedy = "Use a chat template that shows images; no text may have the token that stands for one."
            raise place.error(problem, remedy, column=column)
        try:
            return self(text, images)[0]
        except Exception as error:  # PIL and the processors raise many kinds
            problem = f"the model's processor refuses the images ({type(error).__name__}: {first_line(error)})"
            raise place.error(problem, "Fix or drop the row.", column=column) from error

    def __call__(self, text: str, images: Sequence[Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Token ids of a text, and the features of its images (files or decoded ones): tensors by the names of the
        model's arguments."""
        pixels = [read_image(one) if isinstance(one, str) else one for one in images]
        output = self.processor(text=[text], images=pixels, add_special_tokens=False, return_tensors="pt")
        names = self.processor.image_processor.model_input_names
        return tuple(output["input_ids"][0].tolist()), {name: output[name] for name in names if name in output}

    def contents(self, images: Sequence[str]) -> dict[str, Any]:
        """Tensors of an `ImageFiles` file: the features, the decoded images, the number of placeholders."""
        import numpy as np
        import torch

        token, pixels = self.processor.image_token, list(map(read_image, images))
        ids, contents = self(token * len(images), pixels)
        contents["num_placeholders"] = torch.tensor([ids.count(self._placeholder)])
        contents |= {f"image.{index}": torch.from_numpy(np.array(one)) for index, one in enumerate(pixels)}
        return {name: tensor.contiguous() for name, tensor in contents.items()}


class ImageFiles:
    """Decoded images and their features in files that servers and ranks map: one file for each list of images.

    A file is made when it is first asked for; the oldest ones are removed when all exceed `max_bytes`, which has to
    hold those of a few steps, and the folder when this process ends.
    """

    def __init__(self, folder: str | Path, vision: VisionProcessor, *, max_bytes: int = 32 << 30) -> None:
        self._folder, self._vision, self._max_bytes = Path(folder).absolute(), vision, max_bytes
        self._sizes: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._remove: weakref.finalize[..., Any] | None = None

    def __call__(self, images: Sequence[str]) -> str | None:
        """The file of these images, in this order; None without images."""
        if not images:
            return None
        path = self._folder / f"{hashlib.sha256(json.dumps(list(images)).encode()).hexdigest()[:32]}.safetensors"
        if not path.is_file():
            from safetensors.torch import save_file

            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove = self._remove or weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            partial = path.with_name(f"{path.name}.{threading.get_ident()}")
            save_file(self._vision.contents(images), partial)
            partial.replace(path)
        with self._lock:
            self._sizes[path] = self._sizes.pop(path, 0) or path.stat().st_size  # the newest is the last
            while sum(self._sizes.values()) > self._max_bytes and len(self._sizes) > 1:
                oldest = next(iter(self._sizes))
                del self._sizes[oldest]
                oldest.unlink(missing_ok=True)
        return str(path)

    def make(self, lists: Iterable[Sequence[str]]) -> None:
        """Makes the files of these lists of images, several at a time."""
        if missing := [images for images in lists if images]:
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
                list(threads.map(self, missing))


def read_image(file: str) -> Any:
    """The image as RGB. Raises OSError for a damaged file."""
    from PIL import Image

    with Image.open(file) as image:
        return image.convert("RGB")
