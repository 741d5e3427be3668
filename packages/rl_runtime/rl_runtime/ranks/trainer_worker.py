"""One trainer rank: holds a ZeRO engine per role and pushes weights to the rollout servers.

A plain class that tests use without Ray; `WorkerGroup` runs it as a Ray actor.
"""

import gc
import importlib
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
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
    open_deepspeed,
    rank_file,
    restore_rng,
    save_adapter,
    save_hf_folder,
)
from ds_engine import (
    EngineConfig,
    Head,
    HeadTerm,
    LossFn,
    LossOutput,
    SharedBase,
    StepSettings,
    TokenOutputs,
    ZeroEngine,
    init_distributed,
)
from ds_engine.distributed import import_deepspeed
from ds_engine.model.attention import choose_kernel
from ds_engine.model.trial import TRIALS, Trial
from ds_engine.model.weights import read_config
from rl_core import Batch, PrefixOrder, linear_log_prob
from rollout_vllm.servers.exact import operations
from weight_sync import Adapter, Endpoint, SyncConfig, SyncReport, WeightPusher, ZeroSource

from .heartbeat import Heartbeat, Receiver

_RNG = "rng"

ModelDescription = dict[str, dict[str, Any]]
"""Shape and dtype by parameter name, JSON-able; see `ckpt.describe_model`."""
Compute = Callable[[ZeroEngine, Sequence[Batch]], list[torch.Tensor]]
"""(engine, micro batches of a rank) -> one value per target of each micro batch, [K]."""


