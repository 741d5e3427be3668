"""Rows with images: where they may stand, and their tokens by a processor."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rl_data_rows import write_lines
from safetensors.torch import load_file

from plinth_testing import raises
from plinth_testing.vision import tiny_vlm
from rl_data import (
    ColumnsConfig,
    DataConfig,
    DataError,
    ImageFiles,
    PrepareConfig,
    VisionProcessor,
    load_demonstrations,
    load_pairs,
    load_prompts,
    load_tokenizer,
    prepare_data,
)
from rl_data.images import read_image


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm(tmp_path_factory.mktemp("vlm"))


@pytest.fixture
def red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLINTH_CACHE_DIR", str(tmp_path / "cache"))
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    return tmp_path / "red.png"


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    return write_lines(folder / "a.jsonl", list(rows))


def loaded(file: Path, model: Path, **config: Any) -> list[Any]:
    return load_prompts([file], load_tokenizer(model), DataConfig(**config), vision=VisionProcessor(model))


def asked(content: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "See."}, {"role": "user", "content": content}]


def test_an_image_stands_where_a_part_a_marker_or_the_first_user_message_says(folder: Path, red: Path) -> None:
    text, image = {"type": "text", "text": "How many?"}, {"type": "image"}
    rows = [
        {"messages": asked([image, text]), "images": ["red.png"]},
        {"messages": asked("<image>How many?"), "images": ["red.png"]},
        {"messages": asked("How many?"), "images": str(red)},
        {"messages": asked([image | {"image": str(red)}, text])},
    ]
    first, *others = loaded(write(red.parent, *rows), folder)
    assert first.images == (str(red),)
    assert [(one.text, one.token_ids, one.images) for one in others] == [
        (first.text, first.token_ids, first.images)
    ] * 3
    placeholder = load_tokenizer(folder).convert_tokens_to_ids("<image>")
    assert first.token_ids.count(placeholder) == 4  # of one in the text
    assert first.token_ids == VisionProcessor(folder)(first.text, first.images)[0]


BLUE = io.BytesIO()
Image.new("RGB", (20, 20), "blue").save(BLUE, "PNG")


@pytest.mark.parametrize(
    "value",
    [
        {"bytes": BLUE.getvalue(), "path": "x.png"},
        [{"bytes": BLUE.getvalue(), "path": None}],
        BLUE.getvalue(),
        [{"bytes": None, "path": "blue.png"}],
        ["blue.png"],
    ],
    ids=["struct", "list of structs", "bytes", "struct without bytes", "path"],
)
def test_images_of_parquet_files_are_one_file_each(folder: Path, red: Path, value: Any) -> None:
    red.with_name("blue.png").write_bytes(BLUE.getvalue())
    pq.write_table(pa.Table.from_pylist([{"prompt": asked("a"), "picture": value}] * 2), red.parent / "a.parquet")
    one, other = loaded(red.parent / "a.parquet", folder, columns=ColumnsConfig(images="picture"))
    assert one.images == other.images
    assert "picture" not in one.extra
    assert read_image(one.images[0]).getpixel((0, 0)) == (0, 0, 255)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": asked("<image> and <image>"), "images": ["red.png"]},
        {"messages": asked([{"type": "image"}, {"type": "text", "text": "a"}]), "images": ["red.png"] * 2},
        {"messages": asked([{"type": "text", "text": "<image>"}, {"type": "image"}]), "images": ["red.png"]},
        {"messages": asked("a"), "images": ["broken.png"]},
    ],
)
def test_images_without_a_place_and_broken_ones_are_refused(folder: Path, red: Path, row: dict[str, Any]) -> None:
    (red.parent / "broken.png").write_bytes(red.read_bytes()[:50])
    with raises(DataError, row=1, column="images"):
        loaded(write(red.parent, row), folder)


def test_text_rows_load_no_processor_and_rows_with_images_need_one(folder: Path, red: Path) -> None:
    vision = VisionProcessor(folder)
    tokenizer = load_tokenizer(folder)
    load_prompts([write(red.parent, {"messages": asked("a <image> tag"), "images": []})], tokenizer, DataConfig(),
                 vision=vision)  # fmt: skip
    assert "processor" not in vars(vision)
    with raises(DataError, row=1, column="images"):
        load_prompts([write(red.parent, {"messages": asked("a"), "images": ["red.png"]})], tokenizer, DataConfig())


def test_demonstrations_have_the_images_before_each_trained_turn(folder: Path, red: Path) -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Two."}]}
    turns = [*asked("<image>How many?"), answer, {"role": "user", "content": "<image>Now?"}, answer]
    file = write(red.parent, {"messages": turns, "images": ["red.png"] * 2})
    tokenizer, vision = load_tokenizer(folder), VisionProcessor(folder)
    first, whole = load_demonstrations([file], tokenizer, DataConfig(), turns="each", vision=vision)
    assert (len(first.images), len(whole.images)) == (1, 2)
    placeholder = tokenizer.convert_tokens_to_ids("<image>")
    assert (first.prompt_ids.count(placeholder), whole.prompt_ids.count(placeholder)) == (4, 8)
    assert tokenizer.decode(first.response_ids) == "Two.<|im_end|>"
    (prompt,) = loaded(write(red.parent, {"messages": turns[:2], "images": ["red.png"]}), folder)
    assert first.prompt_ids == prompt.token_ids


def test_a_file_has_features_pixels_and_the_number_of_placeholders(folder: Path, red: Path) -> None:
    files = ImageFiles(red.parent / "files", VisionProcessor(folder))
    assert files(()) is None
    assert not (red.parent / "files").exists()
    path = files([str(red), str(red)])
    contents = load_file(str(path))
    assert contents["num_placeholders"].tolist() == [8]
    assert contents["image.1"].shape == (30, 40, 3)
    assert contents["pixel_values"].shape[:2] == (1, 2)
    assert "input_ids" not in contents
    assert files([str(red), str(red)]) == path
    assert files([str(red)]) != path


def test_placeholders_of_gemma_are_the_tokens_of_its_features(tmp_path: Path, red: Path) -> None:
    vision = VisionProcessor(tiny_vlm(tmp_path / "gemma", "gemma3"))
    assert vision.contents([str(red), str(red)])["num_placeholders"].tolist() == [8]
    (tmp_path / "gemma" / "config.json").unlink()  # read once, not for every image
    assert vision.contents([str(red)])["num_placeholders"].tolist() == [4]


def test_the_oldest_files_are_removed_but_not_those_that_were_used_again(folder: Path, red: Path) -> None:
    vision, lists = VisionProcessor(folder), [[str(red)] * count for count in (1, 2, 3)]
    all_files = ImageFiles(red.parent / "a", vision)
    size = sum(Path(str(all_files(one))).stat().st_size for one in lists)
    files = ImageFiles(red.parent / "b", vision, max_bytes=size - 1)
    first, second = files(lists[0]), files(lists[1])
    files(lists[0])
    files.make([lists[2], ()])
    assert [Path(str(one)).exists() for one in (first, second)] == [True, False]
    assert Path(str(files(lists[1]))).exists()


def test_pairs_with_images_are_refused(folder: Path, red: Path) -> None:
    row = {"prompt": asked("a"), "chosen": "b", "rejected": "c", "images": ["red.png"]}
    with raises(DataError, row=1, column="images"):
        load_pairs([write(red.parent, row)], load_tokenizer(folder), DataConfig())


def test_prepare_keeps_images_and_rows_that_differ_in_them_alone(folder: Path, red: Path) -> None:
    blue = red.with_name("blue.png")
    Image.new("RGB", (40, 30), "blue").save(blue)
    part = [{"type": "text", "text": "Which color?"}, {"type": "image"}]
    rows = [{"messages": asked(part), "images": [name], "ground_truth": "x"} for name in ("red.png", "blue.png")]
    out = red.parent / "out"
    prepare_data(PrepareConfig(files=(str(write(red.parent, *rows, rows[0])),), out=str(out), validation=0))
    prompts = loaded(out / "train.parquet", folder)
    assert [one.images for one in prompts] == [(str(red),), (str(blue),)]
    assert prompts[0].text.count("<image>") == 1
    assert "Which color?<image>" in prompts[0].text
