"""Weights that outlive `GatheredParameters`: views of them, and gathers inside of other gathers.

Public: https://github.com/huggingface/trl/pull/6765 (views in a packed send buffer) and
https://github.com/huggingface/trl/pull/6386 (nested gathers). Prints the share of elements that are wrong after the
context, and what is left of a weight inside the outer context when the inner one ends.

    python -m benchmarks.silent.gathered_views
"""

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from transformers import AutoModelForCausalLM

from benchmarks.silent.setup import CPU, deepspeed_engine, show, start
from ds_engine import EngineConfig, ZeroConfig, ZeroEngine, dense_log_prob


def wrong(tensors: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Share of elements that differ."""
    return sum(int((tensors[n].view_as(t) != t).sum()) for n, t in truth.items()) / sum(
        map(torch.numel, truth.values())
    )


def main() -> None:
    folder = start()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    truth = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    deepspeed_engine(model, 3)
    views = {}
    for name, weight in model.named_parameters():
        with GatheredParameters([weight]):
            views[name] = weight.data.view(-1)
    weight = model.model.layers[0].mlp.up_proj.weight
    try:
        with GatheredParameters([weight]):
            with GatheredParameters([weight]):
                pass
            nested = f"{weight.numel()} of {weight.ds_numel} elements left"
    except RuntimeError as error:
        nested = f"raises {str(error).split(';')[0]}"
    config = EngineConfig(zero=ZeroConfig(stage=3), dtype="float32")
    engine = ZeroEngine.from_pretrained(folder, config, log_prob_fn=dense_log_prob, device=CPU)
    kept = dict(engine.export_parameters())
    show("deepspeed", peer_views=wrong(views, truth), ours=wrong(kept, truth), peer_nested=nested)


if __name__ == "__main__":
    main()
