"""Estimates the memory of one rank before a model is loaded.

The model states follow the allocations of DeepSpeed 0.19. N trainable parameters, W = dp x sp ranks, P = N / W, e bytes
per element of the model's dtype (2 or 4), B elements per reduce bucket:

                       stage 1, bf16          stage 1, others     stage 2              stage 3
                       and fp32 accumulation
    weights            e N                    e N                 e N                  e P + persistent and gathered
    optimizer          12 P                   12 P                12 P                 12 P
    gradients          (4 + e) N              (e or 4) N          4 P, or e P          4 P, or e P
    during the step    -                      (e+4) P or 4 P      (2e or e)+4 P, or -  -, or 4 P
    bucket             (4 + e) min(N, 5e8)    (e or 4) B          e B                  (e or 4) B

"optimizer" is the fp32 weights and AdamW's two moments; another optimizer has the bytes of its entry. With
optimizer offload these are in CPU memory, together with a full fp32 gradient shard and a copy of the weight shard; at
stage 2, fp32-accumulated gradients still stay on the device until the step.

A LoRA base in NF4 (4.5 bits per weight) counts as weights. One dequantized matrix exists at a time: e bytes per weight.

Activations: t = T / sp tokens of this rank, q and v the widths of queries and of keys or values, h hidden size, i
intermediate size. A layer of the supported families keeps, per token,

    2 norms       2 (4 h + e h) for the fp32 and normalized inputs, 2 e h for the inputs of linear layers
    heads' norms  (4 + e) (q + v)                                   (Qwen3)
    attention     e (2 q + 2 v) + 4 per head; with sp > 1 also e q; with kept paths e 2 v for each of their rows
    MLP           4 e i

Compiled layers keep neither fp32 copies, nor normalized inputs, nor products of activations: 2 e h, e (q + v), the same
for attention, 2 e i. With activation checkpointing a recomputed layer keeps its input e h; one layer at a time keeps
everything. With tiled_mlp the row "MLP" exists for one tile of one layer at a time, beside the fp32 sums of the tiles'
weight gradients.

The peak is the maximum over four moments: the backward pass of the head (all activations, the LM head's gradient e V h,
working memory of the log-prob function), of the top layer, and of the embedding (2 e V h, and a cast of it), and the
optimizer step. If a mini batch has only one micro batch, most gradients are not allocated at the first two moments:
stage 2 allocates them when the first bucket is full, stage 1 one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from plinth_base.dtypes import DTYPE_BYTES

from ..config import EngineConfig, OffloadDevice, check_heads
from ..errors import EngineConfigError
from ..nf4_size import NF4_CHUNK, nf4_bytes
from ..optimizers import MATRIX_ROUND
from .model_shape import TABLES, ModelShape, Weight

_FALLBACK_BUCKET_ELEMENTS = 500_000_000
"""Bucket of DeepSpeed's `buffered_allreduce_fallback`, which BF16_Optimizer uses. It cannot be configured."""
_DEQUANTIZE_BYTES = 6
"""Temporary bytes per weight of a dequantized chunk: an fp32 value and half of a 4-byte index."""
LOG_PROB_BYTES = 2**29
"""Working memory of rl_core.linear_log_prob in addition to the gradients, and to probabilities that it keeps."""
_TILE_COLUMNS = 64
"""Columns of its narrowest tiles, of which it keeps a sum each."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Bytes of one kind of memory, by location."""

    device: int = 0
    cpu: int = 0
    nvme: int = 0


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Planned bytes of the largest rank at the peak of a training step."""

    num_parameters: int
    """Parameters of the whole model, including adapters."""
    num_trained: int
    """Trainable parameters."""
    num_ranks: int
    weights: Place
    gradients: Place
    optimizer: Place
    """fp32 weights and states."""
    buffers: Place
    """Buffers for communication and offload, and parameters gathered at stage 3."""
    activations: Place
    """Activations kept by the forward pass, and the temporary tensors at the peak."""
    lasting_gradients: int
    """Device bytes of the gradients that stay allocated between steps: the fp32 ones at stage 1 in bf16, else none."""
    is_exact: bool = True
    """True if the family is known; otherwise activations are an upper bound."""

    @property
    def device_bytes(self) -> int:
        """The peak of torch's allocator on the device; the CUDA context (about 0.5 GB) is not included."""
        return sum(place.device for _, place in self.rows())

    def rows(self) -> list[tuple[str, Place]]:
        """(name, bytes) of each kind of memory."""
        names = ("weights", "gradients", "optimizer", "buffers", "activations")
        return [(name, getattr(self, name)) for name in names]

    def table(self) -> str:
        """The estimate as a text table in GB (1e9 bytes)."""
        lines = [
            f"{self.num_parameters / 1e6:,.1f}M parameters, {self.num_trained / 1e6:,.1f}M trained, "
            f"{self.num_ranks} ranks; GB per rank",
            f"{'':12}{'device':>10}{'CPU':>10}{'NVMe':>10}",
        ]
        total = Place(**{name: sum(getattr(one, name) for _, one in self.rows()) for name in ("device", "cpu", "nvme")})
        for name, place in [*self.rows(), ("total", total)]:
            lines.append(f"{name:12}" + "".join(f"{n / 1e9:10.2f}" for n in (place.device, place.cpu, place.nvme)))
        if not self.is_exact:
            lines.append("the architecture is not known: its parameters are counted, activations are an upper bound")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Inputs of all parts of the estimate."""

    shape: ModelShape
    config: EngineConfig
    trained: list[Weight]
    frozen: list[Weight]
    ranks: int
    path_rows: float
    """Kept rows of paths per token."""

    @property
    def e(self) -> int:
        """Bytes per element of the model's dtype."""
        return DTYPE_BYTES[self.config.model_dtype]

    @property
    def accum_bytes(self) -> int:
        """Bytes per element of the gradient accumulator."""
        return DTYPE_BYTES[self.config.grad_accum_dtype]

    @property
    def bucket(self) -> int:
        """Elements per reduce bucket."""
        return self.config.reduce_bucket_elements

    def groups(self) -> list[tuple[list[Weight], float]]:
        """Trainable weights of each parameter group of the optimizer, and bytes per element of the fp32 weights and
        states."""
        optim = self.config.optim
        groups = optim.parameter_groups((len(weight.shape), weight.name in TABLES) for weight in self.trained)
        entry = optim.optimizer
        return [
            ([self.trained[i] for i in indices], 4 + entry.bytes_per_element(optim.options, matrices=matrices))
            for (_, matrices), indices in groups.items()
        ]

    def matrix_step_bytes(self) -> int:
        """Bytes that the step of whole matrices takes beside the states, at most: fp32 copies of those of a round."""
        steps_matrices = bool(self.config.optim.optimizer.matrix_states)
        sizes = [w.size for w in self.trained if len(w.shape) > 1 and w.name not in TABLES] if steps_matrices else []
        return 4 * 4 * min(max(sizes, default=0) + MATRIX_ROUND, sum(sizes))