def _with_own_log_probs(
    outputs: TokenOutputs, batch: Batch, *, loss_fn: LossFn, column: str, kept: list[torch.Tensor]
) -> LossOutput:
    """The loss of a micro batch whose `column` is its own log-probs, which are added to `kept`."""
    own_K = outputs.log_probs_K.detach()
    kept.append(own_K)
    batch.add_columns(**{column: own_K})
    return loss_fn(outputs, batch)


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """The sequences of a train batch that one rank computes, mini batch after mini batch."""

    batch: Batch
    sizes: list[list[int]]
    """[mini batch][micro batch] -> number of sequences."""
    prefixes: PrefixOrder | None
    """Prefixes that the sequences share, if they are computed once."""

    @classmethod
    def of(cls, batch: Batch, plan: Sequence[Sequence[Sequence[int]]], prefixes: PrefixOrder | None) -> "RankPart":
        """Those of `plan`, [mini batch][micro batch] -> sequences of `batch`."""
        chosen = [i for mini in plan for micro in mini for i in micro]
        sizes = [[len(micro) for micro in mini] for mini in plan]
        order = None if prefixes is None else prefixes.select(chosen)
        return cls(batch=batch.select(chosen), sizes=sizes, prefixes=order)

    def micro_batches(self) -> list[list[Batch]]:
        """[mini batch][micro batch]."""
        numbers = iter(range(self.batch.num_sequences))
        return [[self._micro_batch(list(islice(numbers, size))) for size in mini] for mini in self.sizes]

    def _micro_batch(self, sequences: list[int]) -> Batch:
        micro = self.batch.select(sequences)
        return micro if self.prefixes is None else micro.with_prefixes(self.prefixes.select(sequences))


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
        self._base = SharedBase()
        self._batches: dict[int, list[list[Batch]]] = {}
        self._saver: AsyncSaver | None = None
        self._captures: dict[str, DeepSpeedState] = {}
        self._pusher: WeightPusher | None = None
        self._pushed_role = ""
        if heartbeats is not None:
            Heartbeat(heartbeats, rank)

    def warm_up(self, model_path: str) -> None:
        """Imports and initializes what every engine of this model needs; nothing that a later call returns changes."""
        try:
            if self.device.type == "cuda":
                ones = torch.ones(16, 16, device=self.device)
                (ones @ ones).sum().item()
                importlib.import_module("torch._inductor.compile_fx")  # with dynamo
                choose_kernel("auto", device_type="cuda", dtype=torch.bfloat16)  # imports FlashAttention
            import_deepspeed(self.device)
            importlib.import_module("transformers.modeling_utils")
            read_config(model_path)  # imports what belongs to this kind of model
        except Exception as error:  # the engine meets it again, and says what it means
            logging.getLogger(__name__).info("the rank is not warmed up: %r", error)

    def reserve_port(self, address: str) -> int:
        """A free port for the process group at this address of rank 0's host; 0 on the other ranks."""
        if self.rank != 0:
            return 0
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as probe:
            return int(probe.getsockname()[1])

    def connect(self, address: str, port: int, trials: Mapping[Any, Trial] = MappingProxyType({})) -> None:
        """Joins the process group. `trials`: `TRIALS` of a process that has tried models with the same libraries."""
        TRIALS.update(trials)
        init_distributed(
            rank=self.rank, world_size=self.world_size, master_addr=address, master_port=port, device=self.device
        )

    def build(
        self,
        role: str,
        model_path: str,
        config: EngineConfig,
        total_steps: int | None,
        head: Head = "lm",
        shares_base: bool = False,
        ahead_tokens: int = 0,
    ) -> tuple[float, float]:
        """Builds or rebuilds the engine of `role` from a Hugging Face folder; `total_steps=None`: frozen.

        `shares_base`: its frozen weights are those of the other engines that share them (`ds_engine.SharedBase`).
        `ahead_tokens`: tokens of micro batches, for `ZeroEngine.compile_ahead`.

        Returns:
            Seconds to build it, and to compile its layers.
        """
        begin = time.perf_counter()
        self.drop(role)
        self._engines[role] = ZeroEngine.from_pretrained(
            model_path,
            config,
            log_prob_fn=linear_log_prob,
            device=self.device,
            total_steps=total_steps,
            trainable=total_steps is not None,
            head=head,
            operations=operations if config.match_servers else None,
            base=self._base if shares_base else None,
        )
        built = time.perf_counter()
        try:
            self._engines[role].compile_ahead(ahead_tokens)  # while the servers start
        except Exception as error:  # the first step compiles then, and reports what is really wrong
            logging.getLogger(__name__).warning("the layers of %s are not compiled ahead: %r", role, error)
        return built - begin, time.perf_counter() - built

    def drop(self, role: str) -> None:
        """Frees the engine of `role`, if there is one."""
        engine = self._engines.pop(role, None)
        self._captures.pop(role, None)
        if engine is None:
            return
        if self._pushed_role == role:
            self.disconnect_servers()
        engine.close()
        del engine
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def shares_prefixes(self) -> bool:
        """True if all models of this rank compute shared prefixes once; they share the rank's copy of a batch."""
        return all(engine.shares_prefixes for engine in self._engines.values())

    def copies_prefixes(self) -> bool:
        """True if a model of this rank keeps copies of a shared prefix (`ZeroEngine.copies_prefixes`)."""
        return any(engine.copies_prefixes for engine in self._engines.values())

    def hold_batch(self, part: RankPart, number: int) -> list[int]:
        """Packs this rank's micro batches and keeps them until `drop_batch`; the tokens it computes by mini batch."""
        minis = self._batches[number] = part.micro_batches()
        return [sum(micro.num_computed_tokens for micro in mini) for mini in minis]

    def drop_batch(self, number: int) -> None:
        """Frees a train batch."""
        self._batches.pop(number, None)

    def compute(
        self, number: int, role: str, function: Compute, mini_batches: Sequence[int], keep_as: str | None = None
    ) -> torch.Tensor:
        """`function(engine, micro batches)` without gradients: this rank's values for some mini batches, [K_r].

        Args:
            function: returns [K] or [K, ...] for each micro batch.
            keep_as: the column under which the values stay on this rank; nothing is returned then.
        """
        micro_batches = [micro for mini in mini_batches for micro in self._batches[number][mini]]
        with record_function(f"{role}: {getattr(function, 'func', function).__name__}"):
            values = function(self._engines[role], micro_batches)
        if keep_as is None:
            return torch.cat(values)
        for micro, values_K in zip(micro_batches, values, strict=True):
            micro.add_columns(**{keep_as: values_K})
        return torch.zeros(0)

    def train(
        self,
        columns: Mapping[str, torch.Tensor],
        number: int,
        role: str,
        mini_batch: int,
        loss_fn: LossFn,
        temperature: float,
        head_term: HeadTerm | None = None,
        teacher: str | None = None,
        own_log_probs: str | None = None,
        steps: bool = True,
    ) -> tuple[Any, torch.Tensor]:
        """One optimizer step on this rank's part of a mini batch.

        Args:
            columns: the columns that this rank lacks, [K_r] each of the mini batch.
            head_term: a term of the loss that needs the LM head's weight (`ds_engine.HeadTerm`).
            teacher: role of a frozen engine whose LM head the term gets as `teacher_head`.
            own_log_probs: the column under which the loss gets the log-probs of its own forward pass, detached.
            steps: False leaves the step to `step`; the loss and the metrics are returned then.

        Returns:
            `StepStats`, and with `own_log_probs` these log-probs, [K_r].
        """
        micro_batches, engine = self._with_columns(columns, number, mini_batch), self._engines[role]
        if teacher is not None and head_term is not None:
            head_term = partial(head_term, teacher_head=self._engines[teacher].lm_head())
        if steps and self._saver is not None:
            self._saver.wait_copied()
        kept = [torch.zeros(0)]
        if own_log_probs is not None:
            loss_fn = partial(_with_own_log_probs, loss_fn=loss_fn, column=own_log_probs, kept=kept)
        with record_function(f"{role}: train"):
            if steps:
                result: Any = engine.train_mini_batch(
                    micro_batches, loss_fn, temperature=temperature, head_term=head_term
                )
            else:
                result = engine.accumulate(micro_batches, loss_fn, temperature=temperature)
        return result, torch.cat([part_K.cpu() for part_K in kept])

    def step(self, role: str, settings: StepSettings) -> tuple[float, bool]:
        """The optimizer step on the gradients that `train` accumulated; see `ZeroEngine.step`."""
        if self._saver is not None:
            self._saver.wait_copied()
        return self._engines[role].step(settings)

    def forget_optimizer(self, role: str) -> None:
        """Sets the optimizer's states to those of a new one."""
        self._engines[role].forget_optimizer()

    def _with_columns(self, columns: Mapping[str, torch.Tensor], number: int, mini_batch: int) -> list[Batch]:
        """The micro batches of a mini batch, with the columns that this rank lacked, [K_r] each."""
        micro_batches = self._batches[number][mini_batch]
        lens = [micro.num_targets for micro in micro_batches]
        parts = {name: column_Kr.split(lens) for name, column_Kr in columns.items()}
        for index, micro in enumerate(micro_batches):
            micro.add_columns(**{name: part[index] for name, part in parts.items()})
        return micro_batches

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
        self.disconnect_servers()
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

    def disconnect_servers(self) -> None:
        """Ends the connection to the servers, if there is one."""
        if self._pusher is not None:
            self._pusher.close()
            self._pusher = None

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

    def export_adapter(self, role: str, folder: str) -> None:
        """Writes the LoRA adapters as a PEFT folder; rank 0 writes, all ranks gather."""
        engine = self._engines[role]
        tensors = engine.export_adapters()
        if self.rank == 0:
            save_adapter(Path(folder), tensors, engine.adapter_config(), overwrite=True)
        else:
            for _ in tensors:
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

    def save(self, step: int, roles: Mapping[str, str]) -> None:
        """Saves this rank's part of the engines and its random generators in the background.

        `roles`: the engine of each name in the checkpoint.

        The next `train` waits until everything is copied; no call before it changes the weights.
        """
        assert self._saver is not None, "call open_saver first"
        for name, role in roles.items():
            if role not in self._captures:
                engine = self._engines[role]
                self._captures[role] = DeepSpeedState(engine.deepspeed, partial(engine.save_checkpoint, tag=name))
        states = {**{name: self._captures[role] for name, role in roles.items()}, _RNG: capture_rng()}
        self._saver.save(step, states, copy_in_background=True)

    def close_saver(self) -> None:
        """Waits for the save in progress."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def describe(self, role: str) -> ModelDescription:
        """Names, full shapes and dtypes of the parameters of `role`, without gathering them."""
        return describe_model(self._engines[role].module)

    def load(self, role: str, folder: str, tag: str) -> None:
        """Loads a checkpoint written by any number of ranks, ZeRO stage and offload into the engine of `role`."""
        engine = self._engines[role]
        source = ZeroCheckpoint(Path(folder), tag=tag)
        if engine.has_layout(source):
            with loading_without_pickle(engine.deepspeed):
                engine.load_checkpoint(folder, tag=tag)
        else:
            engine.load_state(source)

    def start_from(self, role: str, folder: str) -> None:
        """Gives the engine of `role` the weights and optimizer states of a DeepSpeed checkpoint that any program wrote.
        The learning-rate schedule starts at its beginning."""
        self._engines[role].load_state(open_deepspeed(Path(folder)), num_steps=0)

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
            moved += engine.offload(include_params=role != pushed_role)
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        return moved

    def claim_memory(self) -> int:
        """Moves back what `free_memory` moved; returns the bytes."""
        return sum(engine.reload() for engine in self._engines.values())

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
