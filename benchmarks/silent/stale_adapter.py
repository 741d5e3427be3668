"""vLLM answers with keys and values of the last LoRA adapter where a new one is loaded under the same name.

The prefix cache knows an adapter by its name. Public: https://github.com/vllm-project/vllm/issues/42125. Prints the
largest difference between the server's log-probs and PEFT's of the adapter that was loaded last: after
`/v1/load_lora_adapter` with `load_inplace`, after a push of weight_sync, and where a request names the base model.

    python -m benchmarks.silent.stale_adapter
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.random_model import write_random_model
from benchmarks.runs import free_port
from benchmarks.silent.setup import rows, show
from plinth_base.endpoint import Endpoint
from weight_sync import Adapter, ModuleSource, WeightPusher, peft_name, server_args, server_env

PROMPT = rows(1, 256)[0].tolist()
FLAGS = "--dtype float32 --enforce-eager --max-model-len 512 --enable-lora --max-lora-rank 8 --served-model-name policy"


def tuned(folder: str, seed: int) -> Any:
    """The model with random adapters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"]))
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0.0, 0.1)
    return model.eval()


def post(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read()


def difference(url: str, name: str, model: Any) -> float:
    """Between the server's log-probs of its greedy answer and the model's."""
    options = {"max_tokens": 8, "temperature": 0.0, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    choice = json.loads(post(url, "/v1/completions", model=name, prompt=PROMPT, **options))["choices"][0]
    ids = torch.tensor([[*PROMPT, *choice["token_ids"]]])
    with torch.no_grad():
        log_p = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    own = log_p.gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
    return round(float((own - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max()), 4)


def main() -> None:
    folder, adapter = str(write_random_model("qwen3-tiny", Path(tempfile.mkdtemp()))), tempfile.mkdtemp()
    first, second, url = tuned(folder, 1), tuned(folder, 2), f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", url[-5:]]
    flags = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment = {**os.environ, **server_env("cpu"), **flags}
    server = subprocess.Popen([*command, *FLAGS.split(), *server_args()], env=environment, stdout=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            try:
                post(url, "/v1/completions", model="policy", prompt=[1], max_tokens=1)
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
        errors = {}
        for model in (first, second):
            model.save_pretrained(adapter)
            post(url, "/v1/load_lora_adapter", lora_name="files", lora_path=adapter, load_inplace=True)
            errors["peer"] = difference(url, "files", model)
        errors["peer_names_the_base"] = difference(url, "policy", second)
        settings = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "up_proj"]}
        for version, model in enumerate((first, second), 1):
            source = ModuleSource(model, rename=peft_name)
            with WeightPusher(source, [Endpoint(url)], adapter=Adapter(name="pushed", settings=settings)) as pusher:
                pusher.push(version)
            errors["ours"] = difference(url, "pushed", model)
        show("vllm_cpu", **errors)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
