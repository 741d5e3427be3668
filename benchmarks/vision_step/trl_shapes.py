"""The task of `preset=shapes` on TRL's GRPOTrainer: counts shapes in images, held out before and after.

`python -m benchmarks.vision_step.trl_shapes RUN/warm_start_model shapes --seed 1` starts from the model that a run of
the preset has after its warm start, with the files of `python -m rl_data.tasks.shapes shapes`; on the CPU, where TRL
generates by transformers. Batch, learning rate and frozen tower are the preset's.
"""

import argparse
import io
from pathlib import Path
from typing import Any

from benchmarks import trl_peer
from rl_data.tasks.shapes import QUESTION

BATCH, SAMPLES, NEW_TOKENS, LEARNING_RATE = 128, 8, 4, 3e-4
PROMPT = f"<user><image>{QUESTION}<assistant>"


def rows(file: Path) -> list[dict[str, Any]]:
    """Prompts with decoded images and their answers."""
    import pyarrow.parquet
    from PIL import Image

    return [
        {
            "prompt": [{"role": "user", "content": QUESTION}],
            "image": Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB"),
            "truth": row["ground_truth"],
        }
        for row in pyarrow.parquet.read_table(file).to_pylist()
    ]


def score(completions: list[Any], truth: list[str], **_: Any) -> list[float]:
    """1 for the right count and color."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(text.replace("<eos>", "").split() == right.split()) for text, right in zip(texts, truth, strict=True)]


def held_out(model: Any, processor: Any, val: list[dict[str, Any]]) -> float:
    """The share of right answers, sampled once for each image."""
    import torch

    model.eval()
    torch.manual_seed(1)
    scores: list[float] = []
    for part in (val[at : at + 64] for at in range(0, len(val), 64)):
        images = [[row["image"]] for row in part]
        inputs = processor(text=[PROMPT] * len(part), images=images, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            ids = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS)
        texts = processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scores += score(texts, [row["truth"] for row in part])
    return sum(scores) / len(scores)


def train(args: argparse.Namespace) -> None:
    """Trains and prints both accuracies."""
    import torch
    from datasets import Dataset, Image
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import GRPOConfig, GRPOTrainer

    val, processor = rows(args.data / "val.parquet"), AutoProcessor.from_pretrained(args.folder)
    processor.tokenizer.padding_side = "left"
    model = AutoModelForImageTextToText.from_pretrained(args.folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision_model" not in name and "connector" not in name)
    print(f"before {held_out(model, processor, val):.3f}", flush=True)
    sizes = trl_peer.settings(args.data, max_steps=args.steps, per_forward=BATCH, batch_size=BATCH, cpu=True)
    config = GRPOConfig(
        **sizes,
        seed=args.seed,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list(rows(args.data / "train.parquet")).cast_column("image", Image()),
        processing_class=processor,
    )
    trainer.train()
    print(f"after {held_out(trainer.model, processor, val):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())
