"""The service behind the routes: sessions, and what each request does.

Answers of quick requests are dictionaries of the SDK's fields. The others get the id of a future at once, run later,
those of one model in order, and give a `Result`.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from apps.serve.config import ServeConfig
from apps.serve.models import Model, Models, Weights, describe_lora, lora_of
from apps.serve.requests import InOrder, Requests, Result, run_into
from apps.serve.sampling import MAX_SAMPLES, Sampler, SamplingSession, ServedAdapters, ServedWeights
from apps.serve.states import Kind, Run, Saved
from apps.serve.wire import ForwardBackward
from plinth_base.errors import PlinthError
from rl_runtime import InputError, RankError
from rl_runtime.rules import check_value
from rollout_vllm.errors import RolloutError
from weight_sync import WeightSyncError

T = TypeVar("T")
Body = Mapping[str, Any]
_WAIT_S = 300.0
"""Longest wait of a new model for the end of the session whose model the ranks train."""


@dataclass(kw_only=True)
class Session:
    """A client's session."""

    session_id: str
    seen_s: float = field(default_factory=time.monotonic)
    """Time of its last heartbeat."""
    is_finished: bool = False


class NotFoundError(PlinthError):
    """A session, model or sampler of this id is unknown, such as one of a server that ran before."""


class Service:
    """All requests of the API. Its methods are called in one event loop."""

    def __init__(self, config: ServeConfig, models: Models, *, fail: Callable[[BaseException], None]) -> None:
        """`fail`: called with an error after which the ranks cannot go on."""
        self.config, self.models, self._fail = config, models, fail
        self.requests = Requests(max_pending=config.api.max_pending)
        self.model_name = config.api.model_name or config.model.path
        self._loop = asyncio.get_running_loop()
        self._served = ServedAdapters(models) if models.serves_adapters else ServedWeights(models)
        self._sampler = Sampler(models, self._served)
        self._sessions: dict[str, Session] = {}
        self._samplers: dict[str, SamplingSession] = {}
        self._published: dict[str, Weights] = {}
        """The newest weights that a run gave to its in-flight samplers."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    # ---- sessions ------------------------------------------------------------------------------------------------
    def create_session(self, _: Body) -> dict[str, Any]:
        session = Session(session_id=f"s-{uuid.uuid4().hex}")
        self._sessions[session.session_id] = session
        trained = "all weights are trained: the rank of a client is not used"
        note = trained if self.config.api.full else "adapters are on attention and MLP layers, none on the unembedding"
        return {"type": "create_session", "session_id": session.session_id, "info_message": f"plinth serve: {note}"}

    def heartbeat(self, body: Body) -> dict[str, Any]:
        self._session(body).seen_s = time.monotonic()
        return {"type": "session_heartbeat"}

    def finish(self, _: Body, session_id: str) -> dict[str, Any]:
        self._session({"session_id": session_id}).is_finished = True
        return {}

    def _session(self, body: Body) -> Session:
        session = self._sessions.get(str(body.get("session_id")))
        if session is None:
            raise NotFoundError("unknown", field="session_id", value=body.get("session_id"))
        return session

    def _has_ended(self, model: Model) -> bool:
        session = self._sessions[model.session_id]
        return session.is_finished or time.monotonic() - session.seen_s > self.config.api.session_timeout_s

    # ---- models --------------------------------------------------------------------------------------------------
    def create_model(self, body: Body) -> dict[str, Any]:
        """A new model; if all places on the ranks are taken, it waits until the session of another has ended."""
        self._check_base(body.get("base_model"))
        check_optimizer(body.get("optimizer_config"))
        return self._open_model(body, lora_of(self.config, body.get("lora_config")))

    def load_weights(self, body: Body) -> dict[str, Any]:
        """A new model from a saved state."""
        if body.get("model_id") is not None:
            return self._in_order(body, "load_state", lambda model: self._load_into(model, body))
        if body.get("base_model") is not None:
            self._check_base(body["base_model"])
        check_optimizer(body.get("optimizer_config"))
        saved, lora = self._state(body)
        return self._open_model(body, lora, saved)

    def _load_into(self, model: Model, body: Body) -> dict[str, Any]:
        saved, lora = self._state(body)
        fits = lora == model.run.lora
        check_value({"path": saved.uri}, "path", fits, f"a state with the adapters of the model, {model.run.lora}")
        self.models.build(model, saved, optimizer=bool(body.get("optimizer")))
        return {"path": saved.uri, "type": "load_weights"}

    def _state(self, body: Body) -> tuple[Saved, dict[str, Any] | None]:
        """A saved state and its adapters."""
        saved = self.models.states.find(str(body.get("path")), "weights")
        return saved, self.models.states.run(saved.run_id).lora

    def _open_model(self, body: Body, lora: dict[str, Any] | None, start: Saved | None = None) -> dict[str, Any]:
        session = self._session(body)
        run = Run(
            run_id=f"{session.session_id}:train:{int(body['model_seq_id'])}",
            base_model=self.model_name,
            lora=lora,
            user_metadata=dict(body.get("user_metadata") or {}),
        )
        self.models.engine_of(run)  # refuses adapters that it cannot have
        request_id = f"{run.run_id}:create"
        future = self.requests.open(request_id)
        if future is not None:
            model = Model(run=run, session_id=session.session_id, order=InOrder(self.models.thread.submit, 1))
            self._start(request_id, self._build(future, model, start, bool(body.get("optimizer"))))
        return {"request_id": request_id, "model_id": run.run_id}

    async def _build(self, future: Future[Result], model: Model, start: Saved | None, optimizer: bool) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not self.models.admit(model, self._has_ended):
            others = {other.session_id for other in self.models.trained.values()}
            if others == {model.session_id} or time.monotonic() > deadline:
                problem = "the ranks train as many models as they can, those of sessions that have not ended"
                remedy = "end one (ServiceClient.close)"
                most = self.config.num_models
                future.set_exception(InputError(problem, field="api.max_models", value=most, remedy=remedy))
                return
            await asyncio.sleep(0.2)

        def build() -> Result:
            self.models.build(model, start, optimizer=optimizer)
            kind = "create_model" if start is None else "load_weights"
            path = {} if start is None else {"path": start.uri}
            return {"model_id": model.run.run_id, "type": kind, **path}

        def run() -> None:
            self._run(future, build)
            if future.exception() is not None:
                self.models.leave(model)

        self.models.thread.submit(run)

    def get_info(self, body: Body) -> dict[str, Any]:
        run = self._model(body).run
        tokenizer = {} if self.config.api.model_name else {"tokenizer_id": str(self.models.model_path)}
        data = {"model_name": self.model_name, **tokenizer}
        info = {"type": "get_info", "model_id": run.run_id, "model_name": self.model_name, "model_data": data}
        return {**info, **describe_lora(run)}

    def _model(self, body: Body) -> Model:
        model = self.models.trained.get(str(body.get("model_id")))
        if model is None:
            raise NotFoundError("it is not trained here, or no longer", field="model_id", value=body.get("model_id"))
        return model

    def _check_base(self, name: Any) -> None:
        known = (self.model_name, self.config.model.path, str(self.models.model_path))
        if name not in known:
            raise InputError(field="base_model", value=name, allowed=self.model_name)

    # ---- training ------------------------------------------------------------------------------------------------
    def forward_backward(self, request: ForwardBackward) -> dict[str, Any]:
        body = {"model_id": request.model_id, "seq_id": request.seq_id}
        return self._in_order(body, "pass", lambda model: self.models.forward_backward(model, request))

    def optim_step(self, body: Body) -> dict[str, Any]:
        params = dict(body.get("adam_params") or body.get("optim_params") or {})
        return self._in_order(body, "optim_step", lambda model: self.models.optim_step(model, params))

    def save_weights(self, body: Body) -> dict[str, Any]:
        def save(model: Model) -> dict[str, Any]:
            name = str(body.get("path") or f"{model.num_steps:06d}")
            saved = self.models.states.new(model.run.run_id, "weights", name, overwrite=bool(body.get("overwrite")))
            self.models.save(model, saved)
            return {"path": saved.uri, "type": "save_weights"}

        return self._in_order(body, "save_weights", save)

    def save_weights_for_sampler(self, body: Body) -> dict[str, Any]:
        """Saves the weights under a name; without one, gives them to the servers for a new sampling client."""

        def save(model: Model) -> dict[str, Any]:
            run_id, kind = model.run.run_id, {"type": "save_weights_for_sampler"}
            if body.get("path") is not None:
                saved = self.models.states.new(run_id, "sampler_weights", str(body["path"]))
                self.models.export(model, saved)
                return {"path": saved.uri, **kind}
            weights = self.models.weights(model)
            self._wait_for(self._served.hold(weights))
            self._published[run_id] = weights
            follows = body.get("kind") == "inflight"

            def current() -> Weights:
                return self._published[run_id] if follows else weights

            number = int(body.get("sampling_session_seq_id") or 0)
            return {"sampling_session_id": self._add_sampler(model.session_id, number, current), **kind}

        return self._in_order(body, "save_weights_for_sampler", save)

    def _in_order(self, body: Body, kind: str, do: Callable[[Model], Result]) -> dict[str, Any]:
        """A future for a request of a model, which runs when all before it have run."""
        model, number = self._model(body), int(body["seq_id"])
        request_id = f"{model.run.run_id}:{number}:{kind}"
        future = self.requests.open(request_id)
        if future is not None:

            def job() -> Result:
                if self.models.trained.get(model.run.run_id) is not model:
                    raise NotFoundError("another model has its place", field="model_id", value=model.run.run_id)
                return do(model)

            try:
                model.order.add(number, partial(self._run, future, job))
            except InputError as error:
                future.set_exception(error)
        return {"request_id": request_id, "model_id": model.run.run_id}

    def _run(self, future: Future[Result], job: Callable[[], Result]) -> None:
        run_into(future, job)
        if (error := future.exception()) is not None and not isinstance(error, InputError):
            self._check_processes(error)

    def _wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine of the event loop from the thread of the models."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ---- sampling ------------------------------------------------------------------------------------------------
    def create_sampling_session(self, body: Body) -> dict[str, Any]:
        session, number, path = self._session(body), int(body["sampling_session_seq_id"]), body.get("model_path")
        if path is None:
            self._check_base(body.get("base_model"))
            weights = self.models.base
        else:
            weights = self.models.weights_in(self.models.states.find(str(path), "sampler_weights"))
        sampler_id = self._add_sampler(session.session_id, number, lambda: weights, path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def _add_sampler(
        self, session_id: str, number: int, weights: Callable[[], Weights], path: str | None = None
    ) -> str:
        sampler_id = f"{session_id}:sample:{number}"
        self._samplers[sampler_id] = SamplingSession(weights=weights, model_path=path)
        return sampler_id

    def get_sampler(self, sampler_id: str) -> dict[str, Any]:
        path = self._sampling_session(sampler_id).model_path
        return {"sampler_id": sampler_id, "base_model": self.model_name, "model_path": path}

    def _sampling_session(self, sampler_id: Any) -> SamplingSession:
        if sampler_id not in self._samplers:
            raise NotFoundError("unknown", field="sampling_session_id", value=sampler_id)
        return self._samplers[sampler_id]

    def sample(self, body: Body) -> dict[str, Any]:
        sampler_id = body.get("sampling_session_id")
        session, number = self._sampling_session(sampler_id), int(body["seq_id"])
        request_id = f"{sampler_id}:{number}"
        future = self.requests.open(request_id)
        if future is not None:
            self._start(request_id, self._sample(future, session, body, request_id))
        ids = [f"{request_id}:{index}" for index in range(min(int(body.get("num_samples", 1)), MAX_SAMPLES))]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def _sample(self, future: Future[Result], session: SamplingSession, body: Body, request_id: str) -> None:
        try:
            result = await self._sampler.sample(session, body, request_id)
        except BaseException as error:
            future.set_exception(error)
            if isinstance(error, asyncio.CancelledError):
                raise
            if not isinstance(error, InputError):
                self._check_processes(error)
        else:
            future.set_result(result)

    def _check_processes(self, error: BaseException) -> None:
        """Ends the service after an error because of which it cannot go on."""
        try:
            self.models.session.servers.check()
        except RolloutError as died:
            self._fail(died)
        if isinstance(error, RankError | WeightSyncError):
            self._fail(error)

    def cancel(self, body: Body) -> dict[str, Any]:
        if (task := self._tasks.get(str(body.get("request_id")))) is not None:
            task.cancel()
        return {}

    # ---- saved states --------------------------------------------------------------------------------------------
    def weights_info(self, body: Body) -> dict[str, Any]:
        path = str(body.get("tinker_path") or body.get("path"))
        kind: Kind = "sampler_weights" if "/sampler_weights/" in path else "weights"
        run = self.models.states.run(self.models.states.find(path, kind).run_id)
        flags = {name: (run.lora or {}).get(name) for name in ("train_mlp", "train_attn", "train_unembed")}
        return {"base_model": run.base_model, **describe_lora(run), **flags}

    def training_run(self, run_id: str) -> dict[str, Any]:
        return self._describe_run(self.models.states.run(run_id))

    def training_runs(self) -> dict[str, Any]:
        runs = [self._describe_run(run) for run in self.models.states.runs()]
        return {"training_runs": runs, "cursor": {"offset": 0, "limit": len(runs), "total_count": len(runs)}}

    def checkpoints(self, run_id: str | None = None) -> dict[str, Any]:
        states = self.models.states
        runs = states.runs() if run_id is None else [states.run(run_id)]
        return {"checkpoints": [saved.describe() for run in runs for saved in states.saved(run.run_id)]}

    def _describe_run(self, run: Run) -> dict[str, Any]:
        saved = [one.describe() for one in self.models.states.saved(run.run_id)]
        newest = {one["checkpoint_type"]: one for one in sorted(saved, key=lambda one: one["time"])}
        moment = max((one["time"] for one in saved), default="1970-01-01T00:00:00Z")
        return {
            "training_run_id": run.run_id,
            "base_model": run.base_model,
            "model_owner": "local",
            "last_request_time": moment,
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
            "user_metadata": {key: str(value) for key, value in run.user_metadata.items()},
            **describe_lora(run),
        }

    # ---- the service itself --------------------------------------------------------------------------------------
    def capabilities(self) -> dict[str, Any]:
        one = {"model_name": self.model_name, "max_context_length": self.models.max_tokens}
        return {"supported_models": [{**one, "trainable": True, "sampleable": True}]}

    def client_config(self, _: Body) -> dict[str, Any]:
        """Settings of the SDK: a batch is one request up to half of the largest body."""
        chunk = self.config.api.max_request_bytes // 2
        return {"use_pyqwest_transport": False, "fwdbwd_max_chunk_bytes_count": chunk, "custom_loss_server_side": False}

    def _start(self, request_id: str, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[request_id] = asyncio.create_task(coroutine)
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    async def close(self) -> None:
        """Cancels what runs, and closes connections."""
        for task in list(self._tasks.values()):
            task.cancel()
        await self._sampler.close()


def check_optimizer(config: Any) -> None:
    """Raises InputError for an optimizer other than AdamW."""
    kind = (config or {}).get("type", "adamw")
    check_value({"type": kind}, "type", kind == "adamw", "adamw")
