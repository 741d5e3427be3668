"""Two ranks: supervised steps, held-out loss and greedy responses against transformers on the exported model."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_engine import EngineConfig, LoraConfig, OffloadConfig, OptimConfig, ZeroConfig
from plinth_testing import SpmdGroup
from rl_core import BatchConfig, linear_log_prob
from rl_data import Demonstration
from rl_runtime.ranks import trainer_worker
from rl_runtime.ranks.model_handle import ModelHandle
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.training.held_out import HeldOut, greedy_responses
from rl_runtime.training.supervised import supervised_step
from rl_runtime.training.supervised_config import FineTuningConfig

END = 1
CASES: dict[str, tuple[ZeroConfig, int, LoraConfig | None]] = {
    "stage 2 with sequence parallelism": (ZeroConfig(stage=2), 2, None),
    "stage 3": (ZeroConfig(stage=3, param_persistence_elements=0), 1, None),
    "stage 3 in CPU memory, LoRA on NF4": (
        ZeroConfig(stage=3, offload=OffloadConfig(optimizer="cpu", param="cpu")),
        1,
        LoraConfig(rank=4, alpha=8, base_format="nf4"),
    ),
}


class Words:
    eos_token_id = END

    def decode(self, token_ids: Any) -> str:
        return " ".join(map(str, token_ids))


def make_demonstrations(vocab: int) -> list[Demonstration]:
    """Five of different lengths, one with a tool's tokens in the middle."""
    ids = torch.randint(3, vocab, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    made = [
        Demonstration(tuple(ids[n : n + 3]), (*ids[n + 3 : n + length], END)) for n, length in enumerate((9, 5, 14, 7))
    ]
    masked = (True, True, False, False, True, True)
    return [*made, Demonstration(tuple(ids[50:52]), tuple(ids[60:66]), masked)]


def check(worker: TrainerWorker, folder: str, out: Path, name: str) -> None:
    zero, sp, lora = CASES[name]
    calls: list[int] = []

    def counted(hidden_KH: torch.Tensor, weight_VH: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append(len(hidden_KH))
        return linear_log_prob(hidden_KH, weight_VH, *args, **options)

    trainer_worker.linear_log_prob = counted  # type: ignore[assignment]
    config = EngineConfig(dtype="float32", zero=zero, sequence_parallel=sp, lora=lora, optim=OptimConfig(lr=0.01))
    model = ModelHandle(SpmdGroup(worker), "actor", BatchConfig(token_budget=24))  # type: ignore[arg-type]
    model.build(folder, config, total_steps=6)
    module = worker._engines["actor"].module
    demonstrations = make_demonstrations(module.config.vocab_size)
    logits: list[Any] = []
    head = module.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, __, rows: logits.append(rows.shape[0]))
    losses = [supervised_step(model, demonstrations).loss for _ in range(6)]
    hook.remove()
    assert losses[-1] < losses[0], (name, losses)
    assert calls, f"{name}: training does not use the fused log-prob operator"
    assert set(logits) == {2}, f"{name}: the head returned something other than log-probs and entropies: {logits}"
    held_out = HeldOut(demonstrations, Words(), FineTuningConfig(batch_size=2, num_samples=3, sample_tokens=6))
    loss, samples = held_out.metrics(model)["val/loss"], held_out.samples(model)
    responses = greedy_responses(model, [one.prompt_ids for one in demonstrations], max_tokens=6, end=END)
    assert [sample["response"] for sample in samples] == [" ".join(map(str, one)) for one in responses[:3]]
    model.export(str(out), folder)
    dist.barrier()
    model.export(str(out), folder, overwrite=True)  # as ranks do that take the place of ranks lost in an export
    dist.barrier()
    if worker.rank == 0:
        compare(out, demonstrations, loss, responses, name)
    worker.drop("actor")
    dist.barrier()


def compare(out: Path, demonstrations: list[Demonstration], loss: float, responses: list[list[int]], name: str) -> None:
    """The same numbers by transformers, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    total, count = 0.0, 0
    for one, response in zip(demonstrations, responses, strict=True):
        ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
        log_probs = reference(ids).logits[0, len(one.prompt_ids) - 1 : -1].log_softmax(-1)
        token_log_probs = log_probs.gather(1, torch.tensor(one.response_ids)[:, None])[:, 0]
        mask = torch.tensor(one.response_mask or [True] * len(one.response_ids))
        total, count = total - float(token_log_probs[mask].sum()), count + int(mask.sum())
        for length, token in enumerate(response):
            logits = reference(torch.tensor([[*one.prompt_ids, *response[:length]]])).logits[0, -1]
            # Equally likely tokens may change places between two ways to compute them.
            assert logits[token] >= logits.max() - 1e-3, (name, response, length)
        assert len(response) == 6 or response[-1] == END
    assert abs(loss - total / count) < 1e-4, (name, loss, total / count)


def train_supervised(folder: str, out: Path) -> None:
    worker = TrainerWorker(dist.get_rank(), 2, device="cpu", num_threads=1)
    for name in CASES:
        check(worker, folder, out / name.replace(" ", "_"), name)
    trainer_worker.linear_log_prob = linear_log_prob
