"""ZeroEngine: one Hugging Face model, sharded by DeepSpeed, trained on packed micro batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .agreement import agree_on_plan, sum_over_ranks
from .batch import Head, LogProbFn, LossFn, StepStats, TokenBatch, TokenOutputs
from .config import EngineConfig, check_schedule, learning_rate
from .errors import EngineError
from .guard.collective_guard import num_guarded, start_guard
from .micro_batch import MicroBatches
from .model.attention import choose_kernel
from .model.loading import check_offload, load_model, prepare_model, torch_dtype
from .model.lora import NamedTensor, adapter_settings, adapter_tensors, adapters_off, has_adapters, whole_tensors
from .model.sequence_parallel import join_sequence_group
from .state.export import export_tensors
from .state.reshape import StateSource, fill_state, has_layout
from .state.saved_state import load_state, save_state
from .zero.ds_config import deepspeed_config
from .zero.loss_scale import LossScale, check_fp16
from .zero.memory import EngineMemory, MemoryReport, memory_stats
from .zero.optimizer import build_optimizer, start_deepspeed

__all__ = ["ZeroEngine"]


class ZeroEngine:
    """One model trained by all ranks of the default process group, which must be initialised (`init_distributed`).

    Every method below is collective: all ranks call it, with the same number of micro batches.
    """

    def __init__(
        self,
        module: nn.Module,
        config: EngineConfig,
        *,
        log_prob_fn: LogProbFn | None = None,
        device: torch.device,
        total_steps: int | None = None,
        trainable: bool = True,
        head: Head = "lm",
    ) -> None:
        """Take over `module`, already loaded with packed attention and its head; usually call `from_pretrained`."""
        if not dist.is_initialized():
            raise EngineError("torch.distributed is not initialised: call ds_engine.init_distributed first")
        if head == "lm" and log_prob_fn is None:
            raise EngineError("an engine with an LM head needs log_prob_fn")
        self.config = config
        self.head: Head = head
        self.device = device
        self.module = module
        self._sp = config.sequence_parallel
        self._sequence = join_sequence_group(self._sp)
        self.dp_rank, self.dp_size = dist.get_rank() // self._sp, dist.get_world_size() // self._sp
        self.zero_stage: int = config.zero.stage
        self._total_steps = total_steps if total_steps is not None else config.optim.total_steps
        check_schedule(config.optim, self._total_steps)
        self._kernel = choose_kernel(config.attention, device_type=device.type, dtype=torch_dtype(config.dtype))
        self._num_steps = 0
        prepare_model(module, config, log_prob_fn=log_prob_fn, device=device, trainable=trainable, head=head)
        self._optimizer = build_optimizer(module, config.optim) if trainable else None
        self._deepspeed = start_deepspeed(module, self._optimizer, config, device=device)
        self._micro_batches = MicroBatches(
            self._deepspeed,
            head=head,
            device=device,
            kernel=self._kernel,
            sequence=self._sequence,
            step_each_micro=config.zero.step_each_micro,
        )
        self._memory = EngineMemory(module, self._optimizer, self._deepspeed)
        self._loss_scale = LossScale(getattr(self._deepspeed, "optimizer", None))
        self._guard = start_guard(config.collective_guard, stall_timeout_s=config.collective_stall_s)

    @classmethod
    def from_pretrained(
        cls,
        model_path: str,
        config: EngineConfig,
        *,
        log_prob_fn: LogProbFn | None = None,
        device: torch.device,
        total_steps: int | None = None,
        trainable: bool = True,
        head: Head = "lm",
    ) -> ZeroEngine:
        """Load the Hugging Face folder `model_path` and shard it as `config` says.

        Args:
            log_prob_fn: (hidden_KH, weight_VH, targets_K, temperature) -> (log_probs_K, entropy_K), fp32; for
                head="lm".
            device: where this rank computes; the same as given to `init_distributed`.
            total_steps: optimizer steps of the run, for the schedule; overrides `config.optim.total_steps`.
            trainable: False for a reference model: weights only, no gradients, no optimizer states. Stage 3 shards it,
                stages 1 and 2 keep it whole on every rank.
            head: "lm", or "value" for a critic or reward model: the LM head is left out, a linear one to a single
                number (`score.weight` [1, H]) takes its place, and `values` that of `log_probs`.

        Raises:
            ModelError: the folder or architecture cannot be used.
            EngineConfigError: a setting cannot work here.
        """
        if not dist.is_initialized():
            raise EngineError("torch.distributed is not initialised: call ds_engine.init_distributed first")
        check_offload(config.zero.offload)
        check_fp16(config.dtype, device.type)
        settings = deepspeed_config(config, device_type=device.type)
        module = load_model(model_path, config, device=device, ds_config=settings, head=head)
        return cls(
            module,
            config,
            log_prob_fn=log_prob_fn,
            device=device,
            total_steps=total_steps,
            trainable=trainable,
            head=head,
        )

    # ------------------------------------------------------------------ work

    @torch.no_grad()
    def log_probs(
        self, micro_batches: Sequence[TokenBatch], *, temperature: float = 1.0, adapters: bool = True
    ) -> list[TokenOutputs]:
        """Log-prob and entropy of each target, without gradient.

        Args:
            adapters: False answers as the base model, with what LoRA trained left out: a reference model for free.

        Returns:
            One TokenOutputs per micro batch, [K] fp32, on the CPU; K = 0 where a batch has no targets.

        Raises:
            EngineError: the engine has a value head, or no adapters to leave out.
            PlanMismatchError: ranks brought different numbers of micro batches.
        """
        self._require_head("lm", "log_probs")
        if not adapters:
            self._require_adapters("log_probs(adapters=False)")
        agree_on_plan("log_probs" if adapters else "log_probs(adapters=False)", micro_batches, self.device, sp=self._sp)
        self._set_mode(training=False)
        with nullcontext() if adapters else adapters_off(self.module):
            rows = self._micro_batches.answer(micro_batches, temperature)
        return [TokenOutputs(log_probs_K=r[0], entropy_K=r[1]) for r in rows]

    @torch.no_grad()
    def values(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Value of the state before each target, without gradient: the answer of head="value".

        Returns:
            One [K] fp32 tensor per micro batch, on the CPU; K = 0 where a batch has no targets.

        Raises:
            EngineError: the engine has an LM head.
            PlanMismatchError: ranks brought different numbers of micro batches.
        """
        self._require_head("value", "values")
        agree_on_plan("values", micro_batches, self.device, sp=self._sp)
        self._set_mode(training=False)
        return [rows_1K[0] for rows_1K in self._micro_batches.answer(micro_batches)]

    def train_mini_batch(
        self, micro_batches: Sequence[TokenBatch], loss_fn: LossFn, *, temperature: float = 1.0
    ) -> StepStats:
        """One optimizer step on the sum of the losses of all micro batches of all ranks.

        The gradient applied is exactly that of the summed loss, however it is split into micro batches and ranks.

        Args:
            loss_fn: called with the outputs and the batch (both on the device) of each micro batch that has targets.

        Raises:
            PlanMismatchError: ranks brought different numbers of micro batches.
            BatchError: a malformed batch or loss.
            EngineError: the engine was built with trainable=False, or an earlier mini batch failed half-way.
        """
        optimizer = self._require_optimizer("train_mini_batch")
        guarded_before = num_guarded()
        num_empty = agree_on_plan("train_mini_batch", micro_batches, self.device, sp=self._sp)
        self._set_mode(training=True)
        lr = learning_rate(self._num_steps, self.config.optim, self._total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_scale = self._loss_scale.value
        label = f"step {self._num_steps}"
        losses, metrics = self._micro_batches.train(micro_batches, loss_fn, temperature, label=label)
        self._num_steps += 1
        self._loss_scale.after_step()
        loss, totals = sum_over_ranks(losses, metrics, sp=self._sp)
        return StepStats(
            loss=loss,
            metrics=totals,
            grad_norm=float(self._deepspeed._global_grad_norm),
            lr=lr,
            num_micro_batches=len(micro_batches),
            num_empty_micro_batches=num_empty,
            step_applied=bool(self._deepspeed.was_step_applied()),
            loss_scale=loss_scale,
            num_guarded_collectives=num_guarded() - guarded_before,
        )

    # ------------------------------------------------------- state in and out

    @property
    def deepspeed(self) -> Any:
        """What `deepspeed.initialize` returned (stages 1 and 2, trainable=False: the model), for tools that know it."""
        return self._deepspeed

    def export_parameters(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) on rank 0, nothing elsewhere; every rank iterates to the end.

        Adapters are merged: base weight + scale * B @ A, computed in fp32.
        """
        return self._export(whole_tensors(self.module), dtype)

    def whole_tensors(self, *, merged: bool = True) -> list[NamedTensor]:
        """What `export_parameters` hands out, as names, parameters and what is to be merged into them (merged=False:
        nothing): for tools that gather by themselves, such as a weight sync. Not collective."""
        return whole_tensors(self.module, merged=merged)

    def adapter_tensors(self) -> list[NamedTensor]:
        """The same of `export_adapters`. Raises as it does."""
        self._require_adapters("adapter_tensors")
        return adapter_tensors(self.module)

    def export_adapters(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The same for adapters alone (and a value head), under the names of PEFT's adapter_model.safetensors.

        Raises:
            EngineError: the engine was built without lora.
        """
        self._require_adapters("export_adapters")
        return self._export(adapter_tensors(self.module), dtype)

    def adapter_config(self) -> dict[str, Any]:
        """PEFT's adapter_config.json, JSON-able, on any rank; not collective. Raises as `export_adapters` does."""
        self._require_adapters("adapter_config")
        return adapter_settings(self.module)

    def _export(self, tensors: Sequence[NamedTensor], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        return export_tensors(tensors, rank=dist.get_rank(), zero_stage=self.zero_stage, dtype=dtype)

    def save_checkpoint(self, folder: str | Path, tag: str) -> None:
        """Write DeepSpeed's own checkpoint to `folder`/`tag`: every rank its shard; with lora, of adapters only."""
        self._require_optimizer("save_checkpoint")
        save_state(self._deepspeed, folder, tag, num_steps=self._num_steps)

    def load_checkpoint(self, folder: str | Path, tag: str) -> None:
        """Continue from `folder`/`tag`, written by as many ranks at the same stage.

        Raises:
            CheckpointError: there is none, or it does not fit.
        """
        self._require_optimizer("load_checkpoint")
        self._num_steps = load_state(self._deepspeed, folder, tag)

    def load_state(self, source: StateSource) -> None:
        """Continue from what any number of ranks trained, at any stage, with any offload and dtype, bit for bit.

        Every rank reads its share of fp32 weights and of Adam's moments, and no more.

        Raises, on every rank and before anything is changed:
            CheckpointError: the source cannot be read, or is of other parameters.
        """
        self._require_optimizer("load_state")
        self._num_steps = fill_state(self._deepspeed, self.module, source)

    def has_layout(self, source: StateSource) -> bool:
        """Whether `load_checkpoint` can read what the source reads: as many ranks, the same stage, offload, dtype and
        parameter groups. Not collective."""
        self._require_optimizer("has_layout")
        return has_layout(self._deepspeed, source)

    def offload(self, *, include_params: bool = False) -> MemoryReport:
        """Move optimizer states, fp32 weights and gradient buffers off the device (and the weights, if asked).

        On the CPU there is nothing to free. Until `reload`, only `export_parameters` may be used, and only with the
        weights still on the device.
        """
        return self._memory.offload(self.device, include_params=include_params)

    def reload(self) -> MemoryReport:
        """Bring back what `offload` moved."""
        return self._memory.reload(self.device)

    def memory_stats(self) -> dict[str, int]:
        """Bytes in use by this rank; see `ds_engine.memory_stats`."""
        return memory_stats(self.device)

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers. The process group stays."""
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        if self._deepspeed is not self.module:
            self._deepspeed.destroy()
        if self._sequence is not None:
            dist.destroy_process_group(self._sequence.group)

    # ---------------------------------------------------------------- setup

    def _set_mode(self, *, training: bool) -> None:
        """Switching takes a millisecond with hundreds of modules, in which the device has nothing to do."""
        if self.module.training != training:
            self.module.train(training)

    def _require_optimizer(self, method: str) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise EngineError(f"{method} needs an engine built with trainable=True")
        return self._optimizer

    def _require_adapters(self, method: str) -> None:
        if not has_adapters(self.module):
            raise EngineError(f"{method} needs an engine built with lora and trainable=True")

    def _require_head(self, head: Head, method: str) -> None:
        if self.head != head:
            raise EngineError(f"{method} needs an engine built with head={head!r}; this one has head={self.head!r}")
