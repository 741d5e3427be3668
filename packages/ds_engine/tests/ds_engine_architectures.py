"""Architectures of transformers that the tests compare: small random folders and upstream's own padded forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ds_engine_testkit import Sample, token_loss
from torch import Tensor

from ds_engine.model.small_copy import small_config

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **_EXPERTS}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8, "mamba_expand": 2}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 12,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "factor": 4.0,
}

PACKED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, **_EXPERTS},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": {"num_key_value_heads": 4},
    "phi3": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 12},
    "olmo": {},
    "olmo2": {},
    "glm": {"head_dim": 8},
    "gpt2": {},
    "gpt_neox": {},
    "deepseek_v3": {**_LATENT, **_ROUTED, "num_key_value_heads": 4},
    "cohere": {"logit_scale": 0.4},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "seed_oss": {"head_dim": 8},
}
"""Architectures that are exact on one packed row, by model_type, with what differs from `SIZES`."""

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 24, **_EXPERTS, **_DELTA},
    "qwen3_5_text": {"head_dim": 16, **_DELTA},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 2,
        "logits_scaling": 4.0,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_n_groups": 1, "head_dim": 8},
    "nemotron_h": {
        **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "chunk_size", "head_dim"), 8),
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "n_groups": 1,
    },
    "olmo_hybrid": _DELTA,
    "kimi_linear": {
        **(_LATENT | _EXPERTS | {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_token": 2}),
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["linear_attention", "full_attention"],
    },
}
"""Architectures with recurrent layers, which get the borders of the packed row (recurrence.py)."""

ROWS: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA,
    "bloom": {},
    "falcon": {"num_kv_heads": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_neox_japanese": {},
    "doge": {},
    "phimoe": {"sliding_window": 5, "num_local_experts": 2, "router_jitter_noise": 0.0},
    "codegen": {"rotary_dim": 4},
    "openai-gpt": {},
    "xglm": {"ffn_dim": 48},
}
"""Architectures that are exact as padded rows only."""

MORE_HYBRIDS = ("bamba", "minimax", "zamba2")
"""More of them, tested with their default configurations made small."""

REFUSED: dict[str, dict[str, Any]] = {
    "bert": {},
    "gemma3_text": {"use_bidirectional_attention": True},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.1},
    "modernbert-decoder": {"pad_token_id": 0},
    "recurrent_gemma": {"head_dim": 8, "pad_token_id": 0},
}
"""Architectures that are neither."""


def tiny_architecture(model_type: str, changes: dict[str, Any]) -> Any:
    """The configuration of a small model."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    if model_type in MORE_HYBRIDS:
        return small_config(kind())
    known = {*kind().to_dict(), *kind.attribute_map}
    return kind(**{name: value for name, value in SIZES.items() if name in known} | changes)


def write_architecture(folder: Path, model_type: str, changes: dict[str, Any]) -> Path:
    """A model folder with random weights, biases and scales, all of which change its outputs."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_architecture(model_type, changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.copy_((parameter if parameter.ndim == 1 else 0) + scale * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def padded_loss(model: Any, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """(`token_loss`, log-probs [K]) of transformers' own forward: rows padded on the right, full logits."""
    longest = max(len(s.ids) for s in samples)
    ids_BL = torch.tensor([s.ids + [0] * (longest - len(s.ids)) for s in samples])
    mask_BL = torch.tensor([[1] * len(s.ids) + [0] * (longest - len(s.ids)) for s in samples])
    log_p = model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits.log_softmax(-1)
    log_probs, entropies, weights = [], [], []
    for row, sample in zip(log_p, samples, strict=True):
        response = torch.tensor(sample.ids[sample.num_prompt :])
        log_p_KV = row[sample.num_prompt - 1 : len(sample.ids) - 1]
        log_probs.append(log_p_KV.gather(1, response[:, None])[:, 0])
        entropies.append(-(log_p_KV.exp() * log_p_KV).sum(-1))
        weights.append(torch.full((len(response),), sample.weight))
    log_probs_K = torch.cat(log_probs)
    return token_loss(log_probs_K, torch.cat(entropies), torch.cat(weights)), log_probs_K.detach()


def all_architectures() -> dict[str, list[str]]:
    """Every causal language model of transformers by way, tried with its default configuration."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from ds_engine.errors import ModelError, UntriedModelError
    from ds_engine.model.trial import try_model

    ways: dict[str, list[str]] = {"packed": [], "rows": [], "refused": [], "not tried": []}
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # some default configurations are not valid
            ways["not tried"].append(name)
            continue
        try:
            way: str = try_model(config).way
        except ModelError as error:
            way = "not tried" if isinstance(error, UntriedModelError) else "refused"
        ways[way].append(name)
    return ways


if __name__ == "__main__":
    for way, names in all_architectures().items():
        print(f"{way}: {', '.join(f'`{name}`' for name in names)}\n")
