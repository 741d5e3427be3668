"""Measures the host memory of trainer ranks with LoRA, for both kinds of reference model.

    python -m benchmarks.reference_memory.measure --stage 2 --ranks 2

Each rank builds an actor with adapters of rank 16 on a random Qwen3 model (the layers of Qwen3-0.6B) and computes
log-probs: with its adapters, without them (a reference for free), and with a second, frozen engine. It prints a line
of JSON: the growth of the ranks' proportional set size (PSS), summed over the ranks, and the size of the weights.

The weights are computed in float32 and stored in bfloat16, so that every engine has a copy, as on a GPU. Frozen weights
in the dtype of the file would be the file's own pages, mapped once for all engines of a host.
"""

import argparse
import gc
import json
import os
import tempfile
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.random_model import model_config
from ds_engine import EngineConfig, LoraConfig, OptimConfig, ZeroConfig
from plinth_testing import SpmdGroup, run_ranks
from rl_core import BatchConfig, pack
from rl_runtime.ranks.model_handle import ModelHandle, WithoutAdapters
from rl_runtime.ranks.train_batch import TrainBatch
from rl_runtime.ranks.trainer_worker import TrainerWorker
from run_kit.memory import process_tree_memory


def write_model(folder: str, layers: int, vocab: int) -> int:
    """Writes the model and returns its number of parameters."""
    from transformers import AutoModelForCausalLM

    config = model_config("qwen3-0.6b", num_hidden_layers=layers, vocab_size=vocab, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def used_by_all_ranks() -> int:
    """PSS of all ranks in bytes, after garbage is collected."""
    gc.collect()
    dist.barrier()
    used = torch.tensor([process_tree_memory(os.getpid()).pss_bytes])
    dist.all_reduce(used)
    return int(used)


def measure(args: argparse.Namespace, folder: str, num_parameters: int, rank: int) -> None:
    """One rank."""
    worker = TrainerWorker(rank, args.ranks, device="cpu", num_threads=1)
    worker.connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    config = EngineConfig(
        dtype="float32", zero=ZeroConfig(stage=args.stage), lora=LoraConfig(rank=16), optim=OptimConfig(warmup_steps=0)
    )
    ids = list(range(3, 3 + args.tokens))
    limit = BatchConfig(token_budget=args.tokens)
    actor, ref = (ModelHandle(SpmdGroup(worker), role, limit) for role in ("actor", "ref"))  # type: ignore[arg-type]
    batch = TrainBatch(pack([ids[:4]] * args.ranks, [ids[4:]] * args.ranks))
    before = used_by_all_ranks()
    actor.build(folder, config, total_steps=1)
    for _ in range(3):  # buffers of gathered weights come with the first passes
        actor.log_probs(batch)
    with_actor = used_by_all_ranks()
    free_K = WithoutAdapters(actor).log_probs(batch)
    adapters_off = used_by_all_ranks()
    ref.build_frozen(folder, config)
    frozen_K = ref.log_probs(batch)
    second_engine = used_by_all_ranks()
    assert torch.equal(free_K, frozen_K), "both references compute the same"
    if rank == 0:
        mib = {
            "weights": 4 * num_parameters,
            "actor": with_actor - before,
            "reference_adapters_off": adapters_off - with_actor,
            "reference_frozen_engine": second_engine - adapters_off,
        }
        line = {name: round(value / 2**20, 1) for name, value in mib.items()}
        print(json.dumps({"stage": args.stage, "ranks": args.ranks, "parameters": num_parameters, "mib": line}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each rank's sequence")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = write_model(folder, args.layers, args.vocab)
        gc.collect()
        run_ranks(partial(measure, args, folder, num_parameters), num_ranks=args.ranks)


if __name__ == "__main__":
    main()
