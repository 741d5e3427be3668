"""Servers of one host that load a pushed LoRA adapter at the same time, with one and with several OpenMP threads each.

`python -m benchmarks.weight_sync.adapter_load` makes vLLM's `LoRAModel` from the tensors of a rank-16 adapter of a 7B
model in CPU memory, as a server does before the first request after a push; in one process, then in several that start
together. A GPU server copies them into pinned memory besides. Needs vLLM, for the CPU or for GPUs.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

HIDDEN, MLP, KV, LAYERS, RANK = 3584, 18944, 512, 28, 16
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, MLP),
    "mlp.up_proj": (HIDDEN, MLP),
    "mlp.down_proj": (MLP, HIDDEN),
}
"""Inputs and outputs of a layer of DeepSeek-R1-Distill-Qwen-7B."""


def load_repeatedly(args: argparse.Namespace) -> None:
    """One process: prints the seconds of each load."""
    import torch
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    tensors = {}
    for layer in range(LAYERS):
        for name, (num_in, num_out) in MODULES.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, num_in).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_out, RANK).bfloat16()
    helper = PEFTHelper(r=RANK, lora_alpha=2 * RANK, target_modules=list(MODULES))
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(args.rounds):
        begin = time.perf_counter()
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        model = LoRAModel.from_lora_tensors(1, copies, helper, device="cpu", dtype=torch.bfloat16)
        for lora in model.loras.values():
            lora.optimize()
        print(time.perf_counter() - begin, flush=True)


def measure(args: argparse.Namespace, *, processes: int, threads: int) -> list[float]:
    """Seconds of every load in every process."""
    command = [sys.executable, "-m", __spec__.name, "--child", f"--rounds={args.rounds}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    started = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        for _ in range(processes)
    ]
    for each in started:
        assert each.stdout is not None
        while (line := each.stdout.readline()) != "ready\n":
            if not line:
                raise RuntimeError(f"a process ended with exit code {each.wait()}")
    for each in started:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return [float(line) for each in started for line in each.communicate()[0].splitlines()]


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, cores], help="of each process")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        load_repeatedly(args)
        return
    print(f"rank {RANK}, {2 * LAYERS * len(MODULES)} tensors, {cores} cores; milliseconds of a load, median (range)")
    print("| threads of a process | one process | " + f"{args.servers} at the same time |\n| --- | --- | --- |")
    for threads in args.threads:
        cells = []
        for processes in (1, args.servers):
            spent = sorted(1000 * s for s in measure(args, processes=processes, threads=threads))
            cells.append(f"{statistics.median(spent):.0f} ({spent[0]:.0f}-{spent[-1]:.0f})")
        print(f"| {threads} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
