"""Hybrids of transformers mix the sequences of a packed row: convolutions and recurrences ignore `position_ids`.

Public: https://github.com/unslothai/unsloth/pull/7249. Prints the largest difference of a log-prob of the second
sequence from that sequence alone: on transformers' packed row, and as the engine computes the batch.

    python -m benchmarks.silent.mixed_sequences
"""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.silent.setup import CPU, packed, rows, show, start
from ds_engine import EngineConfig, ZeroEngine, dense_log_prob

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip


def main() -> None:
    folder, ids_BL = start(), rows(2)
    positions = torch.arange(32).repeat(2)[None]
    for kind, changes in KINDS.items():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**SIZES, **changes, initializer_range=0.2)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.save_pretrained(folder)
        with torch.no_grad():
            alone, joined = (
                model(input_ids=ids, position_ids=p, use_cache=False).logits[0, -32:-1].log_softmax(-1)
                for ids, p in ((ids_BL[1:], positions[:, :32]), (ids_BL.view(1, -1), positions))
            )
        alone, joined = (log_p.gather(-1, ids_BL[1, 1:, None])[:, 0] for log_p in (alone, joined))
        engine = ZeroEngine.from_pretrained(
            folder, EngineConfig(dtype="float32"), log_prob_fn=dense_log_prob, device=CPU, trainable=False
        )
        (ours,) = engine.log_probs([packed(ids_BL)])
        differences = {"peer": joined - alone, "ours": ours.log_probs_K[31:] - alone}
        show("transformers", model=kind, **{name: round(float(d.abs().max()), 6) for name, d in differences.items()})


if __name__ == "__main__":
    main()
