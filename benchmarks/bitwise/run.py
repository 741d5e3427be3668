"""The first operation in which a vLLM server and the trainer's model part, for one prompt and its response.

`python -m benchmarks.bitwise.run MODEL_FOLDER [--match]` generates a response with vLLM in this process (prefill and
decoding steps), lets the server read prompt and response at once (prefill), and computes the same tokens with the
trainer's packed model. It compares the output of every operation of every layer and prints, for each pair, a table and
the first operation that differs. `--match` puts the shared operations into both (docs/exact.md).
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process

import torch
from torch import Tensor

Record = dict[str, list[Tensor]]
"""Output rows by operation, [rows, width], in the order of computation."""
OPERATIONS = (
    "norm", "q", "k", "v", "q norm", "k norm", "rotated q", "rotated k", "attention", "o", "norm 2", "gate", "up",
    "silu x up", "down", "mlp",
)  # fmt: skip
"""Operations of a layer in the order of computation."""


def add(record: Record, name: str, x: Tensor, *, heads: int | None = None) -> None:
    """Keep a copy of the rows; `heads`: x is [..., T, heads, d]."""
    width = x.shape[-1] * (heads or 1)
    record.setdefault(name, []).append(x.detach().reshape(-1, width).cpu().clone())


def layer_number(name: str) -> str:
    """`3` of model.layers.3.mlp."""
    return name.split("layers.")[1].split(".")[0]


def hook_server(model: Any, record: Callable[[], Record]) -> None:
    """Record what vLLM's modules compute."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        single = {"embed_tokens": "embeddings", "logits_processor": "logits"}.get(last)
        if name.endswith("model.norm"):
            single = "last norm"
        if single:
            module.register_forward_hook(lambda m, i, out, n=single: add(record(), n, first_of(out)))
        if "layers." not in name:
            continue
        at = f"layer {layer_number(name)} "
        parts: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
            "qkv_proj": (("q", "k", "v"), (q, kv, kv)),
            "gate_up_proj": (("gate", "up"), (config.intermediate_size,) * 2),
        }
        plain = {
            "input_layernorm": "norm", "attn": "attention", "o_proj": "o", "post_attention_layernorm": "norm 2",
            "act_fn": "silu x up", "down_proj": "down", "mlp": "mlp",
        }  # fmt: skip
        if last in parts:

            def split(m: Any, i: Any, out: Any, at: str = at, how: Any = parts[last]) -> None:
                for label, part in zip(how[0], first_of(out).split(how[1], dim=-1), strict=True):
                    add(record(), at + label, part)

            module.register_forward_hook(split)
        elif last in plain:
            module.register_forward_hook(lambda m, i, out, n=at + plain[last]: add(record(), n, first_of(out)))
        elif last in ("q_norm", "k_norm"):
            heads = config.num_attention_heads if last[0] == "q" else config.num_key_value_heads
            label = f"{at}{last[0]} norm"
            module.register_forward_hook(lambda m, i, out, n=label, h=heads: add(record(), n, first_of(out), heads=h))
        if last == "self_attn":
            hook_rotary(module, at, record)


def hook_rotary(attention: Any, at: str, record: Callable[[], Record]) -> None:
    """vLLM's layers share one rotary module, which does not know its layer: record the inputs of attention."""

    def before(module: Any, args: Any) -> None:
        for label, x in zip(("rotated q", "rotated k"), args, strict=False):
            add(record(), at + label, x)

    attention.attn.register_forward_pre_hook(before)


def first_of(out: Any) -> Tensor:
    """The first tensor of a module's outputs."""
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first


def hook_trainer(model: Any, record: Record) -> None:
    """Record what the modules of transformers compute; attention through its registered function."""
    from transformers import AttentionInterface

    from ds_engine.model.attention import ATTENTION_NAME, packed_attention

    config = model.config

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        at = f"layer {module.layer_idx} "
        for label, x in (("rotated q", query), ("rotated k", key)):
            add(record, at + label, x[0].transpose(0, 1), heads=x.shape[1])
        out = packed_attention(module, query, key, value, *args, **kwargs)
        add(record, at + "attention", out[0], heads=query.shape[1])
        return out

    AttentionInterface.register(ATTENTION_NAME, attention)
    plain = {
        "input_layernorm": "norm", "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
        "post_attention_layernorm": "norm 2", "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "mlp": "mlp",
    }  # fmt: skip
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "embed_tokens":
            module.register_forward_hook(lambda m, i, out: add(record, "embeddings", out))
        elif name.endswith("model.norm") or name == "norm":
            module.register_forward_hook(lambda m, i, out: add(record, "last norm", out))
        if "layers." not in name:
            continue
        at = f"layer {layer_number(name)} "
        if last in plain:
            module.register_forward_hook(lambda m, i, out, n=at + plain[last]: add(record, n, out))
        if last == "down_proj":
            module.register_forward_pre_hook(lambda m, i, n=at + "silu x up": add(record, n, i[0]))
        if last in ("q_norm", "k_norm"):
            heads = config.num_attention_heads if last[0] == "q" else config.num_key_value_heads
            module.register_forward_hook(
                lambda m, i, out, n=f"{at}{last[0]} norm", h=heads: add(record, n, out, heads=h)
            )


