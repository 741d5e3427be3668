"""DeepSpeed's ZeRO-2 and 3 sum the gradients of bf16 micro batches in bf16 unless told otherwise.

Public: https://github.com/deepspeedai/DeepSpeed/issues/1800. Prints the distance of the summed gradient of 64 micro
batches from the fp32 sum of the same bf16 gradients, also with `grad_accum_dtype` as the engine sets it.

    python -m benchmarks.silent.bf16_sums
"""

import torch
from deepspeed.utils import safe_get_full_grad
from transformers import AutoModelForCausalLM

from benchmarks.silent.lost_gradients import loss
from benchmarks.silent.setup import deepspeed_engine, rows, show, start
from ds_engine import EngineConfig
from ds_engine.zero.ds_config import deepspeed_config

NUM = 64


def main() -> None:
    folder, micro_batches = start(), rows(NUM).split(1)
    truth: dict[str, torch.Tensor] = {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for ids in micro_batches:
        loss(model, ids).backward()
        for name, weight in model.named_parameters():
            truth[name] = truth.get(name, 0) + weight.grad.float()
        model.zero_grad()
    for stage in (2, 3):
        errors = {}
        setting = {"data_types": deepspeed_config(EngineConfig(), device_type="cpu")["data_types"]}
        for name, accumulation in (("peer", {}), ("ours", setting)):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            engine = deepspeed_engine(
                model, stage, gradient_accumulation_steps=NUM, bf16={"enabled": True}, **accumulation
            )
            for ids in micro_batches:
                engine.backward(loss(engine, ids) * NUM)
                if ids is not micro_batches[-1]:
                    engine.step()
            squares = [(safe_get_full_grad(w) - truth[n]).square().sum() for n, w in model.named_parameters()]
            whole = sum(t.square().sum() for t in truth.values())
            errors[name] = round(float((sum(squares) / whole).sqrt()), 5)
        show("deepspeed", stage=stage, **errors)


if __name__ == "__main__":
    main()
