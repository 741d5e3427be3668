"""ZeroEngine: trains one Hugging Face model with DeepSpeed ZeRO on packed micro batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .agreement import agree_on_plan, sum_over_ranks
from .batch import Head, HeadTerm, LmHead, LogProbFn, LossFn, StepStats, TokenBatch, TokenOutputs
from .config import EngineConfig, StepSettings, check_schedule, learning_rate
from .errors import CheckpointError, EngineError
from .from_deepspeed import config_from_deepspeed
from .guard.collective_guard import num_guarded, start_guard
from .micro_batch import ROUTES_COMPARED, ROUTES_DIFFER, MicroBatches
from .model.attention import choose_kernel
from .model.loading import check_offload, load_model, prepare_model, torch_dtype
from .model.lora import NamedTensor, adapter_settings, adapter_tensors, adapters_off, has_adapters, whole_tensors
from .model.matching import Operations
from .model.packed_model import HIDDEN, lm_head_of, row_kernel, shares_prefixes, vision_of
from .model.sequence_parallel import join_sequence_group
from .model.shared_base import SharedBase
from .simple import SimpleBatch
from .state.checkpoint import load_state, save_state
from .state.export import export_tensors
from .state.reshape import StateSource, fill_state, flat_fragments, has_layout
from .zero.ds_config import check_deepspeed, deepspeed_config
from .zero.grad_accumulation import WAITING
from .zero.hpz import prepare_hpz
from .zero.memory import EngineMemory
from .zero.optimizer import build_optimizer, start_deepspeed
from .zero.optimizer_step import LossScale, check_fp16

_AHEAD_TOKENS = 512
"""Length of the sequences with which an engine compiles ahead: attention has other kernels for much shorter ones."""
_AHEAD_ELEMENTS = 6 * 10**6
"""Elements of the hidden states with which it does: torch has graphs for less than some 5 million and for more."""


class ZeroEngine:
    """One model, trained by all ranks of the default process group, which must be initialized (`init_distributed`).

    Methods are collective unless they say otherwise: all ranks call them, with the same number of micro batches.
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
        operations: Operations | None = None,
        deepspeed_settings: dict[str, Any] | None = None,
    ) -> None:
        """Take over `module`, which is loaded with packed attention and its head. Usually call `from_pretrained`.

        Args:
            deepspeed_settings: result of `deepspeed_config`; computed from `config` if None.

        The other arguments are those of `from_pretrained`.
        """
        _require_process_group()
        if head == "lm" and log_prob_fn is None:
            raise EngineError("an engine with an LM head needs it", field="log_prob_fn")
        self.config = config
        self.head: Head = head
        self.device = device
        self.module = module
        self._sp = config.sequence_parallel
        self._sp_group = join_sequence_group(self._sp)
        self.dp_rank, self.dp_size = dist.get_rank() // self._sp, dist.get_world_size() // self._sp
        self.zero_stage: int = config.zero.stage
        self._total_steps = total_steps if total_steps is not None else config.optim.total_steps
        check_schedule(config.optim, self._total_steps)
        kernel = row_kernel(module) or choose_kernel(
            config.attention, device_type=device.type, dtype=torch_dtype(config.model_dtype)
        )
        self._num_steps = 0
        replay = prepare_model(
            module,
            config,
            log_prob_fn=log_prob_fn,
            device=device,
            kernel=kernel,
            trainable=trainable,
            head=head,
            operations=operations,
        )
        self._optimizer = build_optimizer(module, config.optim) if trainable else None
        if deepspeed_settings is None:
            deepspeed_settings = deepspeed_config(config, device_type=device.type, trainable=trainable)
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        self._decays = [group["weight_decay"] > 0 for group in groups]
        self._deepspeed = start_deepspeed(module, self._optimizer, config, deepspeed_settings)
        if self._optimizer is not None and config.optim.optimizer.matrix_states:
            matrices = [(flat, parts) for flat, group, parts in flat_fragments(self._deepspeed) if group["matrices"]]
            optimizer: Any = self._optimizer
            optimizer.bind(matrices, group=self._deepspeed.optimizer.dp_process_group, device=device)
        self._micro_batches = MicroBatches(
            deepspeed=self._deepspeed,
            head=head,
            device=device,
            kernel=kernel,
            sp_group=self._sp_group,
            step_each_micro=config.zero.step_each_micro,
            shares_prefixes=shares_prefixes(module),
            keeps_paths=config.keeps_paths,
            replay=replay,
            vision=vision_of(module, always=config.zero.stage == 3 or (trainable and config.train_vision)),
        )
        self._memory = EngineMemory(module, self._optimizer, self._deepspeed)
        self._loss_scale = LossScale(getattr(self._deepspeed, "optimizer", None))
        self._guard = start_guard(config.collective_guard)

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
        operations: Operations | None = None,
        base: SharedBase | None = None,
    ) -> ZeroEngine:
        """Load the Hugging Face folder `model_path` and shard the model according to `config`.

        Args:
            log_prob_fn: computes log-probs and entropies from hidden states (see `LogProbFn`); required for head="lm".
            device: device of this rank, the same as given to `init_distributed`.
            total_steps: number of optimizer steps of the run, for the schedule; overrides `config.optim.total_steps`.
            trainable: False for a reference model, which has no gradients and no optimizer states. Stage 3 shards its
                weights; stages 1 and 2 keep them whole on every rank.
            head: "lm", or "value" for a critic or reward model. A value head is a linear layer with one output
                (`score.weight` [1, H]) that replaces the LM head; call `values` instead of `log_probs`. Where the
                folder has none, a trainable engine draws it, and a frozen one refuses the folder.
            operations: those of the servers, with `config.match_servers`.
            base: with lora at stages 1 and 2, shares the frozen weights with the other engines built with it.

        Raises:
            ModelError: the folder or architecture is not supported.
            EngineConfigError: a setting cannot work on this machine.
        """
        _require_process_group()
        check_deepspeed(config)
        prepare_hpz(config)
        check_offload(config.zero.offload)
        check_fp16(config.model_dtype, device.type)
        settings = deepspeed_config(config, device_type=device.type, trainable=trainable)
        load = partial(load_model, model_path, config, device=device, ds_config=settings, head=head, new_head=trainable)
        module = load() if base is None else base.model(model_path, config, head, load)
        return cls(
            module,
            config,
            log_prob_fn=log_prob_fn,
            device=device,
            total_steps=total_steps,
            trainable=trainable,
            head=head,
            operations=operations,
            deepspeed_settings=settings,
        )

    @classmethod
    def from_deepspeed_config(
        cls,
        source: Path | str | Mapping[str, Any],
        model_path: str,
        *,
        given: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> ZeroEngine:
        """`from_pretrained` with `config_from_deepspeed(source, given=given)`, a config of DeepSpeed or accelerate."""
        return cls.from_pretrained(model_path, config_from_deepspeed(source, given=given), **arguments)

    # ------------------------------------------------- training and inference

    def log_probs(
        self, micro_batches: Sequence[TokenBatch], *, temperature: float = 1.0, adapters: bool = True
    ) -> list[TokenOutputs]:
        """Log-prob and entropy of each target, without gradients.

        Args:
            temperature: divisor of the logits.
            adapters: False disables the LoRA adapters, so the base model serves as the reference model.

        Returns:
            One TokenOutputs per micro batch, [K] fp32, on the CPU; K = 0 where a batch has no targets.

        Raises:
            EngineError: the engine has a value head, or has no adapters to disable.
            PlanMismatchError: ranks have different numbers of micro batches.
        """
        mode = self.config.router_replay if adapters else "off"
        routes: list[Tensor | None] | None = [] if mode == "R2" else None
        rows = self._infer(
            "log_probs",
            micro_batches,
            adapters=adapters,
            temperature=temperature,
            replays=mode == "R3",
            recorded=routes,
        )
        return [
            TokenOutputs(log_probs_K=r[0], entropy_K=r[1], routes_TLk=routes_TLk)
            for r, routes_TLk in zip(rows, routes or [None] * len(rows), strict=True)
        ]

    def values(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Value of the state before each target, without gradients; for head="value".

        Returns:
            One [K] fp32 tensor per micro batch, on the CPU; K = 0 where a batch has no targets.

        Raises:
            EngineError: the engine has an LM head.
            PlanMismatchError: ranks have different numbers of micro batches.
        """
        return [rows_1K[0] for rows_1K in self._infer("values", micro_batches, head="value")]

    def next_tokens(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """The most likely token in the place of each target, whose own ids do not matter: greedy decoding without a
        key/value cache.

        Returns:
            One int64 [K] tensor per micro batch, on the CPU; K = 0 where a batch has no targets.

        Raises:
            EngineError: the engine has a value head.
            PlanMismatchError: ranks have different numbers of micro batches.
        """
        return [rows_1K[0].long() for rows_1K in self._infer("next_tokens", micro_batches, temperature=0.0)]

    def hidden_states(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """The hidden states that predict the targets, without gradients: with `lm_head` a teacher's distributions.

        Returns:
            One [K, H] tensor per micro batch, on the CPU, in the model's dtype; K = 0 where a batch has no targets.

        Raises:
            EngineError: the engine has a value head.
            PlanMismatchError: ranks have different numbers of micro batches.
        """
        return [rows_HK.T for rows_HK in self._infer("hidden_states", micro_batches, head_term=HIDDEN)]

    @torch.no_grad()
    def _infer(
        self, method: str, batches: Sequence[TokenBatch], *, head: Head = "lm", adapters: bool = True, **options: Any
    ) -> list[Tensor]:
        """`MicroBatches.infer` for a method of an engine with this head, after the checks of all such methods."""
        self._require_on_device(method)
        self._require_head(head, method)
        if not adapters:
            method = f"{method}(adapters=False)"
            self._require_adapters(method)
        agree_on_plan(method, batches, self.device, sp=self._sp)
        self._set_mode(training=False)
        with nullcontext() if adapters else adapters_off(self.module):
            return self._micro_batches.infer(batches, **options)

    def lm_head(self) -> LmHead:
        """The whole LM head on every rank: a copy at stage 3, the model's own tensors at stages 1 and 2. Collective.

        Raises:
            EngineError: the engine has a value head.
        """
        self._require_on_device("lm_head")
        self._require_head("lm", "lm_head")
        head, soft_cap = lm_head_of(self.module)
        parts = {"weight_VH": head.weight} if head.bias is None else {"weight_VH": head.weight, "bias_V": head.bias}
        if self.zero_stage < 3:
            return LmHead(**{name: part.detach() for name, part in parts.items()}, soft_cap=soft_cap)
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parts.values())):
            # Views are invalid after the context, so copies are made inside it.
            return LmHead(**{name: part.detach().clone() for name, part in parts.items()}, soft_cap=soft_cap)

    def train_mini_batch(
        self,
        micro_batches: Sequence[TokenBatch],
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        head_term: HeadTerm | None = None,
    ) -> StepStats:
        """Take one optimizer step on the sum of the losses of all micro batches of all ranks.

        The gradient is that of the summed loss, independent of the split into micro batches and ranks.

        Args:
            loss_fn: called with the outputs and the batch, both on the device, of each micro batch with targets.
            temperature: divisor of the logits.
            head_term: a term of the loss that needs the LM head's weight (see `HeadTerm`).

        Raises:
            PlanMismatchError: ranks have different numbers of micro batches.
            BatchError: a malformed batch or loss.
            EngineError: the engine was built with trainable=False, or an earlier mini batch failed before its step.
        """
        optimizer = self._require_optimizer("train_mini_batch")
        if self._micro_batches.num_waiting:
            raise EngineError("gradients of accumulate() wait for step()")
        guarded_before = num_guarded()
        num_empty = agree_on_plan("train_mini_batch", micro_batches, self.device, sp=self._sp)
        self._set_mode(training=True)
        lr = learning_rate(self._num_steps, self.config.optim, self._total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        loss_scale = self._loss_scale.value
        label = f"step {self._num_steps}"
        backward_before = self._micro_batches.num_backward
        losses, metrics = self._micro_batches.train(
            micro_batches, loss_fn, temperature, label=label, head_term=head_term
        )
        self._num_steps += 1
        self._loss_scale.after_step()
        num_skipped = len(micro_batches) - (self._micro_batches.num_backward - backward_before)
        loss, totals, num_skipped = sum_over_ranks(losses, metrics, num_skipped, sp=self._sp)
        if num_compared := totals.pop(ROUTES_COMPARED, 0.0):
            totals[ROUTES_DIFFER] /= num_compared
        return StepStats(
            loss=loss,
            metrics=totals,
            grad_norm=float(self._deepspeed.get_global_grad_norm()),
            lr=lr,
            num_micro_batches=len(micro_batches),
            num_empty_micro_batches=num_empty,
            num_skipped_empty_micro_batches=num_skipped,
            step_applied=bool(self._deepspeed.was_step_applied()),
            loss_scale=loss_scale,
            num_guarded_collectives=num_guarded() - guarded_before,
        )

    def accumulate(
        self, micro_batches: Sequence[TokenBatch], loss_fn: LossFn, *, temperature: float = 1.0
    ) -> tuple[float, dict[str, float]]:
        """Add the gradient of the summed losses of all micro batches of all ranks to those that wait for `step`.

        Any number of calls and a `step` give the bits of `train_mini_batch` on their micro batches together.

        Returns:
            The loss and the metrics, summed over micro batches and ranks.

        Raises as `train_mini_batch`; also EngineError for settings that cannot accumulate over calls.
        """
        self._require_optimizer("accumulate")
        self._require_waiting_gradients()
        agree_on_plan("accumulate", micro_batches, self.device, sp=self._sp)
        self._set_mode(training=True)
        label = f"step {self._num_steps}, part {self._micro_batches.num_waiting}"
        losses, metrics = self._micro_batches.train(micro_batches, loss_fn, temperature, label=label, steps=False)
        loss, totals, _ = sum_over_ranks(losses, metrics, 0, sp=self._sp)
        return loss, totals

    def step(self, settings: StepSettings) -> tuple[float, bool]:
        """Take one optimizer step on the gradients that wait, with settings of its own; the schedule is not used.

        Returns:
            The gradient's norm before clipping, and False if it was not finite, so that nothing changed.

        Raises:
            EngineError: no gradients wait, or the optimizer has other settings than AdamW.
        """
        optimizer = self._require_optimizer("step")
        self._require_waiting_gradients()
        if not self._micro_batches.num_waiting:
            raise EngineError("no gradients wait for it", remedy="call accumulate() first")
        for group, is_decayed in zip(optimizer.param_groups, self._decays, strict=True):
            decay = settings.weight_decay if is_decayed else 0.0
            group.update(lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=decay)
        WAITING.replace(self._deepspeed.optimizer, clip_grad=settings.grad_clip)
        self._micro_batches.step()
        self._num_steps += 1
        self._loss_scale.after_step()
        return float(self._deepspeed.get_global_grad_norm()), bool(self._deepspeed.was_step_applied())

    def forget_optimizer(self) -> None:
        """Set the optimizer's states to those of a new one; the weights stay."""
        for state in self._require_optimizer("forget_optimizer").state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def _require_waiting_gradients(self) -> None:
        """Refuse settings with which gradients cannot wait for a step of their own."""
        zero, optim = self.config.zero, self.config.optim
        for field, value, allowed in (
            ("zero.stage", zero.stage, (2, 3)),
            ("zero.step_each_micro", zero.step_each_micro, (False,)),
            ("optim.name", optim.name, ("adamw",)),
        ):
            if value not in allowed:
                problem = "gradients cannot wait for a step of their own"
                raise EngineError(problem, field=field, value=value, allowed=", ".join(map(str, allowed)))
        WAITING.check()

    def compile_ahead(self, num_tokens: int = 0) -> None:
        """Compile what the first log-probs or values and the first step would, on made-up sequences. Collective.

        Nothing changes: the gradient of one weight is computed and thrown away. At stage 3 only the pass without
        gradients is run: in the other, hooks gather weights for the step that follows. Does nothing without
        `config.compile`.

        Args:
            num_tokens: about as many as micro batches have. torch compiles a layer's backward pass once for tensors
                below some 5 million elements, and once more for larger ones. At least two sequences are computed, and
                no more than it takes to get there: servers may start on the same GPU meanwhile.
        """
        if not self.config.compile:
            return
        config: Any = self.module.config
        length = min(_AHEAD_TOKENS, int(getattr(config, "max_position_embeddings", None) or _AHEAD_TOKENS))
        enough = _AHEAD_ELEMENTS // config.get_text_config().hidden_size
        batch = SimpleBatch.pack([([1], [1] * (length - 1))] * max(2, min(num_tokens, enough) // length))
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            self._set_mode(training=False)
            with torch.no_grad():
                self._micro_batches.infer([batch])
            if self._optimizer is not None and self.zero_stage < 3:
                self._set_mode(training=True)
                weight = next(p for p in self.module.parameters() if p.requires_grad)
                self._micro_batches.rehearse(batch, weight)

    # ------------------------------------- export, checkpoints, offload, memory

    @property
    def shares_prefixes(self) -> bool:
        """True if prefixes that the sequences of a micro batch share (`TokenBatch`) are computed once. False for a
        model that is not exact with them (`check_model`): it computes every sequence whole."""
        return self._micro_batches.shares_prefixes

    @property
    def copies_prefixes(self) -> bool:
        """True if attention keeps a copy of the keys and values of a shared prefix for each sequence until the backward
        pass, however long it is. False with FlashAttention-4 without sliding windows, which makes few copies."""
        config: Any = self.module.config
        has_windows = getattr(config.get_text_config(), "sliding_window", None) is not None
        return has_windows or self._micro_batches.kernel != "flash4"

    @property
    def deepspeed(self) -> Any:
        """The engine that `deepspeed.initialize` returned; the model itself at stages 1 and 2 with trainable=False."""
        return self._deepspeed

    def export_parameters(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) on rank 0, nothing on others; every rank must iterate to the end.

        Adapters are merged: base weight + scale * B @ A, computed in fp32.

        Args:
            dtype: dtype of the tensors; None keeps the model's.
        """
        return self._export(whole_tensors(self.module), dtype)

    def whole_tensors(self, *, merged: bool = True) -> list[NamedTensor]:
        """Names, parameters and low-rank updates of what `export_parameters` yields, without gathering them.

        For tools that gather parameters themselves, such as weight_sync. Not collective.

        Args:
            merged: False returns the base weights without the adapters' updates.
        """
        return whole_tensors(self.module, merged=merged)

    def adapter_tensors(self) -> list[NamedTensor]:
        """Names and parameters of the tensors that `export_adapters` yields, without gathering them. Not collective.

        Raises:
            EngineError: the engine has no adapters.
        """
        self._require_adapters("adapter_tensors")
        return adapter_tensors(self.module)

    def export_adapters(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Like `export_parameters`, for the adapters and a value head, with PEFT's names in adapter_model.safetensors.

        Raises:
            EngineError: the engine has no adapters.
        """
        self._require_adapters("export_adapters")
        return self._export(adapter_tensors(self.module), dtype)

    def adapter_config(self) -> dict[str, Any]:
        """Content of PEFT's adapter_config.json. Not collective.

        Raises:
            EngineError: the engine has no adapters.
        """
        self._require_adapters("adapter_config")
        return adapter_settings(self.module)

    def _export(self, tensors: Sequence[NamedTensor], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        return export_tensors(tensors, rank=dist.get_rank(), zero_stage=self.zero_stage, dtype=dtype)

    def save_checkpoint(self, folder: str | Path, tag: str) -> None:
        """Write a DeepSpeed checkpoint to `folder`/`tag`, each rank its shard; with lora only of the adapters.

        Raises:
            EngineError: the engine was built with trainable=False.
            CheckpointError: optimizer states are on NVMe.
        """
        self._require_optimizer("save_checkpoint")
        save_state(self._deepspeed, folder, tag, num_steps=self._num_steps)

    def load_checkpoint(self, folder: str | Path, tag: str) -> None:
        """Resume from the checkpoint `folder`/`tag`, written by the same number of ranks at the same stage.

        Raises:
            CheckpointError: the checkpoint does not exist or does not match this engine.
        """
        self._require_optimizer("load_checkpoint")
        self._num_steps = load_state(self._deepspeed, folder, tag)

    def load_state(self, source: StateSource, *, num_steps: int | None = None) -> None:
        """Resume from a state written by any number of ranks, at any stage, offload and dtype, bit for bit; also from
        one of plain DeepSpeed.

        Every rank reads only its partition of the fp32 weights and of the optimizer's states.

        Args:
            num_steps: number of optimizer steps taken, for the learning-rate schedule; None: that of the source.

        Raises, on every rank and before any change:
            CheckpointError: the source cannot be read or has other parameters or states, or the optimizer's states
                belong to the layout that saved them.
        """
        self._require_optimizer("load_state")
        optim = self.config.optim
        if unportable := optim.optimizer.unportable:
            remedy = "use the number of ranks and the settings that saved it"
            raise CheckpointError(unportable, field="optim.name", value=optim.name, remedy=remedy)
        loaded = fill_state(self._deepspeed, self.module, source, self._states_of)
        self._num_steps = loaded if num_steps is None else num_steps

    def has_layout(self, source: StateSource) -> bool:
        """True if `load_checkpoint` can read the checkpoint of `source`: the same number of ranks, stage, offload,
        dtype and parameter groups. Not collective."""
        self._require_optimizer("has_layout", on_device=False)
        return has_layout(self._deepspeed, source, self._states_of)

    def _states_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the optimizer's states of one of its groups."""
        optim = self.config.optim
        return optim.optimizer.states_of(optim.options, matrices=bool(group.get("matrices")))

    def offload(self, *, include_params: bool = False) -> int:
        """Move optimizer states, fp32 weights and gradient buffers to CPU memory; returns their bytes, 0 on a CPU.

        Until `reload`, training, log-probs and checkpoints raise EngineError, and the weights can be exported only if
        they are still on the device.

        Args:
            include_params: also move the model's weights.
        """
        return self._memory.offload(self.device, include_params=include_params)

    def reload(self) -> int:
        """Move the tensors that `offload` moved back to the device; returns their bytes."""
        return self._memory.reload()

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers; the default process group stays."""
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        if self._deepspeed is not self.module:
            self._deepspeed.destroy()
        if self._sp_group is not None:
            dist.destroy_process_group(self._sp_group.group)

    # ---------------------------------------------------------------- setup

    def _set_mode(self, *, training: bool) -> None:
        """Switch the module only if needed: with hundreds of modules that takes a millisecond of CPU time."""
        if self.module.training != training:
            self.module.train(training)

    def _require_optimizer(self, method: str, *, on_device: bool = True) -> torch.optim.Optimizer:
        if on_device:
            self._require_on_device(method)
        if self._optimizer is None:
            raise EngineError(f"{method} needs an engine built with trainable=True")
        return self._optimizer

    def _require_on_device(self, method: str) -> None:
        if self._memory.is_offloaded:
            raise EngineError(f"{method} needs the tensors that offload() moved to CPU memory: call reload() first")

    def _require_adapters(self, method: str) -> None:
        if not has_adapters(self.module):
            raise EngineError(f"{method} needs an engine built with lora and trainable=True")

    def _require_head(self, head: Head, method: str) -> None:
        if self.head != head:
            raise EngineError(f"{method} needs an engine built with head={head!r}; this one has head={self.head!r}")


def _require_process_group() -> None:
    if not dist.is_initialized():
        raise EngineError("torch.distributed is not initialized: call ds_engine.init_distributed first")
