"""Tasks with images, and a vision-language model of 0.5 million parameters that learns them on two CPU cores.

    python -m rl_data.tasks.shapes shapes

writes the model and the files of two tasks. In one, an image shows one to four shapes of one color; the model counts
them and names the color: "3 red". In the other it moves a blue square to a green one, one move for each image
(`apps.grpo.grid:GridGame`). Most demonstrations give a random count or move, so that after a warm start the model is
often wrong, and reinforcement learning has to teach it.
"""

import io
import random
import sys
from pathlib import Path
from typing import Any

from .write import write_parquet

SIDE = 56
COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220)}
COUNTS = ("1", "2", "3", "4")
QUESTION = "Count."
RANDOM_SHARE = 0.6
"""Share of demonstrations with a random count."""
_IMAGE = "<image>"
_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}{{ '<eos>' if message.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
MOVE = "Move."
Cell = tuple[int, int]


def draw(count: int, color: str, rng: random.Random) -> bytes:
    """A PNG image of shapes of random kinds, sizes and places, at most one in a quarter."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen, fill, half = ImageDraw.Draw(image), COLORS[color], SIDE // 2
    for quarter in rng.sample(range(4), count):
        size = rng.randint(14, 20)
        x, y = (half * (quarter // side % 2) + rng.randrange(half - size) for side in (1, 2))
        kind = rng.choice(("circle", "square", "triangle"))
        if kind == "triangle":
            pen.polygon([(x + size // 2, y), (x, y + size), (x + size, y + size)], fill=fill)
        elif kind == "circle":
            pen.ellipse((x, y, x + size, y + size), fill=fill)
        else:
            pen.rectangle((x, y, x + size, y + size), fill=fill)
    return _png(image)


def draw_board(player: Cell, goal: Cell) -> bytes:
    """A PNG image of a board of two times two cells."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen, half = ImageDraw.Draw(image), SIDE // 2
    for (x, y), color in ((goal, "green"), (player, "blue")):
        pen.rectangle((x * half + 4, y * half + 4, x * half + 23, y * half + 23), fill=COLORS[color])
    return _png(image)


def board(rng: random.Random) -> tuple[Cell, Cell]:
    """Two different cells: of the player and of the goal."""
    player, goal = rng.sample([(x, y) for x in range(2) for y in range(2)], 2)
    return player, goal


def _png(image: Any) -> bytes:
    with io.BytesIO() as buffer:
        image.save(buffer, "PNG")
        return buffer.getvalue()


def _row(question: str, image: bytes) -> dict[str, Any]:
    """A row as `datasets` writes it."""
    return {
        "prompt": [{"role": "user", "content": f"{_IMAGE}{question}"}],
        "images": [{"bytes": image, "path": None}],
    }


def rows(rng: random.Random, num_rows: int, *, demonstrations: bool = False) -> list[dict[str, Any]]:
    """Images of shapes, with `ground_truth` or with a `completion`."""
    made = []
    for _ in range(num_rows):
        count, color = rng.choice(COUNTS), rng.choice(list(COLORS))
        row = _row(QUESTION, draw(int(count), color, rng))
        if demonstrations:
            shown = rng.choice(COUNTS) if rng.random() < RANDOM_SHARE else count
            made.append(row | {"completion": f"{shown} {color}"})
        else:
            made.append(row | {"ground_truth": f"{count} {color}"})
    return made


def moves(rng: random.Random, num_rows: int) -> list[dict[str, Any]]:
    """Demonstrations of moves on boards."""
    made = []
    for _ in range(num_rows):
        (x, y), goal = board(rng)
        right = [name for name, (dx, dy) in MOVES.items() if _far(x + dx, y + dy, goal) < _far(x, y, goal)]
        move = rng.choice(list(MOVES) if rng.random() < RANDOM_SHARE else right)
        made.append(_row(MOVE, draw_board((x, y), goal)) | {"completion": move})
    return made


def _far(x: int, y: int, goal: Cell) -> int:
    return abs(x - goal[0]) + abs(y - goal[1])


def reward(response_text: str, prompt: Any) -> float:
    """1 for the right count and color: `reward.function=rl_data.tasks.shapes:reward`."""
    return float(response_text.split() == prompt.ground_truth.split())


def write_shapes(
    folder: str | Path, *, num_train: int = 1024, num_val: int = 128, num_demonstrations: int = 2048, seed: int = 0
) -> Path:
    """Writes the model and the files of the task to `folder`; the same arguments give the same files."""
    folder, rng = Path(folder), random.Random(seed)
    build_tiny_vision_model(folder / "model", seed=seed)
    for name, count in (("train", num_train), ("val", num_val), ("demonstrations", num_demonstrations)):
        write_parquet(folder / f"{name}.parquet", rows(rng, count, demonstrations=name == "demonstrations"))
    write_parquet(folder / "moves.parquet", moves(rng, num_demonstrations))
    for name, count in (("boards", num_train), ("val_boards", num_val)):
        seeds = [{"prompt": MOVE, "seed": rng.getrandbits(31)} for _ in range(count)]
        write_parquet(folder / f"{name}.parquet", seeds)
    return folder


def build_tiny_vision_model(folder: str | Path, *, seed: int = 0) -> Path:
    """Writes an Idefics3 model with random weights, its tokenizer and its processor; 4 tokens stand for an image."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        PreTrainedTokenizerFast,
    )

    special = ["<pad>", "<eos>", "<unk>", _IMAGE, "<fake_token_around_image>", "<global-img>", "<user>", "<assistant>"]
    special.append("<end_of_utterance>")
    words = dict.fromkeys([*special, "Count", "Move", ".", *COUNTS, *COLORS, *MOVES])
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=_TEMPLATE
    )
    size = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    text = {"model_type": "llama", "vocab_size": 32, "hidden_size": 128, "intermediate_size": 256}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    text |= {"max_position_embeddings": 512, "initializer_range": 0.06, "tie_word_embeddings": True}
    ids = {"pad_token_id": vocabulary["<pad>"], "bos_token_id": None, "eos_token_id": vocabulary["<eos>"]}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"image_size": SIDE, "patch_size": 14}
    config: Any = Idefics3Config(
        text_config=text | ids,
        vision_config=vision,
        scale_factor=2,
        image_token_id=vocabulary[_IMAGE],
        pad_token_id=vocabulary["<pad>"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Idefics3ForConditionalGeneration(config)
    folder = Path(folder)
    model.to(torch.float32).save_pretrained(folder)
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=_TEMPLATE).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(write_shapes(sys.argv[1]))