def compare(first: Record, second: Record, num_layers: int, names: str) -> str | None:
    """Print a table by operation over all layers, and return the first operation that differs."""
    order = ["embeddings", *(f"layer {n} {op}" for n in range(num_layers) for op in OPERATIONS)]
    order += ["last norm", "logits", "log-probs"]
    first_difference = None
    rows: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for label in order:
        if label not in first or label not in second:
            continue
        a, b = torch.cat(first[label]), torch.cat(second[label])
        num = min(len(a), len(b))  # of logits, the rows that a response token was drawn from
        a, b = a[-num:], b[-num:]
        width = min(a.shape[1], b.shape[1])
        a, b = a[:, :width].double(), b[:, :width].double()
        differs = (a != b).any(1)
        rows[label.split(" ", 2)[2] if label.startswith("layer") else label].append(
            (int(differs.sum()), num, (a - b).abs().max().item())
        )
        if differs.any() and first_difference is None:
            first_difference = label
    print(f"\n{names}: " + (f"the first difference is in {first_difference}" if first_difference else "equal bits"))
    print(f"{'operation':<12}{'layers':>8}{'with a difference':>20}{'rows':>14}{'largest':>12}")
    for label, results in rows.items():
        differing = [r for r in results if r[0]]
        total = f"{sum(r[0] for r in results)}/{sum(r[1] for r in results)}"
        print(f"{label:<12}{len(results):>8}{len(differing):>20}{total:>14}{max(r[2] for r in results):>12.2e}")
    return first_difference


def serve(args: argparse.Namespace, prompt: list[int]) -> tuple[Record, Record, list[int]]:
    """(record of decoding, record of the prefill of everything, response)."""
    if args.match:
        from rollout_vllm.servers import patch
        from rollout_vllm.servers.exact.install import match_transformers

        patch.EXACT.check()
        match_transformers(patch.EXACT.replace, on_gpu=torch.cuda.is_available())
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        dtype=args.dtype,
        enforce_eager=True,
        max_model_len=len(prompt) + args.response_tokens + 1,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        logprobs_mode="processed_logprobs",
        max_logprobs=1,
        seed=0,
        **({"gpu_memory_utilization": 0.3} if torch.cuda.is_available() else {"kv_cache_memory_bytes": 2**28}),
    )
    current: Record = {}
    llm.apply_model(lambda model: hook_server(model, lambda: current))
    options = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "seed": 1}
    out = llm.generate({"prompt_token_ids": prompt}, SamplingParams(**options, max_tokens=args.response_tokens))[0]
    response = list(out.outputs[0].token_ids)
    decoding = dict(current)
    decoding["log-probs"] = [log_prob_rows(out.outputs[0].logprobs, response)]
    current.clear()
    read = SamplingParams(**options, max_tokens=1, prompt_logprobs=0)
    out = llm.generate({"prompt_token_ids": prompt + response}, read)[0]
    prefill = {name: [torch.cat(parts)[: len(prompt) + len(response) - 1]] for name, parts in current.items()}
    of_prompt = max(current["logits"], key=len)  # one more call has those of the new token
    prefill["logits"] = [of_prompt[: len(prompt) + len(response) - 1]]
    prefill["log-probs"] = [log_prob_rows(out.prompt_logprobs[len(prompt) :], response)]
    return decoding, prefill, response


def log_prob_rows(entries: Any, tokens: list[int]) -> Tensor:
    """[tokens, 1] of vLLM's answer."""
    return torch.tensor([[entry[token].logprob] for entry, token in zip(entries, tokens, strict=True)])


def train(args: argparse.Namespace, prompt: list[int], response: list[int]) -> tuple[Record, int]:
    """(record of the trainer's model, number of layers)."""
    from transformers import AutoModelForCausalLM

    from ds_engine import SimpleBatch
    from ds_engine.model.attention import ATTENTION_NAME, choose_kernel, register_packed_attention
    from ds_engine.model.matching import match_servers
    from ds_engine.model.packed_model import install_packed_forward, packed_inputs
    from rl_core import linear_log_prob

    device, dtype = torch.device("cuda" if torch.cuda.is_available() else "cpu"), getattr(torch, args.dtype)
    register_packed_attention()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation=ATTENTION_NAME).to(device)
    operations: Any = None
    if args.match:
        operations = import_module("rollout_vllm.servers.exact.operations")
        match_servers(model, operations)
    install_packed_forward(model, linear_log_prob, operations=operations)
    record: Record = {}
    hook_trainer(model, record)
    batch = SimpleBatch.pack([(prompt, response)])
    kernel = choose_kernel("auto", device_type=device.type, dtype=dtype)
    inputs, _ = packed_inputs(batch, device=device, kernel=kernel)
    with torch.no_grad():
        log_probs = model(packed=inputs, temperature=1.0)[0]
    rows = len(prompt) + len(response) - 1
    record = {name: [torch.cat(parts)[:rows]] for name, parts in record.items()}
    record["log-probs"] = [log_probs.float().cpu()[:, None]]
    return record, model.config.num_hidden_layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--match", action="store_true", help="with the operations of match_servers on both sides")
    parser.add_argument("--prompt-tokens", type=int, default=41)
    parser.add_argument("--response-tokens", type=int, default=40)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 250, (args.prompt_tokens,), generator=generator).tolist()
    decoding, prefill, response = serve(args, prompt)
    trained, num_layers = train(args, prompt, response)
    torch.set_num_threads(1)  # comparisons are small, and a GPU host has many cores
    compare(decoding, prefill, num_layers, "server decoding / server prefill")
    compare(prefill, trained, num_layers, "server prefill / trainer")
    compare(decoding, trained, num_layers, "server decoding / trainer")


if __name__ == "__main__":
    main()
