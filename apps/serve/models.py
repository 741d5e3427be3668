"""The models that clients train, on the ranks; and the weights that the rollout servers hold.

Each has adapters and an optimizer of its own over one base. Requests run one at a time in one thread, those of a model
in their order; `ranks` is the lock of the ranks, because servers may also need older weights while requests wait.
Servers hold one set of `Weights` at a time; with `rollout.max_lora_rank`, the base and any number of adapters by name.
"""

import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from apps.serve.config import ServeConfig
from apps.serve.losses import OWN, batch_of, check_loss, summed_loss, token_losses
from apps.serve.requests import InOrder
from apps.serve.states import Run, Saved, States, load_state
from apps.serve.wire import ForwardBackward, read_data, write_result
from ckpt.reader import CheckpointReader
from ds_engine import EngineConfig, StepSettings
from plinth_base.model_folder import check_model_folder
from rl_runtime import InputError, ModelHandle, TrainBatch
from rl_runtime.app.inputs import vocab_size
from rl_runtime.launch.session import Session
from rl_runtime.rules import check_value
from rl_runtime.training.checkpoints import RunCheckpoints
from weight_sync import HfFolderSource, WeightPusher
from weight_sync.push.server import ServerControl

ROLE = "actor"
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
ADAPTER = "adapter"
"""Folder of the adapters in sampler weights."""
KEPT = 4
"""Unnamed adapters of a model that stay for its sampling clients; the newest."""
BASE = "base"
"""Key of the base model's weights."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights that servers can hold."""

    key: str
    """Equal for equal weights; the name of adapters on the servers."""
    run_id: str | None = None
    """The run whose ranks hold them as long as it takes no step; None: `folder` alone has them."""
    folder: Path | None = None

    def gone(self) -> InputError:
        """The error of a request for weights that nobody has."""
        return InputError(
            "its weights were replaced by those of a later step, and no folder has them",
            field="sampling_session_id",
            remedy="save them by name (save_weights_for_sampler) to sample from them later",
        )


@dataclass(kw_only=True)
class Model:
    """The trained model of a client."""

    run: Run
    session_id: str
    order: InOrder
    handle: ModelHandle = field(init=False)
    """Its place on the ranks, once it has one."""
    version: str = BASE
    """Key of its weights: every step and load gives others."""
    num_steps: int = 0
    """Steps since it was built or loaded."""
    num_waiting: int = 0
    """Batches whose gradients wait for a step."""
    folders: list[Path] = field(default_factory=list)
    """Adapters after steps, the newest last."""


