"""A mixture of experts of three layers, the first of which has none, and keys of `plinth grpo` that train it."""

import json
from pathlib import Path

from plinth_testing import random_model, tiny_config, write_word_tokenizer


def mixture_keys(folder: Path) -> list[str]:
    """Writes the model and its data to the folder."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = tiny_config("qwen3_moe", **sizes, mlp_only_layers=[0], max_position_embeddings=128, pad_token_id=0)
    random_model(config).save_pretrained(folder / "model")
    write_word_tokenizer(folder / "model", 64, eos_token="w2", bos_token="w1", pad_token="w0")
    data = folder / "train.jsonl"
    data.write_text("\n".join(json.dumps({"question": f"w{i} w{i + 1} w{i + 2}"}) for i in range(3, 40)))
    return [
        *(f"model.path={folder / 'model'}", f"data.train=[{data}]", "data.max_prompt_length=16"),
        *("reward.function=benchmarks.grpo_step.workload:parity", "trainer.num_ranks=2", "batch.mini_batch_size=4"),
        *("rollout.max_model_len=48", "rollout.kv_cache_gib=0.1", "sampling.n=4", "sampling.max_tokens=24"),
        *("actor.optim.lr=1e-3", "trainer.val_before_train=false", "trainer.val_after_train=false"),
    ]
