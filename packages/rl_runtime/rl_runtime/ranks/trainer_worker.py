"""One trainer rank: holds a ZeRO engine per role and pushes weights to the rollout servers.

A plain class that tests use without Ray; `WorkerGroup` runs it as a Ray actor.
"""

import gc
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from ckpt import (
    AsyncSaver,
    CheckpointManager,
    DeepSpeedState,
    HostCheckpoints,
    RemoteCheckpoints,
    SaverRanks,
    ZeroCheckpoint,
    capture_rng,
    describe_model,
    load_state_dict,
    loading_without_pickle,
    rank_file,
    restore_rng,
    save_hf_folder,
)
from ds_engine import EngineConfig, Head, LossFn, LossOutput, StepStats, TokenOutputs, ZeroEngine, init_distributed
from rl_core import PackedBatch, linear_log_prob
from weight_sync import Adapter, Endpoint, SyncConfig, SyncReport, WeightPusher, ZeroSource

from .heartbeat import Heartbeat, Receiver
from .loss_spec import LossSpec

_RNG = "rng"

ModelDescription = dict[str, dict[str, Any]]
"""Shape and dtype by parameter name, JSON-able; see `ckpt.describe_model`."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """A reference to a train batch, with the parts of it that the rank does not have yet."""

    batch: int
    """The batch's number."""
    mini_batches: list[list[PackedBatch]] | None = None
    """[mini batch][micro batch] of this rank; None once the rank has them."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Per-token columns by name, float32 [K_r] in the order of the rank's micro batches."""


def _with_own_log_probs(
    outputs: TokenOutputs, batch: PackedBatch, *, loss_fn: LossFn, column: str, kept: list[torch.Tensor]
) -> LossOutput:
    """The loss of a micro batch whose `column` is its own log-probs, which are added to `kept`."""
    kept.append(outputs.log_probs_K.detach())
    return loss_fn(outputs, batch.with_columns(**{column: kept[-1]}))


class RankProfiler:
    """torch's profiler, started and stopped by separate calls."""

    def start_profile(self) -> None:
        """Starts to record operators and, with a GPU, CUDA kernels."""
        self._profile = profile()
        self._profile.start()

    def stop_profile(self, path: str) -> None:
        """Stops and writes a Chrome trace, gzipped if the name ends in .gz."""
        self._profile.stop()
        self._profile.export_chrome_trace(path)
        del self._profile