class Models:
    """Builds, trains, saves and loads the models on the ranks, and gives their weights to the servers."""

    def __init__(self, config: ServeConfig, session: Session, *, model_path: Path, states: States) -> None:
        self.config, self.session, self.model_path, self.states = config, session, model_path, states
        self.trained: dict[str, Model] = {}
        """The models that have a place on the ranks, by run."""
        self.ranks = threading.Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        """Runs the requests of models, one after the other."""
        self.max_tokens = config.rollout.max_model_len or 0
        self.serves_adapters = config.rollout.max_lora_rank is not None
        self._vocab_size = vocab_size(model_path)
        self._places = [ModelHandle(session.ranks, f"{ROLE}_{i}", config.batch) for i in range(config.num_models)]
        self._connected: ModelHandle | None = None
        """The one whose engine is connected with the servers."""
        self._num_pushes = self._num_versions = 0

    def engine_of(self, run: Run) -> EngineConfig:
        """The engine that trains a run. Raises InputError for adapters that it cannot have."""
        engine = self.config.engine
        if run.lora is None:
            return engine
        lora = run.lora
        most = self.config.rollout.max_lora_rank or 4096
        check_value(lora, "rank", isinstance(lora["rank"], int) and 1 <= lora["rank"] <= most, f"1 to {most}")
        check_value(lora, "train_mlp", lora["train_attn"] or lora["train_mlp"], "true without train_attn")
        layers = (*(_ATTENTION if lora["train_attn"] else ()), *(_MLP if lora["train_mlp"] else ()))
        modules: Any = "all-linear" if layers == (*_ATTENTION, *_MLP) else layers
        seed = engine.seed if lora.get("seed") is None else int(lora["seed"]) % 2**63
        adapters = replace(self.config.lora, rank=lora["rank"], target_modules=modules)
        return replace(engine, lora=adapters, seed=seed)

    def admit(self, model: Model, has_ended: Callable[[Model], bool]) -> bool:
        """Gives a model a place on the ranks, if need be that of one that has ended; False: there is none."""
        if not self._places and (ended := next(filter(has_ended, self.trained.values()), None)) is not None:
            self.leave(ended)
        if not self._places:
            return False
        model.handle = self._places.pop()
        self.trained[model.run.run_id] = model
        return True

    def leave(self, model: Model) -> None:
        """Takes a model from the ranks; its engine stays until another has the place."""
        if self.trained.pop(model.run.run_id, None) is not None:
            self._places.append(model.handle)

    def build(self, model: Model, start: Saved | None = None, *, optimizer: bool = False) -> None:
        """Builds the model of a run in its place on the ranks; from a saved state if there is one."""
        engine, handle = self.engine_of(model.run), model.handle
        checkpoint = None if start is None else load_state(start)
        with self.ranks:
            if self._connected is handle:  # building ends the connection of the engine before
                self._connected = None
            shares_base = engine.lora is not None and engine.zero.stage < 3
            handle.build(str(self.model_path), engine, total_steps=1, shares_base=shares_base)
            if checkpoint is not None:
                handle.load(str(checkpoint.path / ROLE))
                if not optimizer:
                    handle.forget_optimizer()
        model.num_waiting = model.num_steps = 0
        if start is not None:
            model.version = self._new_key(model)
        self.states.add_run(model.run)

    def forward_backward(self, model: Model, request: ForwardBackward) -> bytes:
        """Log-probs and the summed loss of a batch; unless it is `forward_only`, its gradient waits for a step."""
        options = check_loss(request.loss_fn, request.loss_config)
        data, name = read_data(request.data), request.loss_fn
        batch, handle = batch_of(data, name, vocab_size=self._vocab_size, max_tokens=self.max_tokens), model.handle
        with self.ranks, TrainBatch(batch) as train_batch:
            if request.forward_only:
                log_probs_K = handle.log_probs(train_batch)
                loss = float(token_losses(name, log_probs_K, batch.columns, options).sum())
            else:
                loss_fn = partial(summed_loss, name=name, options=options)
                loss, _, log_probs_K = handle.accumulate(train_batch, loss_fn, column=OWN)
                model.num_waiting += 1
        rows = [row.numpy() for row in batch.split(log_probs_K)]
        return write_result(rows, {"loss:sum": loss, "num_tokens:sum": float(batch.num_tokens)})

    def optim_step(self, model: Model, params: Mapping[str, Any]) -> dict[str, Any]:
        """One step of AdamW with the client's settings. A gradient that is not finite changes nothing."""
        settings = step_settings(params)
        if not model.num_waiting:
            raise InputError("no gradient waits for it", field="optim_step", allowed="after forward_backward")
        with self.ranks:
            grad_norm, applied = model.handle.step(settings)
        model.num_waiting = 0
        model.num_steps += 1
        model.version = self._new_key(model)
        skipped = {} if applied else {"skipped_steps:sum": 1.0}
        return {"metrics": {"grad_norm:mean": grad_norm, **skipped} if np.isfinite(grad_norm) else skipped}

    def save(self, model: Model, saved: Saved) -> None:
        """Writes weights and optimizer; a gradient that waits for a step is no part of them."""
        step = max(CheckpointReader(saved.folder).steps(), default=0) + 1
        trainer = replace(self.config.trainer, background_save=False, keep_checkpoints=1)
        with self.ranks:
            checkpoints = RunCheckpoints(
                saved.folder, trainer, self.session.rank_groups, roles={ROLE: model.handle}, parts={}, config=""
            )
            with checkpoints:
                checkpoints.save(step, {})

    def export(self, model: Model, saved: Saved) -> Weights:
        """Writes the weights, with merged adapters, as a Hugging Face folder; if servers hold adapters, these too."""
        with self.ranks:
            model.handle.export(str(saved.folder), str(self.model_path))
            if self.serves_adapters:
                model.handle.export_adapter(str(saved.folder / ADAPTER))
        return self.weights_in(saved)

    def weights_in(self, saved: Saved) -> Weights:
        """The sampler weights of a folder. Raises InputError for a folder without what the servers hold."""
        check_model_folder(saved.folder)
        folder = saved.folder / ADAPTER if self.serves_adapters else saved.folder
        if not folder.exists():
            problem = "merged weights alone: servers with rollout.max_lora_rank hold adapters"
            raise InputError(problem, field="model_path", value=saved.uri, remedy="rollout.max_lora_rank=null")
        return Weights(key=saved.uri, folder=folder)

    def weights(self, model: Model) -> Weights:
        """The weights that the ranks hold now. Those before the first step stay in a folder: they may be the reference
        of what follows."""
        if model.version == BASE:
            return self.base
        folder = self.states.unnamed_folder(model.run.run_id, model.version)
        if model.num_steps and not self.serves_adapters:
            return Weights(key=model.version, run_id=model.run.run_id)
        if not folder.exists():
            with self.ranks:
                if self.serves_adapters:
                    model.handle.export_adapter(str(folder))
                else:
                    model.handle.export(str(folder), str(self.model_path))
            if model.num_steps:
                model.folders.append(folder)
                for old in model.folders[:-KEPT]:
                    shutil.rmtree(old)
                del model.folders[:-KEPT]
        return Weights(key=model.version, run_id=model.run.run_id, folder=folder)

    def _new_key(self, model: Model) -> str:
        self._num_versions += 1
        return f"{model.run.run_id}:{self._num_versions}"

    @property
    def base(self) -> Weights:
        """The weights of the base model."""
        return Weights(key=BASE, folder=self.model_path)

    def give(self, weights: Weights) -> None:
        """Gives the servers these weights: those of the ranks, or of a folder. No request may run meanwhile.

        Raises InputError for weights that neither has any more.
        """
        with self.ranks:
            self._num_pushes += 1
            endpoints, sync = self.session.servers.endpoints, self.config.sync
            model = self.trained.get(weights.run_id or "")
            if model is not None and weights.key == model.version:
                if self._connected is not model.handle:
                    model.handle.connect_servers(endpoints, sync, version=self._num_pushes)
                    self._connected = model.handle
                model.handle.push_weights(self._num_pushes)
            elif weights.folder is not None:
                if self._connected is not None:
                    self._connected.disconnect_servers()
                    self._connected = None
                with WeightPusher(HfFolderSource(weights.folder), endpoints, sync) as pusher:
                    pusher.push(self._num_pushes)
            else:
                raise weights.gone()
            self.session.client.set_policy_version(self._num_pushes)

    def load_adapter(self, weights: Weights) -> None:
        """Lets the servers read adapters from their folder."""
        for endpoint in self.session.servers.endpoints:
            control = ServerControl(endpoint.url, endpoint.api_key, self.config.sync.timeout_s)
            control.register_adapter(weights.key, str(weights.folder))


def step_settings(params: Mapping[str, Any]) -> StepSettings:
    """AdamW's settings of one step, as the SDK names them. Raises EngineConfigError for a value out of range."""
    names = {"learning_rate": "lr", "eps": "eps", "weight_decay": "weight_decay", "grad_clip_norm": "grad_clip"}
    unknown = params.keys() - names.keys() - {"beta1", "beta2", "type"}
    if unknown or params.get("type", "adamw") != "adamw":
        raise InputError("this server steps with AdamW", field="optim_params", value=dict(params), allowed="AdamParams")
    values = {own: float(params[name]) for name, own in names.items() if name in params}
    betas = (float(params.get("beta1", 0.9)), float(params.get("beta2", 0.95)))
    return StepSettings(**{"lr": 1e-4, "eps": 1e-12, **values}, betas=betas)


def lora_of(config: ServeConfig, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The adapters that a client gets; None: all weights are trained."""
    if config.api.full or given is None:
        return None
    return {"train_mlp": True, "train_attn": True, "seed": None, **given, "train_unembed": False}


def describe_lora(run: Run) -> dict[str, Any]:
    """Adapters as the SDK's answers name them."""
    return {"is_lora": run.lora is not None, "lora_rank": (run.lora or {}).get("rank")}
