"""Writes a model of a real architecture with random weights, for benchmarks without downloads.

`python -m benchmarks.random_model qwen3-0.6b FOLDER` writes a Hugging Face folder: config, bf16 weights, and a
byte-level tokenizer (encodes every text; ids above 257 decode to an empty string).
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any


def qwen3(hidden: int, intermediate: int, layers: int, heads: int, **fields: Any) -> dict[str, Any]:
    """The fields in which models of Qwen3 differ, and those that they share."""
    return {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        **fields,
    }


def mixture(experts: int, per_token: int, width: int) -> dict[str, Any]:
    """The fields of Qwen3's mixtures of experts."""
    return {
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }


# Architecture fields as in the models' published config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": qwen3(2048, 6144, 28, 16),
    "qwen3-4b": qwen3(2560, 9728, 36, 32),
    "qwen3-8b": qwen3(4096, 12288, 36, 32, tie_word_embeddings=False),
    "qwen3-32b": qwen3(5120, 25600, 64, 64, tie_word_embeddings=False),
    # DeepSeek-R1-Distill-Qwen-7B
    "qwen2-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    # Qwen3-30B-A3B without 44 of its 48 layers: 3.1B parameters, of which a token uses 0.8B.
    "qwen3-30b-a3b-4-layers": qwen3(2048, 6144, 4, 32, **mixture(128, 8, 768), num_key_value_heads=4),
    # Small enough for a laptop: for testing a benchmark script.
    "qwen3-tiny": qwen3(
        128, 256, 2, 4, vocab_size=512, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048
    ),
    "qwen3-moe-tiny": qwen3(128, 256, 2, 4, **mixture(8, 2, 64), vocab_size=512, num_key_value_heads=2, head_dim=32),
}


def model_config(name: str, **fields: Any) -> Any:
    """The transformers config of model `name`; `fields` override its values."""
    from transformers import AutoConfig

    shape = {"model_type": "qwen3", "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, **CONFIGS[name], **fields}
    return AutoConfig.for_model(shape.pop("model_type"), **shape)


def write_random_model(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write model `name` to `folder` and return the folder."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    config = model_config(
        name, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="bfloat16"
    )
    # 7B weights take 4 minutes of one CPU core to draw, and seconds of a GPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ensure_random_model(name: str, folder: Path) -> None:
    """Writes model `name` unless `folder` has one; in a process of its own, which leaves no GPU memory taken."""
    if not (folder / "tokenizer_config.json").is_file():  # written last
        command = [sys.executable, "-m", "benchmarks.random_model", name, str(folder)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def write_empty_model(name: str, folder: Path) -> None:
    """Writes a folder without weights and without a tokenizer: for a loader that draws what is missing."""
    from safetensors.torch import save_file

    model_config(name, dtype="bfloat16").save_pretrained(folder)
    save_file({}, folder / "model.safetensors", metadata={"format": "pt"})


def byte_tokenizer() -> Any:
    """One token per byte, then end-of-sequence and padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|pad|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, *specials])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[0], pad_token=specials[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(CONFIGS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write_random_model(args.name, args.folder, seed=args.seed))
