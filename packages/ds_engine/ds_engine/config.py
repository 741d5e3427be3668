"""Configuration of an engine: frozen dataclasses, the learning-rate schedule, and rules derived from the settings.

Imports no torch. Combinations that DeepSpeed does not support, or would silently replace, raise EngineConfigError.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, Literal, NoReturn, get_args

from plinth_base.dtypes import DTYPE_BYTES, Dtype

from .deepspeed_keys import (
    DEFAULTS,
    HPZ,
    LIVE_PARAMETERS,
    OWNED,
    PREFETCH_BUCKET,
    REUSE_DISTANCE,
    SUB_GROUP,
    needs_stage_3,
)
from .errors import EngineConfigError
from .optimizers import OPTIMIZERS, Optimizer

OffloadDevice = Literal["none", "cpu", "nvme"]
Attention = Literal["auto", "flash4", "flash", "varlen", "sdpa"]
Experts = Literal["auto", "grouped", "loop"]
Schedule = Literal["constant", "linear", "cosine"]
Guard = Literal["off", "auto", "lockstep", "watch"]
Stage = Literal[1, 2, 3]
RouterReplay = Literal["off", "R2", "R3"]
BaseFormat = Literal["plain", "nf4"]


def _require(config: Any, name: str, ok: bool, allowed: str) -> None:
    """Refuse the value of the key `name` unless it is `ok`."""
    if not ok:
        raise EngineConfigError(field=name, value=attrgetter(name)(config), allowed=allowed)


def _refuse(name: str, value: Any, problem: str, remedy: str | None = None) -> NoReturn:
    raise EngineConfigError(problem, field=name, value=value, remedy=remedy)


def _require_one_of(config: Any, name: str, choices: Any) -> None:
    """The value must be one of those of the Literal type `choices`."""
    *first, last = get_args(choices)
    _require(config, name, getattr(config, name) in get_args(choices), f"{', '.join(map(str, first))} or {last}")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Devices on which ZeRO keeps its shards between uses."""

    optimizer: OffloadDevice = "none"
    """Optimizer states and fp32 master weights: on the device (none), in CPU memory (cpu, any stage) or on NVMe (nvme,
    stage 3)."""
    param: OffloadDevice = "none"
    """Parameter shards of the model; stage 3 only."""
    nvme_path: str | None = None
    """Folder on a local NVMe drive; required if, and allowed only if, optimizer or param is nvme."""

    def __post_init__(self) -> None:
        _require_one_of(self, "optimizer", OffloadDevice)
        _require_one_of(self, "param", OffloadDevice)
        uses_nvme, has_path = "nvme" in (self.optimizer, self.param), self.nvme_path is not None
        if uses_nvme != has_path:
            _refuse("nvme_path", self.nvme_path, "", "set it if and only if optimizer or param is nvme")


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """DeepSpeed ZeRO: stage, offload, gradient accumulation and reduction."""

    stage: Stage = 2
    """1 shards optimizer states, 2 also gradients, 3 also parameters."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    fp32_grad_accum: bool = True
    """Accumulate gradients of micro batches in fp32, whatever the model's dtype."""
    fp32_reduce: bool = False
    """Reduce gradients over ranks in fp32: twice the traffic, no rounding before the sum over ranks."""
    step_each_micro: bool = False
    """If true, DeepSpeed counts micro batches itself and its step() is called after each one. If false, the engine
    marks the last micro batch and calls step() once. Both give the same weights."""
    reduce_bucket_bytes: int = 128 * 1024 * 1024
    """Size of a gradient bucket in bytes (of the dtype in which gradients are reduced); at least 1024."""
    param_persistence_elements: int = 100_000
    """Stage 3: parameters with fewer elements stay gathered on every rank; at least 0."""
    overlap_comm: bool | None = None
    """DeepSpeed's overlap of gradient reduction with the backward pass. null: on at stage 3 on CUDA, otherwise off.
    Stage 2 overlaps in any case where the engine accumulates gradients itself (low-precision weights, fp32
    accumulation, no optimizer offload)."""
    deepspeed: Mapping[str, bool | int] = field(default_factory=dict)
    """Further keys of DeepSpeed's zero_optimization section, under DeepSpeed's names: stage3_max_live_parameters,
    stage3_max_reuse_distance, stage3_prefetch_bucket_size, sub_group_size (all in elements), ... Keys that the engine
    sets itself or cannot support are refused with the reason."""

    def __post_init__(self) -> None:
        _require_one_of(self, "stage", Stage)
        for key, value in self.deepspeed.items():
            if key in OWNED:
                _refuse(f"deepspeed.{key}", value, OWNED[key])
            if self.stage < 3 and needs_stage_3(key):
                only = f"DeepSpeed reads it at stage 3 only, and the stage is {self.stage}"
                _refuse(f"deepspeed.{key}", value, only, "remove it")
        if self.offload.param != "none" and int(self.deepspeed.get(HPZ, 1)) > 1:
            _refuse(f"deepspeed.{HPZ}", self.deepspeed[HPZ], "second shards save no traffic of offloaded parameters")
        _require(self, "reduce_bucket_bytes", self.reduce_bucket_bytes >= 1024, "at least 1024")
        _require(self, "param_persistence_elements", self.param_persistence_elements >= 0, "0 or more")
        optimizer, param = self.offload.optimizer, self.offload.param
        if self.stage < 3 and param != "none":
            whole = f"parameters are sharded at stage 3 only; stage {self.stage} keeps them whole on the device"
            _refuse("offload.param", param, whole, "use none")
        if self.stage < 3 and optimizer == "nvme":
            in_memory = f"at stage {self.stage} DeepSpeed silently keeps the states in CPU memory"
            _refuse("offload.optimizer", optimizer, in_memory, "use cpu, or stage 3")
        if param != "none" and optimizer == "none":
            both = "DeepSpeed steps offloaded parameters on the CPU"
            _refuse("offload.optimizer", optimizer, both, "with offload.param set, use cpu or nvme here too")

    @property
    def gathers_layers(self) -> bool:
        """True if stage 3 gathers whole transformer layers (zero/zero3_hooks.py) instead of module by module.

        Parameters on NVMe are read into a few buffers of one parameter each, too few for a layer.
        """
        return self.stage == 3 and self.offload.param != "nvme"


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = "adamw"
    """adamw, muon (for matrices, with AdamW for the rest), sgd, adam8bit (requires bitsandbytes), or your own
    `package.module:Class`: a torch.optim.Optimizer that steps each element of flat fp32 tensors by itself."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the optimizer. muon: momentum (0.95), nesterov (true), ns_steps (5), adjust_lr_fn
    (match_rms_adamw: rates as for AdamW; or original), adam_lr (peak rate of AdamW's part; null: lr). sgd: momentum,
    dampening, nesterov. Your own class: keyword arguments."""
    lr: float | None = 1e-6
    """Peak learning rate; positive. null: an app chooses it for the model; the engine needs a number."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment; each in [0, 1). A class of your own that takes betas or eps has its
    own defaults."""
    eps: float = 1e-8
    """Term added to the denominator; positive."""
    weight_decay: float = 0.0
    """Weight decay, decoupled but in sgd; 0 or more."""
    decay_1d: bool = False
    """Also decay vectors: scales of norms, biases, decays of recurrences. Decay pulls weights to zero, which these
    have no reason to approach."""
    grad_clip: float | None = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it. null: no clipping."""
    schedule: Schedule = "constant"
    """constant, linear (down to min_lr_ratio) or cosine (down to min_lr_ratio)."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly to lr; 0 or more."""
    total_steps: int | None = None
    """Optimizer steps of the whole run, required by linear and cosine unless passed to the engine."""
    min_lr_ratio: float = 0.0
    """Final learning rate as a fraction of lr, for linear and cosine; 0 to 1."""

    def __post_init__(self) -> None:
        _require(self, "lr", self.lr is None or 0 < self.lr < math.inf, "a positive number")
        _require(self, "betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two in [0, 1)")
        _require(self, "eps", 0 < self.eps < math.inf, "a positive number")
        _require(self, "weight_decay", 0 <= self.weight_decay < math.inf, "0 or more")
        _require(self, "grad_clip", self.grad_clip is None or self.grad_clip > 0, "positive, or null for none")
        _require_one_of(self, "schedule", Schedule)
        _require(self, "warmup_steps", self.warmup_steps >= 0, "0 or more")
        is_longer = self.total_steps is None or self.total_steps > self.warmup_steps
        _require(self, "total_steps", is_longer, f"more than warmup_steps ({self.warmup_steps})")
        _require(self, "min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "0 to 1")
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        own = "package.module:Class"
        module, _, attribute = self.name.partition(":")
        is_known = self.name in OPTIMIZERS or bool(module and attribute)
        _require(self, "name", is_known, f"{', '.join(OPTIMIZERS)}, or {own}")
        optimizer = self.optimizer
        for key in () if self.name not in OPTIMIZERS else self.options:
            if key not in optimizer.options:
                known = ", ".join(optimizer.options) or f"none; {self.name} has no further settings"
                raise EngineConfigError(field=f"options.{key}", value=self.options[key], allowed=known)
        if self.options and self.name in OPTIMIZERS:
            from .own_optimizer import try_optimizer  # loads torch

            try_optimizer(optimizer, self)
        elif optimizer.package and find_spec(optimizer.package) is None:
            package = f"it needs {optimizer.package}, which is not installed"
            _refuse("name", self.name, package, f"pip install {optimizer.package}")
        for key in ("betas", "eps"):
            if key not in optimizer.settings and getattr(self, key) != getattr(OptimConfig, key):
                default = f"leave it at {getattr(OptimConfig, key)}"
                _refuse(key, getattr(self, key), f"{self.name} does not take it", default)
        if self.lr is None and not self.rate_factor:
            _refuse("lr", None, f"no rate can be chosen for {self.name}", "give a number")

    @property
    def optimizer(self) -> Optimizer:
        """The entry of `name`.

        Raises:
            EngineConfigError: it is a user's class that does not work.
        """
        if self.name in OPTIMIZERS:
            return OPTIMIZERS[self.name]
        from .own_optimizer import own_optimizer  # loads torch

        return own_optimizer(self)

    @property
    def rate_factor(self) -> float:
        """Good learning rates divided by AdamW's; 0: unknown, so that `lr` must be given."""
        is_other = self.options.get("adjust_lr_fn", "match_rms_adamw") != "match_rms_adamw"
        return 0.0 if is_other else self.optimizer.rate_factor

    @property
    def peak_lr(self) -> float:
        """`lr`, which is chosen by now.

        Raises:
            EngineConfigError: it is null.
        """
        if self.lr is None:
            raise EngineConfigError(field="optim.lr", value=None, allowed="a positive number")
        return self.lr

    def parameter_groups(self, kinds: Iterable[tuple[int, bool]]) -> dict[tuple[float, bool], list[int]]:
        """Indices of parameters, in order, by (weight decay, stepped as matrices); no group is empty.

        Args:
            kinds: of each parameter, the number of dimensions, and True for a table (an embedding or a head).
        """
        steps_matrices = bool(self.optimizer.matrix_states)
        decays = (self.weight_decay, 0.0)
        groups: dict[tuple[float, bool], list[int]] = {(d, m): [] for d in decays for m in (True, False)}
        for index, (dims, is_table) in enumerate(kinds):
            decay = self.weight_decay if self.decay_1d or dims > 1 else 0.0
            groups[decay, steps_matrices and dims > 1 and not is_table].append(index)
        return {key: indices for key, indices in groups.items() if indices}


def check_heads(num_heads: int, sp: int) -> None:
    """Check that sp divides the number of attention heads; key/value heads are copied where it does not divide theirs.

    Raises:
        EngineConfigError: it does not; the message lists the values that do.
    """
    check_divides("sequence_parallel", sp, num_heads, "attention heads")


def check_divides(field: str, value: int, number: int, things: str) -> None:
    """Raises EngineConfigError, with the values that do, unless `value` divides the number of things."""
    if number % value:
        fits = [n for n in range(1, number + 1) if number % n == 0]
        problem = f"it does not divide the {number} {things}"
        raise EngineConfigError(problem, field=field, value=value, allowed=f"one of {fits}")


def kv_copies(num_heads: int, num_kv_heads: int, sp: int) -> int:
    """Smallest number of copies of each key/value head that gives every rank equally many.

    `num_heads` must be a multiple of sp (`check_heads`). Each query head is then on the same rank as its key/value
    head.
    """
    sharing = num_heads // num_kv_heads
    return next(n for n in range(1, sharing + 1) if sharing % n == 0 and num_kv_heads * n % sp == 0)


def check_schedule(config: OptimConfig, total_steps: int | None) -> None:
    """Check that the number of optimizer steps suits the schedule.

    Raises:
        EngineConfigError: the schedule needs it and it is None, it is not larger than the number of warm-up steps, or
            the learning rate is null.
    """
    _ = config.peak_lr
    if config.schedule == "constant":
        return
    if total_steps is None:
        raise EngineConfigError(
            "it needs the number of optimizer steps",
            field="optim.schedule",
            value=config.schedule,
            remedy="set optim.total_steps",
        )
    if total_steps <= config.warmup_steps:
        raise EngineConfigError(
            field="optim.warmup_steps",
            value=config.warmup_steps,
            allowed=f"less than the run's {total_steps} optimizer steps",
        )


def learning_rate(step: int, config: OptimConfig, total_steps: int | None) -> float:
    """Learning rate of optimizer step s = `step`, counted from 0.

    With W = warmup_steps, N = `total_steps`, r = min_lr_ratio and p = min(1, (s - W) / (N - W)):

    warm-up   s < W:   lr * (s + 1) / W, so the first step is not zero and step W - 1 has the full rate
    constant           lr
    linear             lr * (1 - (1 - r) * p)
    cosine             lr * (r + (1 - r) * (1 + cos(pi * p)) / 2)
    """
    if step < config.warmup_steps:
        return config.peak_lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.peak_lr
    assert total_steps is not None, "check_schedule ran before"
    progress = min(1.0, (step - config.warmup_steps) / (total_steps - config.warmup_steps))
    floor = config.min_lr_ratio
    if config.schedule == "linear":
        return config.peak_lr * (1.0 - (1.0 - floor) * progress)
    return config.peak_lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """AdamW's settings for one step of `ZeroEngine.step`."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled, of the parameters that `OptimConfig.weight_decay` above 0 would decay: those of an engine built so."""
    grad_clip: float = 0.0
    """Maximum global gradient norm; 0: no clipping."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "grad_clip"):
            _require(self, name, 0 <= getattr(self, name) < math.inf, "0 or more")
        _require(self, "betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters trained beside frozen linear layers (requires PEFT)."""

    rank: int = 16
    """Inner dimension of the adapters; at least 1."""
    alpha: int = 32
    """The adapter's output is scaled by alpha / rank; at least 1."""
    dropout: float = 0.0
    """Dropout probability of an adapter's input in training; in [0, 1). Keep it at 0 for policy-gradient methods, which
    compare log-probs of training with log-probs computed without dropout."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers to adapt, or their last parts, such as ("q_proj", "v_proj"). all-linear: every linear layer
    of the backbone that PEFT adapts (not Mamba's `out_proj`). Embeddings and the head are never adapted."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""
    base_format: BaseFormat = "plain"
    """Format of the frozen linear layers: plain (the model's dtype) or nf4 (QLoRA, 4.5 bits per weight, dequantized for
    each matrix product). With nf4, log-probs, exports and weight sync use the quantized base."""

    def __post_init__(self) -> None:
        _require(self, "rank", self.rank >= 1, "1 or more")
        _require_one_of(self, "base_format", BaseFormat)
        _require(self, "alpha", self.alpha >= 1, "1 or more")
        _require(self, "dropout", 0 <= self.dropout < 1, "0 up to, not including, 1")
        names = self.target_modules
        is_right = names == "all-linear" or (isinstance(names, tuple) and len(names) > 0 and all(names))
        _require(self, "target_modules", is_right, "all-linear, or a list of one or more names of linear layers")


MOST_PATH_ROWS = 4
"""Keys of the paths of all nodes per computed token up to which flash4 gathers them: bounds the memory of deep trees of
shared prefixes. Chosen, not measured."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine: one model, trained by a group of ranks."""

    zero: ZeroConfig = field(default_factory=ZeroConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig | None = None
    """Train adapters instead of the whole model. Engines built with trainable=False use the base model in base_format,
    without adapters."""
    dtype: Dtype | None = None
    """Dtype of weights and activations: bfloat16, float16 (with dynamic loss scaling) or float32. The optimizer always
    keeps fp32 master weights. null: bfloat16, unless an app chooses float16 for GPUs without it."""
    gradient_checkpointing: bool | None = None
    """Recompute activations of layers in the backward pass instead of keeping them. null: false, unless an app chooses
    it."""
    checkpoint_to_cpu: bool = False
    """With gradient_checkpointing: keep the inputs of recomputed layers in CPU memory until the backward pass."""
    tiled_mlp: int | None = None
    """Tokens of a tile: each layer's MLP runs tile by tile and keeps only its input; the backward pass computes each
    tile again. 0: all tokens at once. null: 0, unless an app chooses it."""
    keep_probabilities: bool | None = None
    """Keep the LM head's probabilities of a micro batch until its backward pass, which else computes the logits again:
    2 bytes for each target and row of the vocabulary. Only in bfloat16 on a GPU. Without gradient_checkpointing also
    the keys and values that flash4 gathers for shared prefixes. null: false, unless an app chooses it."""
    train_vision: bool = False
    """Train the vision tower and projector of a vision-language model too. If false, they are frozen, and adapters are
    added to the text model only."""
    sequence_parallel: int = 1
    """Number of ranks that share each micro batch, a slice of its tokens each (Ulysses). Must divide the number of
    ranks and the model's attention heads."""
    compile: bool | None = None
    """Compile the layers with torch.compile (needs a C++ compiler, on CUDA also Triton). Attention itself is not
    compiled. The first steps are slow. null: false, unless an app chooses it."""
    attention: Attention = "auto"
    """auto: on CUDA flash-attn-4 (flash4, Hopper only) or flash-attn (flash) if installed, otherwise torch's varlen
    attention; on the CPU SDPA, one sequence at a time."""
    match_servers: bool = False
    """Compute the log-probs of the rollout servers, bit for bit: layers and log-probs use the servers' operations. For
    Llama, Qwen2 and Qwen3 models and Qwen3's mixtures."""
    router_replay: RouterReplay = "off"
    """Mixtures of experts: the routes of log-probs and updates. off: the routers choose in every pass. R2: updates
    replay the experts of the pass for old log-probs (arXiv:2507.18071, section 5.3). R3: both replay the experts that
    the rollout servers chose for prompts and responses (arXiv:2510.11370). Routers are trained in any case."""
    experts: Experts = "auto"
    """Experts of a mixture: grouped (one product for all experts of a layer) or loop (transformers' own, one expert
    after the other). auto: grouped where torch has it: on CPUs and on GPUs of compute capability 8.0 (fast from 9.0 on,
    in bfloat16), for matrices whose rows are a multiple of 16 bytes."""
    dropout: bool = False
    """Train with the model's own dropout (residual, embedding, MLP). If false, every such rate is 0: policy gradients
    compare log-probs of training with log-probs computed without noise. Packed attention never drops."""
    seed: int = 0
    """Seed of dropout and of weights that the model folder does not contain."""
    collective_guard: Guard = "off"
    """Compare the collectives of all ranks during training (see ds_engine.CollectiveGuard): off, auto, lockstep or
    watch."""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            _require_one_of(self, "dtype", Dtype)
        _require_one_of(self, "attention", Attention)
        _require_one_of(self, "router_replay", RouterReplay)
        if self.router_replay != "off":
            if self.compile:
                _refuse("compile", True, "compiled layers would keep the routes of their first pass", "use false")
            if self.tiled_mlp:
                _refuse("tiled_mlp", self.tiled_mlp, "routes are those of all tokens, not of a tile's", "use 0")
        if self.zero.offload.optimizer == "nvme" and self.optim.name != "adamw":
            _refuse("optim.name", self.optim.name, "states on NVMe are tested with adamw only", "use cpu or none")
        _require_one_of(self, "experts", Experts)
        if self.compile and self.zero.offload.param == "nvme":
            hooks = "weights on NVMe are fetched in hooks inside the layers, which break the graphs"
            _refuse("compile", self.compile, hooks, "use zero.offload.param cpu or none")
        if self.compile and self.lora is not None and self.lora.base_format != "plain":
            kept = "compiled layers would keep the dequantized weights of lora.base_format=nf4"
            _refuse("compile", self.compile, kept, "use plain, or compile=false")
        _require(self, "tiled_mlp", (self.tiled_mlp or 0) >= 0, "0 for none, or tokens of a tile")
        if self.tiled_mlp and self.zero.offload.param == "nvme":
            hooks = "weights on NVMe would be read again for every tile"
            _refuse("tiled_mlp", self.tiled_mlp, hooks, "use zero.offload.param cpu or none")
        if self.tiled_mlp and not self.trains_without_noise:
            _refuse("tiled_mlp", self.tiled_mlp, "tiles that are computed again would draw another dropout")
        _require(self, "sequence_parallel", self.sequence_parallel >= 1, "1 or more")
        if self.match_servers:
            for name, others, remedy in (
                ("compile", self.compile, "false or null"),
                ("lora", self.lora, "null"),
                ("dtype", self.dtype == "float16", "bfloat16 or float32"),
                ("experts", self.experts == "loop", "auto or grouped"),
                ("router_replay", self.router_replay != "off", "off: equal bits choose equal experts"),
            ):
                if others:
                    _refuse(
                        name, getattr(self, name), "match_servers computes each operation by itself", f"use {remedy}"
                    )
        if self.checkpoint_to_cpu and not self.gradient_checkpointing:
            _refuse("checkpoint_to_cpu", True, "it needs gradient_checkpointing: true")
        _require_one_of(self, "collective_guard", Guard)

    # Rules derived from the settings. The engine, DeepSpeed's configuration and the plans all read them from here.

    @property
    def model_dtype(self) -> Dtype:
        """`dtype`; bfloat16 if it is null."""
        return self.dtype or "bfloat16"

    @property
    def keeps_paths(self) -> bool:
        """True if flash4 may keep the keys and values of shared prefixes' paths until the backward pass."""
        return bool(self.keep_probabilities) and not self.gradient_checkpointing and self.model_dtype != "float32"

    @property
    def trains_without_noise(self) -> bool:
        """True if the forward pass of training computes what the one without gradients does: nothing is dropped."""
        return not self.dropout and (self.lora is None or not self.lora.dropout)

    @property
    def grad_accum_dtype(self) -> Dtype:
        """Dtype in which gradients of micro batches are accumulated."""
        return "float32" if self.zero.fp32_grad_accum else self.model_dtype

    @property
    def reduce_dtype(self) -> Dtype:
        """Dtype in which gradients are reduced over ranks."""
        return "float32" if self.zero.fp32_reduce else self.model_dtype

    @property
    def reduce_bucket_elements(self) -> int:
        """Elements of a gradient bucket."""
        return self.zero.reduce_bucket_bytes // DTYPE_BYTES[self.reduce_dtype]

    @property
    def reuse_elements(self) -> int:
        """Stage 3: parameters reused within this number of elements are not released in between."""
        return int(self.zero.deepspeed.get(REUSE_DISTANCE, DEFAULTS[REUSE_DISTANCE]))

    @property
    def prefetch_elements(self) -> int:
        """Stage 3: elements that are gathered ahead of their use."""
        live = int(self.zero.deepspeed.get(LIVE_PARAMETERS, DEFAULTS[LIVE_PARAMETERS]))
        return min(live, int(self.zero.deepspeed.get(PREFETCH_BUCKET, self.reduce_bucket_elements)))

    @property
    def sub_group_elements(self) -> int:
        """Elements that the optimizer of stage 3 steps at a time."""
        return int(self.zero.deepspeed.get(SUB_GROUP, DEFAULTS[SUB_GROUP]))

    @property
    def hpz_ranks(self) -> int:
        """Stage 3: ranks of a node that hold a second shard of each parameter (hpZ); 1: none."""
        return int(self.zero.deepspeed.get(HPZ, 1))

    @property
    def uses_bf16_optimizer(self) -> bool:
        """True if DeepSpeed uses its `BF16_Optimizer`: at stage 1 in bf16 with fp32 accumulation, unless optimizer
        states are offloaded. Otherwise stages 1 and 2 use `DeepSpeedZeroOptimizer`."""
        zero = self.zero
        on_device = zero.offload.optimizer == "none"
        return zero.stage == 1 and self.model_dtype == "bfloat16" and zero.fp32_grad_accum and on_device

    @property
    def fuses_grad_accumulation(self) -> bool:
        """True if the engine replaces DeepSpeed's gradient accumulation of stage 2 (zero/grad_accumulation.py)."""
        zero = self.zero
        casts = self.model_dtype != self.grad_accum_dtype == "float32"
        return zero.stage == 2 and casts and zero.offload.optimizer == "none" and not zero.overlap_comm

    @property
    def fuses_zero3_gradients(self) -> bool:
        """True if the engine replaces gradient reduction and accumulation of stage 3 (zero/zero3_gradients.py)."""
        return self.zero.stage == 3 and self.zero.offload.optimizer == "none"

    @property
    def fuses_grad_norm(self) -> bool:
        """True if the engine replaces gradient norm, overflow check and clipping (zero/optimizer_step.py)."""
        divides = self.optim.optimizer.divides_gradients
        return divides and self.zero.offload.optimizer == "none" and not self.uses_bf16_optimizer