@dataclass(frozen=True, kw_only=True)
class _States:
    """Model states, and the additional memory of the optimizer step."""

    weights: Place
    gradients: Place
    optimizer: Place
    buffers: Place
    late_gradients: int
    """Device bytes of gradients that a step's first micro batch allocates only during its backward pass."""
    step_only: int
    """Device bytes allocated only during the optimizer step."""
    grad_cast: int = 0
    """Device bytes of the cast in which the largest gradient is reduced."""


def estimate_memory(
    model: str | Path | Mapping[str, Any] | ModelShape,
    config: EngineConfig,
    *,
    dp: int = 1,
    tokens_per_micro_batch: int,
    targets_per_micro_batch: int | None = None,
    num_micro_batches: int = 2,
    path_rows_per_token: float = 0.0,
    head: Literal["lm", "value"] = "lm",
    log_prob_bytes: int = LOG_PROB_BYTES,
) -> MemoryEstimate:
    """Estimate the memory of one of dp x `config.sequence_parallel` ranks in training, with a fused log-prob function.

    Args:
        model: a Hugging Face folder or its config.json; content or shape of one. Outside of llama, mistral, qwen2 and
            qwen3 the estimate is an upper bound.
        tokens_per_micro_batch: packed tokens that the sp ranks of a group share.
        targets_per_micro_batch: predicted tokens among them; None: all.
        path_rows_per_token: keys of the paths of shared prefixes for each computed token, at most `MOST_PATH_ROWS`,
            where `config.keeps_paths`.
        num_micro_batches: micro batches per mini batch; the estimate is the same for all values above 1.
        log_prob_bytes: working memory of the log-prob function in addition to its gradients.

    Raises:
        EngineConfigError: `config.sequence_parallel` does not divide the attention heads of a known family, or
            `config.lora.target_modules` names no linear layer. `check_model` checks other architectures.
        ValueError: the model is not supported, or a count is below 1.
    """
    counts = {"dp": dp, "tokens_per_micro_batch": tokens_per_micro_batch, "num_micro_batches": num_micro_batches}
    for name, count in counts.items():
        if count < 1:
            raise EngineConfigError(field=name, value=count, allowed="1 or more")
    shape = model if isinstance(model, ModelShape) else ModelShape.read(model)
    if shape.is_exact:  # a counted model without heads has one
        check_heads(shape.num_heads, config.sequence_parallel)
    weights = shape.weights(head)
    of_vision = [] if shape.vision is None else list(shape.vision.weights)
    frozen: list[Weight] = []
    if config.train_vision:
        weights += of_vision
    else:
        frozen = of_vision
    if config.lora is not None:
        frozen = [w for w in [*shape.weights(head), *of_vision] if w.name != "score"]
        weights = shape.adapters(config.lora) + [w for w in weights if w.name == "score"]
    num_parameters = sum(w.size for w in weights + frozen)
    if _uses_nf4(config) and shape.is_exact:
        layers = {w.name for w in shape.linear_layers()}
        matrices = {w.name for w in shape.counted if w.layer in layers}
        e = DTYPE_BYTES[config.model_dtype]  # NF4 weights are flat tensors of the model's dtype
        frozen = [replace(w, shape=(nf4_bytes(w.size) // e,)) if w.name in matrices else w for w in frozen]
    path_rows = path_rows_per_token if config.keeps_paths else 0.0
    ranks = dp * config.sequence_parallel
    case = _Case(shape=shape, config=config, trained=weights, frozen=frozen, ranks=ranks, path_rows=path_rows)
    states = _stage_3(case) if config.zero.stage == 3 else _stages_1_and_2(case)
    tokens = -(-tokens_per_micro_batch // config.sequence_parallel)
    targets = min(tokens, targets_per_micro_batch or tokens)
    late = states.late_gradients if num_micro_batches == 1 else 0
    log_prob_bytes = log_prob_bytes + _kept_probabilities(case, targets) if head == "lm" else 0
    peak = _peak(case, states, tokens, targets, log_prob_bytes, late)
    seen, seeing = _vision_bytes(case, tokens_per_micro_batch)
    peak = max(peak + seen, seen + seeing)
    inputs = tokens * shape.hidden * case.e * _recomputed(case) if config.checkpoint_to_cpu else 0
    return MemoryEstimate(
        num_parameters=num_parameters,
        num_trained=sum(w.size for w in weights),
        num_ranks=case.ranks,
        is_exact=shape.is_exact,
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        buffers=states.buffers,
        activations=Place(device=peak, cpu=inputs),
        lasting_gradients=states.gradients.device - states.late_gradients,
    )


def _uses_nf4(config: EngineConfig) -> bool:
    return config.lora is not None and config.lora.base_format == "nf4"


# ---------------------------------------------------------------- model states


def _stages_1_and_2(case: _Case) -> _States:
    zero, e, ranks = case.config.zero, case.e, case.ranks
    groups = [(_shard_elements(sum(w.size for w in group), ranks), num_bytes) for group, num_bytes in case.groups()]
    shards = [size for size, _ in groups]
    shard, whole = sum(shards), sum(shards) * ranks
    weights = Place(device=(whole + sum(w.size for w in case.frozen)) * e)
    offloaded = zero.offload.optimizer != "none"
    optimizer = _place(zero.offload.optimizer, math.ceil(sum(size * num_bytes for size, num_bytes in groups)))
    if case.config.uses_bf16_optimizer:
        reduced = 0 if ranks == 1 else min(whole, _FALLBACK_BUCKET_ELEMENTS) * (4 if zero.fp32_reduce else 4 + e)
        return _States(
            weights=weights, gradients=Place(device=(4 + e) * whole), optimizer=optimizer, buffers=Place(),
            late_gradients=e * whole, step_only=reduced,
        )  # fmt: skip
    separate = case.accum_bytes != e
    step_only = max(shards) * (e + 4 if e < 4 else 4)
    if separate:
        step_only = 4 * shard if zero.stage == 1 else 0
    gradients = Place(device=(whole if zero.stage == 1 else shard) * case.accum_bytes)
    bucket = case.bucket * (case.accum_bytes if zero.stage == 1 else e)
    fused = case.config.fuses_grad_accumulation
    num_buckets = 2 if zero.overlap_comm or (fused and ranks > 1) else 1
    buffers = bucket * num_buckets + (4 * case.bucket if zero.fp32_reduce and e < 4 else 0)
    largest = max(w.size for w in case.trained)
    on_cpu = 0
    if offloaded:
        buffers += largest * e
        on_cpu = (shard + largest + (0 if separate else shard)) * e
        step_only = 0
        gradients = Place(device=gradients.device if zero.stage == 1 or separate else 0, cpu=4 * shard)
    grad_cast = 0
    if not fused:
        grad_cast = 4 * min(largest, shard) if separate and largest > case.bucket else 0
    elif zero.fp32_reduce and ranks > 1:
        grad_cast = 4 * max(0, largest - case.bucket)
    return _States(
        weights=weights, gradients=gradients, optimizer=optimizer, buffers=Place(device=buffers, cpu=on_cpu),
        late_gradients=gradients.device, step_only=step_only, grad_cast=grad_cast,
    )  # fmt: skip


def _stage_3(case: _Case) -> _States:
    zero, e, ranks = case.config.zero, case.e, case.ranks
    shard = sum(-(-w.size // ranks) for w in case.trained)
    states = sum(-(-w.size // ranks) * num_bytes for group, num_bytes in case.groups() for w in group)
    frozen_shard = sum(-(-w.size // ranks) for w in case.frozen)
    everything = case.trained + case.frozen
    second = sum(-(-w.size // case.config.hpz_ranks) for w in everything) if case.config.hpz_ranks > 1 else 0
    threshold = zero.param_persistence_elements
    persistent = sum(w.size for w in everything if w.size <= threshold)
    gathered = 0
    if ranks > 1:
        # A weight stays gathered between forward and backward if fewer elements than the reuse distance lie in between.
        not_persistent = sum(w.size for w in everything if w.size > threshold)
        largest = max(case.shape.largest_layer, *(w.size for w in everything))
        reused = case.config.reuse_elements // 2 + largest + case.config.prefetch_elements
        gathered = (min(not_persistent, reused) + persistent) * e
    offloaded = zero.offload.optimizer != "none"
    flat = case.accum_bytes * shard
    gradients = Place(cpu=flat + 4 * shard) if offloaded else Place(device=flat)
    bucket = case.bucket * (4 if zero.fp32_reduce else e)
    return _States(
        weights=_place(zero.offload.param, (shard + frozen_shard + second) * e),
        gradients=gradients,
        optimizer=_place(zero.offload.optimizer, math.ceil(states)),
        buffers=Place(device=gathered + bucket * (1 if ranks == 1 else 2)),
        late_gradients=gradients.device,
        # The optimizer steps with the fp32 accumulator itself (zero3_gradients.py).
        step_only=0 if offloaded or case.accum_bytes == 4 else 4 * min(shard, case.config.sub_group_elements),
    )


def _shard_elements(num_elements: int, ranks: int) -> int:
    """Elements of one rank's shard of a parameter group at stages 1 and 2, with padding (4-byte aligned in bf16)."""
    alignment = 2 * ranks
    return -(-num_elements // alignment) * alignment // ranks


def _place(offload: OffloadDevice, size: int) -> Place:
    return Place(**{"device" if offload == "none" else offload: size})


# ----------------------------------------------------------------- activations


def _recomputed(case: _Case) -> int:
    """Number of layers recomputed in the backward pass."""
    return case.shape.num_layers if case.config.gradient_checkpointing else 0


def _product_bytes(case: _Case) -> int:
    """Bytes that an MLP keeps per token between its input and its output."""
    return (2 if case.config.compile else 4) * case.e * case.shape.intermediate


def _mlp_bytes(case: _Case, tokens: int) -> int:
    """Bytes that an MLP allocates only during its backward pass."""
    temporary = 2 * case.e * case.shape.intermediate
    if not case.config.tiled_mlp:
        return tokens * temporary
    hidden, inner = case.shape.hidden, case.shape.intermediate
    sums = 4 * 3 * hidden * inner if case.config.lora is None else 0
    return min(tokens, case.config.tiled_mlp) * (temporary + _product_bytes(case)) + sums


def _attention_bytes(case: _Case) -> int:
    """Bytes per token that the backward pass of attention allocates, less what the MLP after it kept and has freed: the
    gradients of its output and inputs, fp32 sums of the latter, and those of the residual stream."""
    shape, e = case.shape, case.e
    q, v = shape.query_width, shape.kv_width
    freed = 0 if case.config.tiled_mlp else _product_bytes(case)
    return e * (2 * q + 2 * v) + 4 * (q + 2 * v) + 2 * e * shape.hidden - freed


def _layer_bytes(case: _Case) -> int:
    """Bytes of activations that one layer keeps per token."""
    shape, e = case.shape, case.e
    lora = case.config.lora
    compiled = case.config.compile
    # A norm keeps its input (also in fp32), the normalized input for the gradient of its scale, and its output.
    norm = e if compiled else 4 + (0 if lora is not None else e)
    q, v = shape.query_width, shape.kv_width
    norms = 2 * (norm + (0 if compiled else e)) * shape.hidden
    head_norms = norm * (q + v) if shape.qk_norm else 0
    products = 0 if case.config.tiled_mlp else _product_bytes(case)
    attention = e * (2 * q + 2 * v) + 4 * shape.num_heads + math.ceil(case.path_rows * e * 2 * v)
    if case.config.sequence_parallel > 1:
        attention += e * q
    adapters = 0
    if lora is not None:
        adapters = e * lora.rank * len(shape.adapters(lora)) // (2 * shape.num_layers)
    return norms + head_norms + attention + products + adapters


def _vision_bytes(case: _Case, tokens: int) -> tuple[int, int]:
    """(kept, temporary) bytes of the vision tower, at most: as if all tokens of a micro batch were of images, which
    every sequence-parallel rank computes whole."""
    shape, e, config = case.shape.vision, case.e, case.config
    if shape is None:
        return 0, 0
    patches = tokens * shape.patches_per_token
    layer = patches * (e * shape.layer_width + 2 * (4 + e) * shape.hidden)
    pixels = patches * shape.pixels_per_patch * (4 + e)
    if not config.train_vision:
        return 0, layer + pixels
    kept = patches * shape.hidden * e if config.gradient_checkpointing else layer
    return kept * shape.num_layers + pixels, layer


def _kept_probabilities(case: _Case, targets: int) -> int:
    """Bytes that `keep_probabilities` takes: each target's row, its sums over tiles, and a copy of hidden states."""
    shape, config = case.shape, case.config
    if not (config.keep_probabilities and config.model_dtype == "bfloat16"):
        return 0
    return targets * (shape.vocab * case.e + 4 * -(-shape.vocab // _TILE_COLUMNS) + shape.hidden * case.e)


def _peak(case: _Case, states: _States, tokens: int, targets: int, log_prob_bytes: int, late: int) -> int:
    """Peak device bytes in addition to the states, of which `late` bytes do not exist at the first two moments."""
    shape, e, config = case.shape, case.e, case.config
    hidden = shape.hidden
    layer = _layer_bytes(case) * tokens
    recomputed = _recomputed(case)
    kept = layer * (shape.num_layers - recomputed)
    if not config.checkpoint_to_cpu:
        kept += recomputed * tokens * hidden * e
    trains_embedding = config.lora is None
    table = shape.vocab * hidden * e if trains_embedding else 0
    head_table = table if log_prob_bytes else 0
    final_hidden = tokens * hidden * (4 + e) + targets * hidden * (e + 4)
    at_head = kept + final_hidden + head_table + log_prob_bytes
    below_head = head_table if shape.tied else 0  # a tied head's gradient is kept until the embedding's backward pass
    in_layer = max(_mlp_bytes(case, tokens) + tokens * 12 * hidden, tokens * _attention_bytes(case))
    if _uses_nf4(config):
        largest = max(w.size for w in shape.linear_layers())
        in_layer += e * largest + _DEQUANTIZE_BYTES * min(largest, NF4_CHUNK)
    recomputing = layer if recomputed else 0
    at_layer = kept + recomputing + in_layer + below_head
    # When the first bucket is full and its gradients are allocated, its layers have freed their activations.
    layer_size = sum(w.size for w in case.trained if w.name not in ("embed_tokens", "lm_head")) // shape.num_layers
    in_bucket = min(shape.num_layers, case.bucket // max(1, layer_size))
    at_first_bucket = kept * (shape.num_layers - in_bucket) // shape.num_layers + recomputing + in_layer + below_head
    at_embedding = tokens * hidden * e + table + below_head + states.grad_cast
    in_step = states.step_only + case.matrix_step_bytes()
    return max(at_head - late, at_layer - late, at_first_bucket, at_embedding, in_step)
