"""Two ranks: a frozen reward model scores samples; a folder without a head is refused."""

from typing import Any

import torch
import torch.distributed as dist
from rl_runtime_samples import prompt, sample

from ds_engine import EngineConfig, ModelError, ZeroConfig
from plinth_testing import SpmdGroup, raises
from rl_core import BatchConfig
from rl_runtime.ranks.model_handle import ModelHandle
from rl_runtime.ranks.train_batch import TrainBatch
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.training.reward_model import scored_batch

STAGES = ((2, 1), (2, 2), (3, 1))
"""ZeRO stage, sequence_parallel."""


def make_samples() -> list[tuple[list[int], list[int]]]:
    """Prompts and responses of several lengths, as many as no two ranks share evenly."""
    generator = torch.Generator().manual_seed(7)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 60, (length,), generator=generator).tolist()  # type: ignore[no-any-return]

    return [(ids(3 + n), [*ids(length), 1]) for n, length in enumerate((4, 19, 1, 11, 7))]


SAMPLES = make_samples()


def scores(worker: TrainerWorker, folder: str, stage: Any, sp: int) -> list[float]:
    """The scores of all samples."""
    config = EngineConfig(dtype="float32", zero=ZeroConfig(stage=stage), sequence_parallel=sp)
    model = ModelHandle(SpmdGroup(worker), "reward", BatchConfig(token_budget=24))  # type: ignore[arg-type]
    model.build_frozen(folder, config, head="value")
    items = [sample(response, prompt=prompt(ids)) for ids, response in SAMPLES]
    with TrainBatch(scored_batch(items)) as batch:
        values_K = model.values(batch)
        if worker.device.type == "cpu":  # what turns do with a frozen engine: its weights may move, and must come back
            worker.free_memory("actor", True)
            worker.claim_memory()
            assert torch.equal(values_K, model.values(batch))
    return values_K.tolist()


def reward_scores(folder: str, headless: str) -> dict[tuple[int, int], list[float]]:
    worker = TrainerWorker(dist.get_rank(), 2, device="cpu", num_threads=1)
    values = {case: scores(worker, folder, *case) for case in STAGES}
    with raises(ModelError, field="model_path", value=headless):
        worker.build("reward", headless, EngineConfig(dtype="float32"), None, "value")
    worker.drop("reward")
    return values
