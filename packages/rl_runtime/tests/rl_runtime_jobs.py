"""Jobs, model shapes and GPUs that this machine lacks, for tests of resolved settings and memory plans."""

from dataclasses import dataclass, field
from typing import Any

from ds_engine import ModelShape
from plinth_testing import models
from rl_core import BatchConfig
from rl_data import DataConfig
from rl_runtime import FrozenModel, JobConfig, ModelConfig, SupervisedJobConfig, TeacherConfig
from rl_runtime.launch.gpus import Gpu
from rollout_vllm import SamplingConfig

QWEN3_06B, QWEN2_7B = ModelShape.read(models.QWEN3_06B), ModelShape.read(models.QWEN2_7B)
GIB = 2**30


def gpus(number: int, gib: float = 140.0, used: float = 0.0) -> tuple[Gpu, ...]:
    return (Gpu(name="GPU", total_bytes=int(gib * GIB), used_bytes=int(used * GIB)),) * number


def config(**sections: Any) -> JobConfig:
    """64 prompts x 4 samples, two updates, 320 + 512 tokens."""
    given_sections = {
        "batch": BatchConfig(train_batch_size=64, mini_batch_size=32),
        "data": DataConfig(max_prompt_length=320),
        "sampling": SamplingConfig(n=4, max_tokens=512),
        "validation": SamplingConfig(n=1, max_tokens=512),
    }
    return JobConfig(**(given_sections | sections))


def supervised(**sections: Any) -> SupervisedJobConfig:
    return SupervisedJobConfig(**{"model": ModelConfig(path="some/model"), **sections})


@dataclass(frozen=True, kw_only=True)
class DistillationJob(JobConfig):
    teacher: TeacherConfig = field(default_factory=TeacherConfig)

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        return (*super().frozen_models, *self.teacher.frozen_models)
