"""Serves random models of several families with vLLM, one after another in this process, and loads other weights.

Run by test_weight_sync_families.py: `weight_sync_families_worker.py FOLDER FAMILY[:DTYPE] ...`; FOLDER/<family>/old and
new are the two models. Prints one JSON line for each family.
"""

import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}

import numpy
import torch
from PIL import Image
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from weight_sync import HfFolderSource, ReceiverError, plan_buckets
from weight_sync.vllm_plugin.processing import record_of

PROMPTS = [[5, 6, 7, 8, 2, 90, 33, 71, 14, 15, 60, 4], [11, 3, 42, 9, 17, 23], list(range(2, 60))]


class Served:
    """A model in vLLM."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        self._llm = LLM(
            str(folder),
            dtype=dtype,
            enforce_eager=True,
            # MLA on CPUs with AMX packs weights in a way that pushes refuse.
            attention_config={"backend": "CPU_MLA"},
            max_model_len=128,
            max_num_seqs=8,
            kv_cache_memory_bytes=64 << 20,
            enable_chunked_prefill=False,
            enable_prefix_caching=False,
            weight_transfer_config={"backend": "plinth"},
            disable_log_stats=True,
        )
        self._prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        if (folder / "processor_config.json").is_file():
            noise = numpy.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=numpy.uint8)
            ids = AutoTokenizer.from_pretrained(folder)("Look: <image> What is it?")["input_ids"]
            self._prompts += [{"prompt_token_ids": ids, "multi_modal_data": {"image": Image.fromarray(noise)}}]
        worker: Any = self._llm.llm_engine.model_executor.driver_worker
        self.loader = worker.weight_transfer_engine._loader

    def log_probs(self) -> list[float]:
        """Log-probs of the prompts' tokens."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        self._llm.llm_engine.reset_encoder_cache()  # as a push does
        outputs = self._llm.generate(self._prompts, params, use_tqdm=False)
        return [
            entry[token].logprob
            for output in outputs
            for entry, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        ]

    def push(self, folder: Path, *, layerwise: bool = False, corrupts: bool = False) -> None:
        """Load the weights of a folder in several buckets and verify them, corrupted in the meantime or not."""
        source = HfFolderSource(folder)
        plan = plan_buckets(source.manifest(), 60_000)
        self.loader.begin(self.loader.check(plan), layerwise=layerwise)
        verifier = self.loader.verifier()
        for pass_, finish in ((self.loader.load, self.loader.finish), (verifier.verify, verifier.finish)):
            if corrupts and pass_ == verifier.verify:
                self._corrupt()
            for bucket in plan.buckets:
                bytes_N = torch.empty(bucket.nbytes, dtype=torch.uint8)
                source.fill(bucket, bytes_N)
                pass_(bucket, bytes_N)
                bytes_N.fill_(0xAB)  # the memory of a bucket is reused
            assert finish() == plan.num_tensors

    def _corrupt(self) -> None:
        """Change one element of a tensor that vLLM's processing changed, such as packed experts."""
        changed = [
            module.get_parameter(name)
            for module in self.loader._model.modules()
            if (record := record_of(module)) is not None
            for name in record.changed | record.derived
        ]
        live = next((param for param in changed if param.numel()), None)
        if live is None:
            live = next(param for param in self.loader._model.parameters() if param.numel())
        live.data[(0,) * live.ndim] += 1


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs)
    return max(math.inf if math.isnan(a - b) else abs(a - b) for a, b in zip(ours, theirs, strict=True))


def check(folder: Path, dtype: str) -> dict[str, Any]:
    """Differences of log-probs after pushes, from before and from a fresh start with the pushed weights."""
    result: dict[str, Any] = {}
    fresh = Served(folder / "new", dtype).log_probs()
    served = Served(folder / "old", dtype)
    before = served.log_probs()
    result["moved"] = largest_difference(before, fresh)
    for layerwise in (False, True):
        served.push(folder / "old", layerwise=layerwise)
        same = largest_difference(served.log_probs(), before)
        served.push(folder / "new", layerwise=layerwise)
        other = largest_difference(served.log_probs(), fresh)
        result["layerwise" if layerwise else "auto"] = [same, other]
    try:
        served.push(folder / "old", corrupts=True)
    except ReceiverError as error:
        result["corruption"] = error.kind
    return result


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        family, _, dtype = argument.partition(":")
        try:
            result = check(Path(sys.argv[1]) / family, dtype or "float32")
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print("family", json.dumps({"family": family, **result}), flush=True)
