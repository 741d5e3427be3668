"""ZeRO-1 and 2 of DeepSpeed keep only the last micro batch's gradient unless accumulation boundaries are marked.

Every `backward()` is a boundary where `gradient_accumulation_steps` is 1, as it is wherever the number of micro batches
varies. Public: https://github.com/allenai/open-instruct/pull/1498.

    python -m benchmarks.silent.lost_gradients
"""

import torch
from transformers import AutoModelForCausalLM

from benchmarks.silent.setup import CPU, deepspeed_engine, packed, rows, show, start
from ds_engine import EngineConfig, LossOutput, ZeroConfig, ZeroEngine, dense_log_prob


def loss(model: torch.nn.Module, ids_BL: torch.Tensor) -> torch.Tensor:
    log_p: torch.Tensor = model(input_ids=ids_BL, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return log_p.gather(-1, ids_BL[:, 1:, None]).sum().div(-124)


def main() -> None:
    folder, micro_batches = start(), rows(4).split(1)
    for stage in (1, 2, 3):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.stack([loss(model, ids) for ids in micro_batches]).sum().backward()
        true_norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
        model.zero_grad()
        engine = deepspeed_engine(model, stage)
        for ids in micro_batches:
            engine.backward(loss(engine, ids))
        engine.step()
        config = EngineConfig(zero=ZeroConfig(stage=stage), dtype="float32")
        ours = ZeroEngine.from_pretrained(folder, config, log_prob_fn=dense_log_prob, device=CPU)
        batches = [packed(ids) for ids in micro_batches]
        stats = ours.train_mini_batch(batches, lambda out, _: LossOutput(loss=-out.log_probs_K.sum() / 124))
        norms = {"peer": engine.get_global_grad_norm(), "ours": stats.grad_norm, "true": true_norm}
        show("deepspeed", stage=stage, **{name: round(float(norm), 4) for name, norm in norms.items()})


if __name__ == "__main__":
    main()
