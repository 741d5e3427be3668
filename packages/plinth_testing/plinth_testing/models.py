"""Randomly initialized causal language models of some ten thousand parameters, and word-level tokenizers for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_CONFIGS = {"qwen3": "Qwen3Config", "qwen2": "Qwen2Config", "llama": "LlamaConfig", "phi3": "Phi3Config"}
_CONFIGS["qwen3_moe"] = "Qwen3MoeConfig"
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": False}
QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
"""Sizes of Qwen3-0.6B, for planners."""
QWEN2_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
"""Sizes of Qwen2.5-7B and DeepSeek-R1-Distill-Qwen-7B."""


def tiny_config(family: str = "qwen3", **changes: Any) -> Any:
    """A transformers config: 64 tokens, hidden size 32, 2 layers, 4 heads on 2 KV heads, tied embeddings.

    Args:
        family: qwen3, qwen2, llama, phi3 or qwen3_moe (8 experts, 2 for each token).
        changes: other values, under transformers' names. Widths of MLPs and heads follow `hidden_size`.
    """
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,  # ten times the usual: predictions far from uniform, so that a wrong weight shows
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    sizes |= (_EXPERTS if family == "qwen3_moe" else {}) | changes
    derived = {
        "intermediate_size": 2 * sizes["hidden_size"],
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
    }
    if family == "qwen3_moe":
        derived["moe_intermediate_size"] = sizes["hidden_size"]
    return getattr(transformers, _CONFIGS[family])(**(derived | sizes))


def random_model(config: Any, *, seed: int = 0, random_norms: bool = False) -> Any:
    """A causal language model in fp32 and eval mode.

    Args:
        random_norms: draws one-dimensional weights from [0.5, 1.5] instead of leaving them at 1 or 0.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if random_norms:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.uniform_(0.5, 1.5)
    return model.eval()


def write_tiny_model(folder: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """Writes `random_model(tiny_config(family, **changes))` as a Hugging Face folder without a tokenizer."""
    random_model(tiny_config(family, **changes), seed=seed).save_pretrained(folder)
    return folder


def make_classifier(folder: Path, *, num_labels: int = 1, seed: int = 0) -> Path:
    """Turns a causal LM folder into a sequence classifier with a random head; a reward model has one label."""
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=num_labels, dtype=torch.float32
    )
    head = model.score.weight
    with torch.no_grad():
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(seed)))
    model.save_pretrained(folder)
    return folder


def write_word_tokenizer(folder: Path, vocab_size: int = 64, **special_tokens: str) -> None:
    """Adds a tokenizer to a model folder: token i is the word "w<i>"; unknown words are `unk_token`, by default "w1".

    Args:
        special_tokens: of `PreTrainedTokenizerFast`, say `eos_token="w0"`; also `chat_template`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=special_tokens.get("unk_token", "w1")))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens).save_pretrained(folder)
