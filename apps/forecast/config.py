"""Configuration of `apps.forecast.main`: a training job, the cluster, and the rates from which seconds follow."""

import math
from dataclasses import dataclass, field, fields

from rl_runtime import FrozenModel, JobConfig, PolicyConfig, TeacherConfig
from rl_runtime.config import check_at_least, check_value, value_of


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The hosts, all alike. GB are 1e9 bytes."""

    num_hosts: int = 1
    """Hosts; each has `gpus_per_host` GPUs."""
    gpus_per_host: int = 8
    """GPUs of a host, connected by NVLink."""
    gpu_gib: float = 139.8
    """Free memory of a GPU in GiB; 139.8: an H200, as driver 580 reports it."""
    host_gib: float | None = None
    """Free memory of a host in GiB, for states and weights in turns; null: not limited."""
    network_gb_per_s: float = 40.0
    """GB/s that the network card of one GPU sends, and as much that it receives, at the same time. **Assumed**: 80% of
    400 Gbit/s. Nothing has been measured between hosts."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_hosts", "gpus_per_host")
        _check_positive(self, "gpu_gib", "network_gb_per_s")
        if self.host_gib is not None:
            check_value(self, "host_gib", 0 < self.host_gib < math.inf, "above 0, or null for no limit")


@dataclass(frozen=True, kw_only=True)
class RatesConfig:
    """Measured rates of one H200 and its host, or as said; each names its table in benchmarks/. GB are 1e9 bytes."""

    matmul_tflops: float = 584.0
    """TFLOP/s of products with weights in compiled layers and full micro batches, by
    `ds_engine.planning.operations`. This rate and the next two minimize the squared relative errors of engine_step's
    steps of 0.6B at ZeRO-2, 1.7B to 8B at ZeRO-3, and 1,024 to 32,768 tokens a sequence ("One GPU", "Larger models",
    "Longer sequences"), after `adamw_ms_per_billion`; they reproduce these within 3%."""
    attention_tflops: float = 520.0
    """TFLOP/s of attention."""
    channel_ps: float = 26.2
    """Picoseconds of a pass for each token, layer and hidden channel: norms, rotary embeddings, activation functions
    and residuals. A training step has three passes."""
    adamw_ms_per_billion: float = 6.7
    """Milliseconds of an optimizer step on a GPU for 1e9 parameters of a rank's shard: 4 ms for Qwen3-0.6B
    (engine_step, "Other measurements"). AdamW on the CPU (`actor.zero.offload`) is not in the forecast."""
    host_ms_per_layer: float = 2.7
    """Milliseconds per layer that the host needs to launch a micro batch with its backward pass, however few tokens it
    has: 75 ms for 28 layers (engine_step, "Other measurements"). A pass without gradients is taken to need a third."""
    decode_gb_per_s: float = 2480.0
    """GB/s of weights and KV cache that decoding reads: 16.3 GB in the 6.58 ms of a step's kernels (rollout, "Compared
    with LLM.generate")."""
    decode_host_ms: float = 2.2
    """Milliseconds of a decoding step in which vLLM's engine core runs Python, without those of its sequences. With
    `decode_host_ms_per_seq`: schedule, submit and update took 6.85 ms with 256 sequences and 4.52 with 128 on an H100's
    host; updates take 0.36 and, in proportion, 0.18 less since (rollout, "Scheduling a decoding step")."""
    decode_host_ms_per_seq: float = 0.0168
    """As much for each sequence."""
    nvlink_gb_per_s: float = 173.0
    """GB/s that a GPU sends over NVLink: 13.83 GB in 80 ms (weight_sync, "On GPUs", 7B, `nccl`, transfer)."""
    push_fixed_ms: float = 30.0
    """Milliseconds of a push that do not depend on its bytes: 37 ms for 1.19 GB and 98 ms for 13.8 GB (weight_sync, "On
    GPUs", `nccl`)."""
    exchange_gb_per_s: float = 138.0
    """GB/s of the all-to-alls of sequence parallelism: 11.3 GB in 76 to 90 ms (engine_step, "Longer sequences")."""
    turns_gb_per_s: float = 27.0
    """GB/s between a GPU and host memory for states in turns: 91.4 GB of each of two GPUs in 3.4 s (memory_turns, "Two
    GPUs")."""
    snapshot_gb_per_s: float = 54.0
    """GB/s from the GPUs of a host to its memory for a checkpoint in the background (ckpt, "One H200 host")."""
    disk_gb_per_s: float = 1.9
    """GB/s that a host writes: 2.0 for a plain write, 1.06 times as long for a save (ckpt, "One H200 host")."""

    def __post_init__(self) -> None:
        _check_positive(self, *(entry.name for entry in fields(self)))


@dataclass(frozen=True, kw_only=True)
class ForecastConfig(JobConfig):
    """A forecast of memory, traffic and seconds of a training step. All keys of a job are allowed."""

    algorithm: PolicyConfig = field(default_factory=PolicyConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The teacher of a distillation on the ranks; a step without `teacher.model` has none."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    rates: RatesConfig = field(default_factory=RatesConfig)
    prompt_tokens: int | None = None
    """Mean tokens of a prompt; null: `data.max_prompt_length`."""
    response_tokens: int | None = None
    """Mean tokens of a response; null: `sampling.max_tokens`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("prompt_tokens", "data.max_prompt_length"), ("response_tokens", "sampling.max_tokens")):
            value, limit = getattr(self, name), value_of(self, most)
            if value is not None and not 1 <= value <= limit:
                raise ValueError(f"{name} is {value}; allowed: 1 to {most} ({limit}), or null for the latter")
        if self.rollout.urls:
            raise ValueError("rollout.urls is set; allowed: none, the servers' hosts are part of the forecast")
        if self.teacher.model is not None and self.teacher.on == "server":
            raise ValueError("teacher.on is server; allowed: ranks, the GPUs of a teacher's servers are not planned")
        if self.actor.lora is not None:
            raise ValueError("actor.lora is set; allowed: null, the traffic of adapters is not planned")

    @property
    def keeps_reference(self) -> bool:
        """With a KL term."""
        return self.algorithm.kl_coef > 0

    @property
    def leaves_first_log_probs(self) -> bool:
        """Whether a step's first update computes its own old log-probs; with a teacher all are compared before it."""
        return self.teacher.model is None and self.algorithm.leaves_first_log_probs(self.actor)

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """The reward model and the teacher on the ranks."""
        return (*super().frozen_models, *self.teacher.frozen_models)

    @property
    def prompt_length(self) -> int:
        """Mean tokens of a prompt."""
        return self.prompt_tokens or self.data.max_prompt_length

    @property
    def response_length(self) -> int:
        """Mean tokens of a response."""
        return self.response_tokens or self.sampling.max_tokens


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        check_value(config, name, 0 < getattr(config, name) < math.inf, "above 0")
