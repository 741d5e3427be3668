"""TRL's importance ratio between trainer and vLLM has a factor where `top_p` cuts the distribution.

vLLM's `processed_logprobs`, which TRL sets, are those of the kept tokens, the trainer's those of all. Public:
https://github.com/huggingface/trl/issues/6789. Prints the mean ratio of sampled tokens, 1 if nothing is wrong, and what
a GRPO run says to the same settings.

    python -m benchmarks.silent.top_p
"""

import inspect
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from trl.generation.vllm_generation import VLLMGeneration
from vllm import LLM, SamplingParams

from benchmarks.random_model import write_random_model
from benchmarks.silent.setup import show


def main() -> None:
    assert 'logprobs_mode="processed_logprobs"' in inspect.getsource(VLLMGeneration)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    folder = str(write_random_model("qwen3-tiny", Path(tempfile.mkdtemp())))
    llm = LLM(folder, dtype="float32", enforce_eager=True, logprobs_mode="processed_logprobs", max_model_len=128)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ratios = {}
    for top_p in (1.0, 0.8):
        sampling = SamplingParams(
            temperature=1.0, top_p=top_p, max_tokens=64, logprobs=0, seed=0, n=32, ignore_eos=True
        )
        logs = []
        for sample in llm.generate({"prompt_token_ids": [5, 6, 7]}, sampling)[0].outputs:
            ids = torch.tensor([[5, 6, 7, *sample.token_ids]])
            with torch.no_grad():
                log_p = model(input_ids=ids).logits[0, 2:-1].log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0]
            theirs = [p[token].logprob for p, token in zip(sample.logprobs, sample.token_ids, strict=True)]
            logs.append(log_p - torch.tensor(theirs))
        ratios[f"peer_top_p_{top_p}"] = round(float(torch.cat(logs).exp().mean()), 4)
    keys = ["sampling.top_p=0.8", "algorithm.rollout_correction.mode=truncate"]
    ran = subprocess.run([sys.executable, "-m", "apps.grpo.main", *keys], capture_output=True, text=True, check=False)
    show("trl", **ratios, ours=next(line for line in ran.stderr.splitlines() if "top_p" in line))


if __name__ == "__main__":
    main()
