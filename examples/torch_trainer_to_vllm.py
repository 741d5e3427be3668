"""Weights of a plain torch trainer, and of any trainer with callbacks (TRL, Transformers), in a running vLLM server.

    pip install trl
    python examples/torch_trainer_to_vllm.py

What it buys: three lines put the new weights into the server after every step. Without them the trainer writes a
checkpoint, and the server is restarted or loads it by vLLM's own `reload_weights`. The script trains a small model,
sends its weights in all four ways, and after each compares the server's log-probs with the trainer's.

Measured with this command on two busy CPU cores, 92 MB of float32 weights with a tied head:

* a push takes 0.18 to 0.23 s (the first one of a pusher 0.56 s), and the server's log-probs are the trainer's to 8e-6;
* a checkpoint and `reload_weights` take 0.41 s, and log-probs differ by 0.03 after one step: on a CPU vLLM packs a tied
  head and leaves its old weights in place (vLLM 0.32, without an error). A push after it fixes that;
* a checkpoint and a new server take 41 s; log-probs agree to 9e-6.

Trainers with several ranks build the pusher on all of them (`rank=`); `ZeroSource` reads DeepSpeed's weights.
"""

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from plinth_testing import write_tiny_model, write_word_tokenizer
from rollout_vllm import Endpoint, Request, RolloutClient, RolloutConfig, SamplingConfig, ServerGroup
from weight_sync import ModuleSource, WeightPusher, server_args, server_env


class PushToVllm(TrainerCallback):
    """`SFTTrainer(..., callbacks=[PushToVllm(endpoints)])`: the server has the new weights after every step."""

    def __init__(self, endpoints: list[Endpoint]) -> None:
        self._endpoints = endpoints
        self.push_s: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        source = ModuleSource(kwargs["model"])
        self._pusher = WeightPusher(source, self._endpoints, rank=args.process_index, device=args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.push_s.append(self._pusher.push(version=state.global_step).total_s)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pusher.close()


def train_plain_torch(model: Any, endpoints: list[Endpoint], num_steps: int) -> list[float]:
    """A loop without a framework; seconds of each push."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    push_s = []
    with WeightPusher(ModuleSource(model), endpoints) as pusher:
        for step in range(1, num_steps + 1):
            train_step(model, optimizer)
            push_s.append(pusher.push(version=step).total_s)
    return push_s


def train_with_trl(model: Any, folder: Path, endpoints: list[Endpoint], num_steps: int) -> list[float]:
    """TRL's trainer with the callback; seconds of each push."""
    callback = PushToVllm(endpoints)
    with tempfile.TemporaryDirectory() as output:
        SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=output,
                max_steps=num_steps,
                per_device_train_batch_size=2,
                learning_rate=1e-3,
                bf16=False,
                use_cpu=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"input_ids": list(range(3, 40))}] * 2 * num_steps),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[callback],
        ).train()
    return callback.push_s


def train_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    ids_BL = torch.arange(3, 40)[None]
    model(input_ids=ids_BL, labels=ids_BL).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


