"""Batch configuration, and the layout of a batch over mini batches, dp x sp ranks and micro batches.

Standard library only: an application can read its config before torch is imported.

DeepSpeed asserts  train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * world size,  where
its train batch is that of one optimizer step: our mini batch, in sequences.

With sequence parallelism a replica of sp ranks computes micro_batch_size * sp sequences together, each rank a share of
every sequence. So a GPU holds the tokens of micro_batch_size sequences for any sp. The equation holds with world size
dp * sp, and also for DeepSpeed with `sequence_parallel_size` (world size dp, micro batch times sp).
"""

from dataclasses import dataclass
from math import gcd

from ..errors import ArgumentError, BatchError, require
from .plan import listed, nearest_divisors, nearest_multiples

DEFAULT_TOKEN_BUDGET = 16_384


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Split of a train batch into optimizer steps and forward/backward passes."""

    train_batch_size: int = 32
    """Prompts per step (one rollout). At least 1, a multiple of `mini_batch_size`."""
    mini_batch_size: int = 32
    """Prompts per optimizer step. At least 1, divides `train_batch_size`."""
    micro_batch_size: int | None = None
    """Sequences per forward/backward on one GPU. None packs up to `token_budget` tokens instead."""
    token_budget: int | None = None
    """Maximum packed tokens (prompt + response) per micro batch; a longer sequence gets its own. A prefix that
    sequences share counts once. At least 1. None: 16,384, unless an app chooses it."""
    share_prefixes: bool = True
    """Compute tokens with which several sequences of a micro batch begin (the prompt of a group) once. It changes no
    result except by rounding. Models that cannot do it compute every sequence whole."""

    @property
    def max_packed_tokens(self) -> int:
        """`token_budget`, or its default."""
        return DEFAULT_TOKEN_BUDGET if self.token_budget is None else self.token_budget

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "mini_batch_size", "micro_batch_size", "token_budget"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "1 or more")
        if self.train_batch_size % self.mini_batch_size:
            fits = nearest_divisors(self.train_batch_size, self.mini_batch_size)
            raise ArgumentError(
                f"it does not divide train_batch_size, {self.train_batch_size}",
                field="mini_batch_size",
                value=self.mini_batch_size,
                allowed=listed(fits),
            )


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """A batch that divides exactly. Sizes are in sequences unless stated otherwise."""

    dp: int
    sp: int
    num_mini_batches: int
    """Optimizer steps per step."""
    train_batch_size: int
    """Sequences per optimizer step = micro_batch_size * gradient_accumulation_steps * dp * sp."""
    micro_batch_size: int
    """Sequences per forward/backward and GPU; 1 with a token budget."""
    gradient_accumulation_steps: int
    """Forward/backward passes per optimizer step. With a token budget it only satisfies DeepSpeed's config: the plan of
    each mini batch has its own count, and the engine marks the accumulation boundary itself."""


def batch_layout(config: BatchConfig, *, samples_per_prompt: int, dp: int, sp: int = 1) -> BatchLayout:
    """Divide the batch of a step over mini batches, ranks and micro batches.

    Raises `BatchError`, naming sizes that work, when mini_batch_size * samples_per_prompt is not a multiple of
    micro_batch_size * dp * sp (with a token budget: of dp * sp); and when a count is below 1.
    """
    for name, value in (("samples_per_prompt", samples_per_prompt), ("dp", dp), ("sp", sp)):
        if value < 1:
            raise BatchError(field=name, value=value, allowed="1 or more")
    micro = 1 if config.micro_batch_size is None else config.micro_batch_size
    sequences = config.mini_batch_size * samples_per_prompt
    if sequences % (micro * dp * sp):
        raise _misfit(config, samples_per_prompt, dp, sp)
    return BatchLayout(
        dp=dp,
        sp=sp,
        num_mini_batches=config.train_batch_size // config.mini_batch_size,
        train_batch_size=sequences,
        micro_batch_size=micro,
        gradient_accumulation_steps=sequences // (micro * dp * sp),
    )


def _misfit(config: BatchConfig, samples_per_prompt: int, dp: int, sp: int) -> BatchError:
    micro = config.micro_batch_size
    unit = (micro or 1) * dp * sp
    prompt_unit = unit // gcd(unit, samples_per_prompt)  # smallest number of prompts whose sequences divide
    ranks = f"dp={dp} x sp={sp}" if sp > 1 else f"dp={dp}"
    factors = 1 + (micro is not None) + (sp > 1)
    problem = (
        f"{config.mini_batch_size} prompts x {samples_per_prompt} samples ="
        f" {config.mini_batch_size * samples_per_prompt} sequences is not a multiple of"
        f" {'' if micro is None else f'micro_batch_size={micro} x '}{ranks}{'' if factors == 1 else f' = {unit}'}"
    )
    parts = []
    fits = nearest_divisors(config.train_batch_size, config.mini_batch_size, multiple_of=prompt_unit)
    if fits:
        parts.append(f"mini_batch_size {listed(fits)}")
    else:
        multiples = nearest_multiples(prompt_unit, config.train_batch_size)
        parts.append(
            f"train_batch_size {listed(multiples)} (with mini_batch_size a multiple of {prompt_unit} that divides it)"
        )
    per_rank, rest = divmod(config.mini_batch_size * samples_per_prompt, dp * sp)
    if micro is not None and rest == 0:
        parts.append(f"micro_batch_size {listed(nearest_divisors(per_rank, micro))}")
    sample_unit = unit // gcd(unit, config.mini_batch_size)
    parts.append(f"samples per prompt {listed(nearest_multiples(sample_unit, samples_per_prompt))}")
    return BatchError(problem, field="mini_batch_size", value=config.mini_batch_size, allowed=", or ".join(parts))
