"""Randomly initialized vision-language models of about a million parameters, with tokenizers and image processors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

FAMILIES = ("idefics3", "gemma3", "qwen2_5_vl", "qwen3_vl", "smolvlm", "llava_onevision")
"""Those after the first two have a video processor, which needs torchvision: without it `AutoProcessor` and vLLM cannot
load their folders, but `AutoImageProcessor` and `AutoTokenizer` can."""

_PLACEHOLDERS = {
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "llava_onevision": "<image>",
    "gemma3": "<start_of_image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
"""An image in the chat template, before expansion."""
_SPECIAL = (
    *("<pad>", "<s>", "<|im_start|>", "<|im_end|>", "<image>", "<video>", "<fake_token_around_image>", "<global-img>"),
    *("<end_of_utterance>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SIDE = 56
"""Height and width in pixels of the images of families whose size is fixed."""


def vision_tokenizer(family: str = "idefics3", *, words: Sequence[str] = ()) -> Any:
    """A tokenizer of bytes, `words` and the special tokens of all families, with a chat template for `family`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.add_tokens(list(words))
    image = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        chat_template=_TEMPLATE.replace("IMAGE", _PLACEHOLDERS[family]),
        extra_special_tokens=image if family == "gemma3" else {},
    )


def tiny_vlm_config(family: str = "idefics3", tokenizer: Any = None, **changes: Any) -> Any:
    """A transformers config: hidden size 128, 4 layers, 4 heads on 2 KV heads, 2 vision layers of width 64.

    Args:
        tokenizer: gives the ids of special tokens and the size of the vocabulary.
        changes: other values of the text model, under transformers' names.
    """
    import transformers

    tokenizer = tokenizer or vision_tokenizer(family)
    token_id = tokenizer.convert_tokens_to_ids
    text: dict[str, Any] = {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vit: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
    siglip = vit | {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": _SIDE, "patch_size": 14}
    qwen = vit | {"depth": 2, "num_heads": 4, "patch_size": 14, "out_hidden_size": 128}
    special: dict[str, Any] = {"tie_word_embeddings": True}
    if family in ("idefics3", "smolvlm"):
        config_class = transformers.Idefics3Config if family == "idefics3" else transformers.SmolVLMConfig
        text |= {"model_type": "llama"}
        vision = siglip
        special |= {"scale_factor": 2, "image_token_id": token_id("<image>"), "pad_token_id": tokenizer.pad_token_id}
    elif family == "gemma3":
        config_class = transformers.Gemma3Config
        num_layers = changes.get("num_hidden_layers", text["num_hidden_layers"])
        kinds = (["sliding_attention", "full_attention"] * num_layers)[:num_layers]
        text |= {"query_pre_attn_scalar": 32, "sliding_window": 32, "layer_types": kinds}
        vision = siglip | {"vision_use_head": False}
        special |= {
            "mm_tokens_per_image": 4,
            "boi_token_index": token_id("<start_of_image>"),
            "eoi_token_index": token_id("<end_of_image>"),
            "image_token_index": token_id("<image_soft_token>"),
        }
    elif family == "llava_onevision":
        config_class = transformers.LlavaOnevisionConfig
        text |= {"model_type": "qwen2"}
        vision = siglip | {"model_type": "siglip_vision_model", "vision_use_head": False}
        special |= {
            "image_token_index": token_id("<image>"),
            "video_token_index": token_id("<video>"),
            "image_grid_pinpoints": [[_SIDE, _SIDE], [_SIDE, 2 * _SIDE], [2 * _SIDE, _SIDE]],
        }
    else:
        is_qwen3 = family == "qwen3_vl"
        config_class = transformers.Qwen3VLConfig if is_qwen3 else transformers.Qwen2_5_VLConfig
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
        text |= {"rope_parameters": rope | ({"mrope_interleaved": True} if is_qwen3 else {})}
        if is_qwen3:
            vision = qwen | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        else:
            vision = qwen | {"window_size": 56, "fullatt_block_indexes": [1]}
        special |= {
            "image_token_id": token_id("<|image_pad|>"),
            "video_token_id": token_id("<|video_pad|>"),
            "vision_start_token_id": token_id("<|vision_start|>"),
            "vision_end_token_id": token_id("<|vision_end|>"),
        }
    return config_class(text_config=text | changes, vision_config=vision, **special)


def vision_processor(family: str = "idefics3", tokenizer: Any = None) -> Any:
    """The family's processor for `tiny_vlm_config`; of the families with videos the image processor alone."""
    import transformers

    tokenizer = tokenizer or vision_tokenizer(family)
    template: dict[str, Any] = {"chat_template": tokenizer.chat_template}
    side = {"height": _SIDE, "width": _SIDE}
    edge = {"longest_edge": _SIDE}
    if family == "idefics3":
        images = transformers.Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
        return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, **template)
    if family == "gemma3":
        images = transformers.Gemma3ImageProcessorPil(size=side)
        return transformers.Gemma3Processor(images, tokenizer, image_seq_length=4, **template)
    if family == "smolvlm":
        return transformers.SmolVLMImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    if family == "llava_onevision":
        pinpoints = [[_SIDE, _SIDE], [_SIDE, 2 * _SIDE], [2 * _SIDE, _SIDE]]
        return transformers.LlavaOnevisionImageProcessorPil(size=side, image_grid_pinpoints=pinpoints)
    sizes = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    return transformers.Qwen2VLImageProcessorPil(patch_size=14, size=sizes)


def tiny_vlm(
    folder: Path, family: str = "idefics3", *, seed: int = 0, words: Sequence[str] = (), **changes: Any
) -> Path:
    """Writes a random model in fp32 with its tokenizer and `vision_processor` as a Hugging Face folder.

    Args:
        family: one of `FAMILIES`.
        words: texts that are one token each.
        changes: other values of the text model's configuration.
    """
    import torch
    import transformers

    tokenizer = vision_tokenizer(family, words=words)
    torch.manual_seed(seed)
    config = tiny_vlm_config(family, tokenizer, **changes)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():  # Gemma 3's projection, which would hide the image
                parameter.normal_(std=0.1)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    vision_processor(family, tokenizer).save_pretrained(folder)
    return folder