class TrainerWorker(RankProfiler):
    """Rank `rank` of `world_size`. Methods that train, gather or save are collective: call them on all ranks."""

    def __init__(
        self, rank: int, world_size: int, *, device: str, num_threads: int, heartbeats: Receiver | None = None
    ) -> None:
        """`heartbeats`: where this process sends heartbeats, see `Heartbeats`."""
        torch.set_num_threads(num_threads)
        self.rank, self.world_size = rank, world_size
        # CUDA_VISIBLE_DEVICES shows a rank only its own GPU.
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self._engines: dict[str, ZeroEngine] = {}
        self._batches: dict[int, list[list[PackedBatch]]] = {}
        self._saver: AsyncSaver | None = None
        self._captures: dict[str, DeepSpeedState] = {}
        self._pusher: WeightPusher | None = None
        self._pushed_role = ""
        if heartbeats is not None:
            Heartbeat(heartbeats, rank)

    def reserve_port(self, address: str) -> int:
        """A free port for the process group at this address of rank 0's host; called on rank 0."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as probe:
            return int(probe.getsockname()[1])

    def connect(self, address: str, port: int) -> None:
        """Joins the process group."""
        init_distributed(
            rank=self.rank, world_size=self.world_size, master_addr=address, master_port=port, device=self.device
        )

    def build(
        self, role: str, model_path: str, config: EngineConfig, total_steps: int | None, head: Head = "lm"
    ) -> None:
        """Builds or rebuilds the engine of `role` from a Hugging Face folder; `total_steps=None`: frozen."""
        self.drop(role)
        self._engines[role] = ZeroEngine.from_pretrained(
            model_path,
            config,
            log_prob_fn=linear_log_prob,
            device=self.device,
            total_steps=total_steps,
            trainable=total_steps is not None,
            head=head,
        )
        try:
            self._engines[role].compile_ahead()  # while the servers start
        except Exception as error:  # the first step compiles then, and reports what is really wrong
            logging.getLogger(__name__).warning("the layers of %s are not compiled ahead: %r", role, error)

    def drop(self, role: str) -> None:
        """Frees the engine of `role`, if there is one."""
        engine = self._engines.pop(role, None)
        self._captures.pop(role, None)
        if engine is None:
            return
        if self._pusher is not None and self._pushed_role == role:
            self._pusher.close()
            self._pusher = None
        engine.close()
        del engine
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def log_probs(
        self,
        delivery: Delivery,
        role: str,
        temperature: float,
        column: str | None = None,
        adapters: bool = True,
        first: int = 0,
    ) -> TokenOutputs:
        """Log-probs and entropies of this rank's part of a train batch, [K_r] each, without gradients.

        Args:
            column: the name under which this rank keeps the log-probs with the batch, for the updates.
            adapters: False computes without the LoRA adapters.
            first: the mini batch to begin with.
        """
        micro_batches = list(chain.from_iterable(self._receive(delivery)[first:]))
        with record_function(f"{role}: log_probs" if adapters else f"{role}: log_probs without adapters"):
            outputs = self._engines[role].log_probs(micro_batches, temperature=temperature, adapters=adapters)
        log_probs_Kr = torch.cat([output.log_probs_K for output in outputs])
        if column is not None:
            mini_batches = range(first, len(self._batches[delivery.batch]))
            self._add_columns(delivery.batch, {column: log_probs_Kr}, mini_batches)
        return TokenOutputs(log_probs_K=log_probs_Kr, entropy_K=torch.cat([output.entropy_K for output in outputs]))

    def values(self, delivery: Delivery, role: str, column: str | None = None) -> torch.Tensor:
        """A critic's values of this rank's part of a train batch, float32 [K_r], without gradients."""
        micro_batches = list(chain.from_iterable(self._receive(delivery)))
        with record_function(f"{role}: values"):
            values_Kr = torch.cat(self._engines[role].values(micro_batches))
        if column is not None:
            self._add_columns(delivery.batch, {column: values_Kr})
        return values_Kr

    def next_tokens(self, delivery: Delivery, role: str) -> torch.Tensor:
        """The most likely token in the place of each target of this rank's part of a train batch, int64 [K_r]."""
        micro_batches = list(chain.from_iterable(self._receive(delivery)))
        with record_function(f"{role}: next_tokens"):
            return torch.cat(self._engines[role].next_tokens(micro_batches))

    def keep_hidden_states(self, delivery: Delivery, role: str, column: str) -> None:
        """Keeps the hidden states that predict this rank's targets with the train batch, as `column` [K_r, H]."""
        micro_batches = list(chain.from_iterable(self._receive(delivery)))
        with record_function(f"{role}: hidden_states"):
            self._add_columns(delivery.batch, {column: torch.cat(self._engines[role].hidden_states(micro_batches))})

    def train(
        self,
        delivery: Delivery,
        role: str,
        mini_batch: int,
        loss: LossSpec,
        temperature: float,
        head_term: LossSpec | None = None,
        teacher: str | None = None,
        own_log_probs: str | None = None,
    ) -> tuple[StepStats, torch.Tensor | None]:
        """One optimizer step on this rank's part of a mini batch; returns its statistics and the kept log-probs, [K_r].

        Args:
            head_term: a term of the loss that needs the LM head's weight (`ds_engine.HeadTerm`).
            teacher: role of a frozen engine whose LM head the term gets as `teacher_head`.
            own_log_probs: the column under which the loss gets the log-probs of its own forward pass, detached, and
                this rank keeps them with the batch; None: nothing is kept.
        """
        micro_batches = self._receive(delivery)[mini_batch]
        term: Any = None if head_term is None else head_term.load()
        if teacher is not None:
            term = partial(term, teacher_head=self._engines[teacher].lm_head())
        if self._saver is not None:
            self._saver.wait_copied()
        loss_fn, kept = loss.load(), [torch.zeros(0)]
        if own_log_probs is not None:
            loss_fn = partial(_with_own_log_probs, loss_fn=loss_fn, column=own_log_probs, kept=kept)
        with record_function(f"{role}: train"):
            stats = self._engines[role].train_mini_batch(
                micro_batches, loss_fn, temperature=temperature, head_term=term
            )
        if own_log_probs is None:
            return stats, None
        log_probs_Kr = torch.cat([part_K.cpu() for part_K in kept])
        self._add_columns(delivery.batch, {own_log_probs: log_probs_Kr}, [mini_batch])
        return stats, log_probs_Kr

    def drop_batch(self, batch: int) -> None:
        """Frees a train batch."""
        self._batches.pop(batch, None)

    def _receive(self, delivery: Delivery) -> list[list[PackedBatch]]:
        """The train batch of a delivery, [mini batch][micro batch], after adding what the delivery contains."""
        if delivery.mini_batches is not None:
            self._batches[delivery.batch] = delivery.mini_batches
        self._add_columns(delivery.batch, delivery.columns)
        return self._batches[delivery.batch]

    def _add_columns(
        self, batch: int, columns: Mapping[str, torch.Tensor], mini_batches: Sequence[int] | None = None
    ) -> None:
        """Adds columns, [K_r] each, to the micro batches of some mini batches (None: all) of a train batch."""
        if not columns:
            return
        minis = self._batches[batch]
        chosen = range(len(minis)) if mini_batches is None else mini_batches
        lens = [micro.num_targets for index in chosen for micro in minis[index]]
        parts = {name: iter(column_Kr.split(lens)) for name, column_Kr in columns.items()}
        for index in chosen:
            minis[index] = [
                micro.with_columns(**{name: next(part) for name, part in parts.items()}) for micro in minis[index]
            ]

    def connect_servers(
        self,
        role: str,
        endpoints: Sequence[Endpoint],
        config: SyncConfig,
        adapter: str | None,
        version: int,
        base: bool,
    ) -> None:
        """Prepares to push the weights of `role` to the rollout servers.

        LoRA adapters are merged into the pushed weights. With `adapter`, `push_weights` pushes the adapters alone, and
        the servers serve them under that name. `version`: that of the adapters that they serve until then. `base`: the
        frozen base is pushed once, now; not to servers that rounded the folder's.
        """
        if self._pusher is not None:
            self._pusher.close()
            self._pusher = None
        self._pushed_role = role
        engine = self._engines[role]
        pusher = partial(WeightPusher, endpoints=endpoints, config=config, rank=self.rank, device=self.device)
        if adapter is None:
            self._pusher = pusher(ZeroSource(engine.whole_tensors()))
            return
        if base:
            with pusher(ZeroSource(engine.whole_tensors(merged=False))) as once:
                once.push(version)
        served_as = Adapter(name=adapter, settings=engine.adapter_config())
        self._pusher = pusher(ZeroSource(engine.adapter_tensors()), adapter=served_as)

    def push_weights(self, version: int) -> SyncReport:
        """Sends the current weights to every server as policy `version`."""
        assert self._pusher is not None, "call connect_servers first"
        with record_function("push_weights"):
            return self._pusher.push(version)

    def export(self, role: str, folder: str, model_files_from: str, *, overwrite: bool = False) -> None:
        """Writes the weights as a Hugging Face folder; rank 0 writes, all ranks gather.

        A model with a value head becomes a sequence classifier with one label, whose score is unbounded.
        """
        engine = self._engines[role]
        parameters = engine.export_parameters()
        if self.rank == 0:
            changes = classifier_config(engine.module) if engine.head == "value" else None
            source = Path(model_files_from)
            save_hf_folder(
                Path(folder), parameters, model_files_from=source, config_changes=changes, overwrite=overwrite
            )
        else:
            for _ in parameters:
                pass

    def open_saver(self, folder: str, run_id: str, first: int, num_ranks: int, url: str | None = None) -> None:
        """Prepares `save` into the checkpoints of `folder`, which the driver publishes.

        Args:
            run_id: identifies this run among those that write to the folder.
            first: number of this group's first rank among the `num_ranks` ranks of all groups.
            url: where the driver publishes them, for hosts that share no folder; None: in `folder`.
        """
        ranks = SaverRanks(num_ranks=num_ranks, rank=first + self.rank, run_id=run_id, publisher=None)
        here = Path(folder)
        store = CheckpointManager(here) if url is None else HostCheckpoints(here, RemoteCheckpoints(url))
        self._saver = AsyncSaver(store, ranks=ranks)

    def save(self, step: int, roles: Sequence[str]) -> None:
        """Saves this rank's part of the engines and its random generators in the background.

        The next `train` waits until everything is copied; no call before it changes the weights.
        """
        assert self._saver is not None, "call open_saver first"
        for role in roles:
            if role not in self._captures:
                engine = self._engines[role]
                self._captures[role] = DeepSpeedState(engine.deepspeed, partial(engine.save_checkpoint, tag=role))
        states = {**{role: self._captures[role] for role in roles}, _RNG: capture_rng()}
        self._saver.save(step, states, copy_in_background=True)

    def close_saver(self) -> None:
        """Waits for the save in progress."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def describe(self, role: str) -> ModelDescription:
        """Names, full shapes and dtypes of the parameters of `role`, without gathering them."""
        return describe_model(self._engines[role].module)

    def load(self, role: str, folder: str) -> None:
        """Loads a checkpoint written by any number of ranks, ZeRO stage and offload into the engine of `role`."""
        engine = self._engines[role]
        source = ZeroCheckpoint(Path(folder), tag=role)
        if engine.has_layout(source):
            with loading_without_pickle(engine.deepspeed):
                engine.load_checkpoint(folder, tag=role)
        else:
            engine.load_state(source)

    def load_rng(self, folder: str, first: int) -> None:
        """Loads the states of this rank's random generators, if the checkpoint has this rank.

        `first` is the number of this group's first rank in a checkpoint.
        """
        rank = first + self.rank
        names = [rank_file(_RNG, rank), *([f"{_RNG}.safetensors"] if rank == 0 else [])]
        for path in (Path(folder) / name for name in names):
            if path.exists():
                restore_rng(load_state_dict(path))

    def free_memory(self, pushed_role: str, moves_states: bool) -> int:
        """Frees device memory for the rollout servers; returns the bytes moved to host memory.

        The weights of `pushed_role` stay, so that they can be pushed. Until `claim_memory` no engine can compute.

        Args:
            moves_states: moves optimizer states, fp32 weights, gradients that are allocated, and the weights of the
                other roles; False frees only what torch's allocator keeps for reuse.
        """
        if self._saver is not None:
            self._saver.wait_copied()  # a save in the background reads the states
        moved = 0
        for role, engine in self._engines.items() if moves_states else ():
            moved += engine.offload(include_params=role != pushed_role).moved_bytes
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        return moved

    def claim_memory(self) -> int:
        """Moves back what `free_memory` moved; returns the bytes."""
        return sum(engine.reload().moved_bytes for engine in self._engines.values())

    def memory_gb(self) -> dict[str, float]:
        """Peak reserved and allocated device memory since the last call, in GB (1e9 bytes); zeros on the CPU."""
        reserved = allocated = 0
        if self.device.type == "cuda":
            reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        return {"max_memory_reserved_gb": reserved / 1e9, "max_memory_allocated_gb": allocated / 1e9}


def classifier_config(module: Any) -> dict[str, Any]:
    """The entries of config.json of a model with a value head that differ from those of the causal language model.

    transformers scores the last token that is not `pad_token_id`. If that is an end-of-sequence token, the score would
    be that of the token before it; so there is none then, and transformers refuses batches instead.
    """
    config = module.config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return {
        "architectures": [type(module).__name__],
        "num_labels": 1,
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
        "problem_type": "regression",  # vLLM applies no activation
        "pad_token_id": None if config.pad_token_id in ends else config.pad_token_id,
    }
