"""DeepSpeed's ZeRO-3 rounds rotary frequencies to bf16 when a model is built, which turns far positions by radians.

Public: https://github.com/deepspeedai/DeepSpeed/issues/4932. Prints the largest error of a rotary angle at position
32,768, in radians.

    python -m benchmarks.silent.rounded_positions
"""

import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from benchmarks.silent.setup import CPU, show, start
from ds_engine import EngineConfig, ZeroConfig, ZeroEngine, dense_log_prob


def frequencies(model: torch.nn.Module) -> torch.Tensor:
    return model.get_buffer("model.rotary_emb.inv_freq").double()


def main() -> None:
    folder = start()
    exact = frequencies(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    alive = HfDeepSpeedConfig(settings)
    theirs = frequencies(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    del alive
    config = EngineConfig(zero=ZeroConfig(stage=3), dtype="bfloat16")
    engine = ZeroEngine.from_pretrained(folder, config, log_prob_fn=dense_log_prob, device=CPU)
    errors = {"peer": theirs, "ours": frequencies(engine.module)}
    show("deepspeed", **{name: round(float((f - exact).abs().max()) * 32768, 3) for name, f in errors.items()})


if __name__ == "__main__":
    main()
