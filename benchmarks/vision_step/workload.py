"""Workload V: Qwen3-VL-4B's configuration with random weights, 16 images of 448 x 448 pixels x 8 samples of 128 tokens.

`python -m benchmarks.vision_step.workload FOLDER [--small]` writes `model/`, the images and `train.jsonl`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.random_model import byte_tokenizer, qwen3

NUM_PROMPTS, SAMPLES, NEW_TOKENS, SIDE = 16, 8, 128, 448
MAX_PROMPT_TOKENS = 320
"""196 of them stand for the image."""
QUESTION = "What is shown? " + "Look well. " * 8
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ 'IMAGE' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor %}"
).replace("IMAGE", _IMAGE)
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 2560,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}


def settings(folder: Path, steps: int) -> list[str]:
    """Settings of V; no key tunes anything."""
    return [
        f"model.path={folder}/model",
        f"data.train={folder}/train.jsonl",
        f"data.max_prompt_length={MAX_PROMPT_TOKENS}",
        "reward.function=benchmarks.grpo_step.workload:parity",
        f"batch.train_batch_size={NUM_PROMPTS}",
        f"batch.mini_batch_size={NUM_PROMPTS}",
        f"sampling.n={SAMPLES}",
        f"sampling.max_tokens={NEW_TOKENS}",
        "sampling.ignore_eos=true",
        "algorithm.kl_coef=0",
        f"trainer.total_training_steps={steps}",
    ]


def write_model(folder: Path, *, small: bool) -> None:
    """The model and its processor, which needs torchvision."""
    import torch
    import transformers

    tokenizer: Any = byte_tokenizer()
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, names)
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    text = qwen3(2560, 9728, 36, 32, rope_parameters=ROPE, max_position_embeddings=8192)
    vision = dict(VISION)
    if small:
        text |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
        text |= {"num_key_value_heads": 1, "vocab_size": 512}
        vision |= {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128}
        vision["deepstack_visual_indexes"] = [0, 1, 2]
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    images = transformers.Qwen2VLImageProcessor(patch_size=16, merge_size=2)
    videos = transformers.Qwen3VLVideoProcessor(patch_size=16, merge_size=2)
    transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=_TEMPLATE).save_pretrained(folder)


def write_workload(folder: Path, *, small: bool = False) -> None:
    """Writes the model and 64 rows."""
    import numpy as np
    from PIL import Image

    write_model(folder / "model", small=small)
    random = np.random.default_rng(0)
    rows = []
    for number in range(64):
        pixels = random.integers(0, 256, (14, 14, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((SIDE, SIDE)).save(folder / f"{number}.png")
        rows.append({"prompt": [{"role": "user", "content": f"<image>{QUESTION}"}], "images": [f"{number}.png"]})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="a model of 0.5 million parameters, to try the script")
    arguments = parser.parse_args()
    write_workload(arguments.folder, small=arguments.small)
