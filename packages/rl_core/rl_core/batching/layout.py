"""How a step's prompts divide over mini batches, dp x sp ranks and micro batches, in DeepSpeed's own terms.

DeepSpeed asserts  train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * world size,  where
its train batch is what one optimizer step sees: our mini batch, in sequences.

With sequence parallelism a replica of sp ranks computes micro_batch_size * sp sequences together, each rank a share of
every sequence. So a GPU holds the tokens of micro_batch_size sequences whatever sp is, and the equation holds with
world size = dp * sp as well as for DeepSpeed told `sequence_parallel_size` (world size dp, micro batch times sp).
"""

from dataclasses import dataclass
from math import gcd

from ..errors import BatchError
from .config import BatchConfig
from .plan import listed, nearest_divisors, nearest_multiples

__all__ = ["BatchLayout", "batch_layout"]


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """A batch that divides exactly. Sizes in sequences unless said otherwise."""

    num_prompts: int
    """Prompts a step."""
    samples_per_prompt: int
    dp: int
    sp: int
    num_mini_batches: int
    """Optimizer steps a step."""
    prompts_per_mini_batch: int
    train_batch_size: int
    """Sequences per optimizer step = micro_batch_size * gradient_accumulation_steps * dp * sp."""
    micro_batch_size: int
    """Sequences per forward/backward and GPU; 1 when packing by tokens."""
    gradient_accumulation_steps: int
    """Forward/backwards per optimizer step. When packing by tokens this is only what DeepSpeed is told: the plan of
    each mini batch has its own count, and the engine marks the accumulation boundary itself."""
    sequences_per_forward: int | None
    """Most sequences a replica computes together (micro_batch_size * sp); None when packing by tokens."""
    tokens_per_forward: int | None
    """Most tokens a replica computes together (token_budget * sp); None with a fixed micro batch size."""

    def deepspeed_batch(self, *, told_sequence_parallel: bool = False) -> dict[str, int]:
        """The three batch keys of a DeepSpeed config.

        `told_sequence_parallel`: DeepSpeed knows of sp (`sequence_parallel_size`, an mpu or a mesh), so it
        counts dp ranks.
        """
        return {
            "train_batch_size": self.train_batch_size,
            "train_micro_batch_size_per_gpu": self.micro_batch_size * (self.sp if told_sequence_parallel else 1),
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }


def batch_layout(config: BatchConfig, *, samples_per_prompt: int, dp: int, sp: int = 1) -> BatchLayout:
    """Divide a step's batch, or say which sizes would divide.

    Raises `BatchError` when mini_batch_size * samples_per_prompt is not a multiple of micro_batch_size * dp * sp (with
    micro batches by token budget: of dp * sp), or a count is below 1.
    """
    for name, value in (("samples_per_prompt", samples_per_prompt), ("dp", dp), ("sp", sp)):
        if value < 1:
            raise BatchError(f"{name}={value}: must be at least 1")
    micro = 1 if config.micro_batch_size is None else config.micro_batch_size
    sequences = config.mini_batch_size * samples_per_prompt
    if sequences % (micro * dp * sp):
        raise BatchError(_misfit(config, samples_per_prompt, dp, sp))
    by_tokens = config.micro_batch_size is None
    return BatchLayout(
        num_prompts=config.train_batch_size,
        samples_per_prompt=samples_per_prompt,
        dp=dp,
        sp=sp,
        num_mini_batches=config.train_batch_size // config.mini_batch_size,
        prompts_per_mini_batch=config.mini_batch_size,
        train_batch_size=sequences,
        micro_batch_size=micro,
        gradient_accumulation_steps=sequences // (micro * dp * sp),
        sequences_per_forward=None if by_tokens else micro * sp,
        tokens_per_forward=config.token_budget * sp if by_tokens else None,
    )


def _misfit(config: BatchConfig, samples_per_prompt: int, dp: int, sp: int) -> str:
    micro = config.micro_batch_size
    unit = (micro or 1) * dp * sp
    prompt_unit = unit // gcd(unit, samples_per_prompt)  # fewest prompts whose sequences divide
    ranks = f"dp={dp} x sp={sp}" if sp > 1 else f"dp={dp}"
    parts = [
        f"mini_batch_size={config.mini_batch_size} prompts x {samples_per_prompt} samples ="
        f" {config.mini_batch_size * samples_per_prompt} sequences cannot be divided by"
        f" {'' if micro is None else f'micro_batch_size={micro} x '}{ranks} = {unit}"
    ]
    fits = [size for size in _mini_sizes(config.train_batch_size) if size % prompt_unit == 0]
    if fits:
        nearest = sorted(sorted(fits, key=lambda size: (abs(size - config.mini_batch_size), size))[:4])
        parts.append(f"mini_batch_size that would do: {listed(nearest)}")
    else:
        multiples = nearest_multiples(prompt_unit, config.train_batch_size)
        parts.append(
            f"train_batch_size that would do: {listed(multiples)} (with mini_batch_size a multiple of {prompt_unit}"
            f" that divides it)"
        )
    per_rank, rest = divmod(config.mini_batch_size * samples_per_prompt, dp * sp)
    if micro is not None and rest == 0:
        parts.append(f"micro_batch_size that would do: {listed(nearest_divisors(per_rank, micro))}")
    sample_unit = unit // gcd(unit, config.mini_batch_size)
    parts.append(f"samples per prompt that would do: {listed(nearest_multiples(sample_unit, samples_per_prompt))}")
    return "; ".join(parts)


def _mini_sizes(train_batch_size: int) -> list[int]:
    return [size for size in range(1, train_batch_size + 1) if train_batch_size % size == 0]