async def reload_from_disk(endpoint: Endpoint, folder: Path) -> None:
    """vLLM's own way, a route of its development mode: the server reads a checkpoint on its disk."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/pause?mode=wait", {}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}),
        ("/reset_prefix_cache", {}),
        ("/resume", {}),
    ]
    async with aiohttp.ClientSession(endpoint.url, headers=headers, raise_for_status=True) as session:
        for path, body in calls:
            async with session.post(path, json=body) as answer:
                await answer.read()


@torch.no_grad()
def largest_difference(model: Any, endpoint: Endpoint) -> float:
    """Between the server's log-probs of 4 x 16 tokens that it samples, and the trainer's of the same tokens."""
    requests = [Request(prompt_id=str(i), prompt_ids=[5 + i, 9, 30 - i], seed=i) for i in range(4)]
    with RolloutClient([endpoint]) as client:
        groups = client.generate_blocking(requests, SamplingConfig(n=1, max_tokens=16, ignore_eos=True))
    model.eval()
    largest = 0.0
    for request, group in zip(requests, groups, strict=True):
        [sample] = group.samples
        ids_L = torch.tensor([*request.prompt_ids, *sample.response_ids])
        log_probs_TV = model(input_ids=ids_L[None]).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        log_probs_T = log_probs_TV.gather(1, torch.tensor(sample.response_ids, dtype=torch.int64)[:, None])[:, 0]
        assert sample.log_probs is not None
        largest = max(largest, float((log_probs_T - torch.tensor(sample.log_probs)).abs().max()))
    return largest


class Row(NamedTuple):
    """One way of bringing weights into the server: seconds until it has them, and how far its log-probs are off."""

    way: str
    seconds: float
    difference: float


@contextlib.contextmanager
def running_server(folder: Path, logs: Path) -> Iterator[Endpoint]:
    """A vLLM server on the CPU that takes pushed weights."""
    config = RolloutConfig(max_model_len=128, dtype="float32", cpu_threads=1, kv_cache_gib=0.1, control_routes=True)
    args, env = server_args(), server_env("cpu")
    with ServerGroup.launch(folder, config, log_dir=logs, extra_args=args, env=env) as servers:
        servers.wait_ready()
        yield servers.endpoints[0]


def compare(endpoint: Endpoint, folder: Path, num_steps: int) -> Iterator[Row]:
    """The ways that leave the server running. The model in `folder` is the one that it was started with."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = largest_difference(model, endpoint)
    trainers: dict[str, Callable[[], list[float]]] = {
        "plain torch, push": lambda: train_plain_torch(model, [endpoint], num_steps),
        "TRL callback, push": lambda: train_with_trl(model, folder, [endpoint], num_steps),
    }
    yield Row("as started", 0.0, before)
    for way, train in trainers.items():
        push_s = train()
        yield Row(way, median(push_s), largest_difference(model, endpoint))
    train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    yield Row("trained, nothing sent", 0.0, largest_difference(model, endpoint))
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        model.save_pretrained(name)
        with RolloutClient([endpoint]) as client:
            client.run(reload_from_disk(endpoint, Path(name)))
        yield Row("checkpoint, vLLM's reload_weights", time.perf_counter() - start, largest_difference(model, endpoint))
    with WeightPusher(ModuleSource(model), [endpoint]) as pusher:
        seconds = pusher.push(version=2 * num_steps + 1).total_s
    yield Row("push after it", seconds, largest_difference(model, endpoint))


def show(row: Row) -> None:
    took = f"{1000 * row.seconds:6.0f} ms" if row.seconds else " " * 9
    print(f"{row.way:34s} {took}   largest difference of log-probs {row.difference:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="an existing server with VLLM_SERVER_DEV_MODE=1 and the backend plinth, in fp32")
    parser.add_argument("--model", type=Path, help="the folder that it was started with")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if options.url and not options.model:
        parser.error("--url needs --model, the folder that this server was started with")
    if options.url:
        for row in compare(Endpoint(options.url, os.environ.get("VLLM_API_KEY")), options.model, options.steps):
            show(row)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        sizes = {"hidden_size": options.hidden, "num_hidden_layers": options.layers, "initializer_range": 0.05}
        write_tiny_model(folder, vocab_size=8192, **sizes)
        write_word_tokenizer(folder, 8192, eos_token="w2", pad_token="w0")
        print(f"{sum(file.stat().st_size for file in folder.glob('*.safetensors')) / 1e6:.0f} MB of weights")
        with running_server(folder, Path(name)) as endpoint:
            for row in compare(endpoint, folder, options.steps):
                show(row)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        start = time.perf_counter()
        model.save_pretrained(folder)
        with running_server(folder, Path(name)) as endpoint:
            show(Row("checkpoint, new server", time.perf_counter() - start, largest_difference(model, endpoint)))


if __name__ == "__main__":
    main()
