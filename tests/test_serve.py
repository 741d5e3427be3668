"""The parts of the training API that need no processes: losses, batches, order, limits, the key, saved states."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from apps.serve.config import CLIENT_SECTIONS, ApiConfig, ServeConfig
from apps.serve.http import application
from apps.serve.losses import LOSSES, batch_of, check_loss, summed_loss, token_losses
from apps.serve.main import COMMON_KEYS, prepare, read_key
from apps.serve.models import BASE, Weights, step_settings
from apps.serve.requests import BusyError, InOrder, Requests, Result
from apps.serve.sampling import ServedAdapters, ServedWeights, sampling_settings
from apps.serve.states import Run, States
from apps.serve.wire import Datum, message, read_data, read_request, write_result, write_samples
from ds_engine import EngineConfigError, TokenOutputs
from plinth_testing import raises
from rl_runtime import InputError, TrainerConfig
from run_kit import load_config
from run_kit.config.schema import all_paths

KEY = "tml-0123456789"
PRESET = Path(__file__).resolve().parents[1] / "apps" / "serve" / "presets" / "demo.yaml"


def datum(tokens: list[int], **inputs: list[float]) -> Datum:
    given = {"target_tokens": np.array([*tokens[1:], 0], np.int64)}
    given |= {name: np.array(values, np.float32) for name, values in inputs.items()}  # type: ignore[misc]
    return Datum(tokens=np.array(tokens, np.int32), inputs=given)


def test_help_lists_no_key_that_the_service_refuses() -> None:
    assert not {key.split(".")[0] for key in COMMON_KEYS} & set(CLIENT_SECTIONS)
    assert set(COMMON_KEYS) <= set(all_paths(ServeConfig))


# ---- losses and batches -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_losses_are_those_of_the_sdk(name: str) -> None:
    """Values and gradients of plain formulas, on tokens inside and outside of the clip range, of both signs."""
    p = torch.tensor([-1.0, -1.0, -0.2, -3.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([-1.0, -1.5, -1.0, -1.0, -1.5, -0.5], dtype=torch.float64)
    a = torch.tensor([1.0, 1.0, -2.0, 0.5, -1.0, 1.0], dtype=torch.float64)
    ratio, options = (p - q).exp(), check_loss(name, {})
    clipped = ratio.clamp(0.8, 1.2)
    expected = {
        "importance_sampling": -(ratio * a),
        "ppo": -torch.minimum(ratio * a, clipped * a),
        "cispo": -(clipped.detach() * p * a),
        "dro": -(p * a - 0.025 * (p - q) ** 2),
    }[name].sum()
    (gradient,) = torch.autograd.grad(expected, p)
    own = p.detach().float().requires_grad_()
    loss = token_losses(name, own, {"logprobs": q.float(), "advantages": a.float()}, options).sum()
    (own_gradient,) = torch.autograd.grad(loss, own)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own_gradient.double(), gradient, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_cross_entropy_is_its_weights() -> None:
    """On which `forward_backward_custom` of the SDK relies."""
    batch = batch_of([datum([1, 2, 3], weights=[0.5, 0.0, -2.0])], "cross_entropy", vocab_size=9, max_tokens=9)
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    outputs = TokenOutputs(log_probs_K=log_probs, entropy_K=torch.zeros(3))
    summed_loss(outputs, batch, name="cross_entropy", options={}).loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-0.5, 0.0, 2.0]


def test_every_token_of_a_batch_predicts_its_target() -> None:
    data = [datum([1, 2, 3], weights=[0.0, 1.0, 1.0]), datum([4, 5], weights=[1.0, 1.0])]
    batch = batch_of(data, "cross_entropy", vocab_size=9, max_tokens=9)
    assert batch.input_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert batch.target_ids_K.tolist() == [2, 3, 0, 5, 0]
    assert batch.target_index_K.tolist() == [0, 1, 2, 3, 4]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1]
    assert batch.select([1]).target_index_K.tolist() == [0, 1]
    assert batch.columns["weights"].tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ([], "data"),
        ([datum([], weights=[])], "data[0].model_input"),
        ([datum([1] * 10, weights=[1.0] * 10)], "data[0].model_input"),
        ([datum([1, 2])], "data[0].loss_fn_inputs"),
        ([datum([1, 2], weights=[1.0, 1.0], mask=[1.0, 1.0])], "data[0].loss_fn_inputs"),
        ([datum([1, 2], weights=[1.0])], "data[0].weights"),
        ([datum([1, 9], weights=[1.0, 1.0])], "data[0].model_input"),
        ([datum([1, 2], weights=[1.0, float("nan")])], "data.weights"),
    ],
)
def test_a_batch_that_cannot_be_computed_is_refused_by_name(data: list[Datum], field: str) -> None:
    with raises(InputError, field=field):
        batch_of(data, "cross_entropy", vocab_size=9, max_tokens=9)


@pytest.mark.parametrize(
    ("name", "config", "field"),
    [
        ("gspo", {}, "loss_fn"),
        ("cross_entropy", {"beta": 1.0}, "loss_fn_config.beta"),
        ("ppo", {"clip_low_threshold": "low"}, "loss_fn_config.clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold"),
        ("cispo", {"clip_high_threshold": 0.5}, "clip_high_threshold"),
    ],
)
def test_losses_and_settings_that_are_not_supported_are_refused_by_name(
    name: str, config: dict[str, float | str], field: str
) -> None:
    with raises(InputError, field=field):
        check_loss(name, config)


# ---- messages -----------------------------------------------------------------------------------------------------
def test_a_batch_and_its_result_travel_as_packed_numbers() -> None:
    request = message("ForwardBackwardRequest")(model_id="m", seq_id=3, loss_fn="ppo", forward_only=True)
    request.loss_fn_config_v2["clip_low_threshold"].number = 0.9
    one = request.data.add()
    one.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    one.model_input.add().encoded_text.tokens = np.array([3], np.int32).tobytes()
    tensor = one.loss_fn_inputs["advantages"]
    tensor.dense, tensor.dtype = np.array([0.5, 1.5, -1.0], np.float32).tobytes(), 1
    read = read_request(request.SerializeToString())
    assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == ("m", 3, "ppo", True)
    assert read.loss_config == {"clip_low_threshold": 0.9}
    (data,) = read_data(read.data)
    assert data.tokens.tolist() == [1, 2, 3]
    assert data.inputs["advantages"].tolist() == [0.5, 1.5, -1.0]
    result = message("ForwardBackwardOutput")()
    rows = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]
    result.ParseFromString(write_result(rows, {"loss:sum": 2.5}))
    field = result.loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(field.data, np.float32).tolist() == [-1.0, -2.0, -3.0]
    assert np.frombuffer(field.offsets, np.int64).tolist() == [0, 8, 12]
    samples = message("SampleResponse")()
    samples.ParseFromString(write_samples([(np.array([7], np.int32), rows[1], 1)], rows[0], None))
    assert samples.sequences[0].stop_reason == 1
    assert len(samples.prompt_logprobs) == 8


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("data[0].model_input", lambda one: one.model_input.add().image.SetInParent()),
        ("data[0].w", lambda one: one.loss_fn_inputs["w"].shape.extend([2, 3])),
        ("data[0].w.dtype", lambda one: setattr(one.loss_fn_inputs["w"], "dtype", 4)),
        (
            "data[0].model_input",
            lambda one: one.model_input.add().encoded_text.MergeFrom(message("EncodedTextChunk")(tokens=b"x")),
        ),
    ],
)
def test_inputs_other_than_text_and_damaged_ones_are_refused_by_name(field: str, change: Callable[[Any], Any]) -> None:
    request = message("ForwardBackwardRequest")()
    change(request.data.add())
    with raises(InputError, field=field):
        read_data(request.data)
    with raises(InputError, field="body"):
        read_request(b"\xff\xff")


# ---- order and limits ---------------------------------------------------------------------------------------------
def test_requests_of_a_model_run_in_the_order_of_their_numbers() -> None:
    ran: list[int] = []
    order = InOrder(lambda job: job(), 1)
    for number in (3, 1, 2, 5, 4):
        order.add(number, lambda number=number: ran.append(number))  # type: ignore[misc]
    assert ran == [1, 2, 3, 4, 5]
    with raises(InputError, field="seq_id"):
        order.add(5, lambda: None)


def test_a_request_that_is_sent_twice_runs_once_and_pending_ones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apps.serve.requests.KEPT_RESULTS", 2)
    requests = Requests(max_pending=2)
    first, second = requests.open("a"), requests.open("b")
    assert first is not None
    assert second is not None
    assert requests.open("a") is None
    with raises(BusyError, field="api.max_pending"):
        requests.open("c")
    first.set_result({})
    assert requests.open("a") is None, "its result is kept for a client that asks again"
    for name in ("c", "d", "e"):
        future = requests.open(name)
        assert future is not None
        future.set_result({})
    with pytest.raises(KeyError):
        requests["a"]
    assert not requests["b"].done(), "a request that runs is never dropped"
    monkeypatch.setattr("apps.serve.requests.KEPT_ANSWERS", 1)
    for name in ("d", "e"):
        requests.answered(name)
    assert requests["e"].done()
    with pytest.raises(KeyError):
        requests["d"]


def test_servers_change_weights_when_the_requests_before_have_ended() -> None:
    """Requests for the weights that are held run together; one for others waits for them, and later ones for it."""
    held: list[str] = []

    def give(weights: Weights) -> None:
        assert running == 0, "a request runs"
        held.append(weights.key)

    models: Any = SimpleNamespace(base=Weights(key=BASE), give=give)
    running, most = 0, 0

    async def ask(served: ServedWeights, key: str) -> None:
        nonlocal running, most
        async with served.using(Weights(key=key)):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1

    async def run() -> None:
        served = ServedWeights(models)
        await asyncio.gather(*(ask(served, key) for key in (BASE, BASE, "a", "a", "a", BASE)))
        await served.hold(Weights(key="a"))

    asyncio.run(run())
    assert held == ["a", BASE, "a"]
    assert most == 3


def test_adapters_by_name_are_read_once_and_their_requests_run_together(tmp_path: Path) -> None:
    loaded: list[str] = []
    models: Any = SimpleNamespace(load_adapter=lambda weights: loaded.append(weights.key))
    names: set[str | None] = set()

    async def ask(served: ServedAdapters, key: str, together: asyncio.Barrier) -> None:
        async with served.using(Weights(key=key, folder=tmp_path)) as name:
            names.add(name)
            await together.wait()

    async def run() -> None:
        served, together = ServedAdapters(models), asyncio.Barrier(4)
        await asyncio.gather(*(ask(served, key, together) for key in (BASE, "r:1", "tinker://r/a", "r:1")))

    asyncio.run(run())
    assert sorted(loaded) == ["r:1", "tinker://r/a"]
    assert names == {None, *loaded}
    with raises(InputError, field="sampling_session_id"):
        asyncio.run(ServedAdapters(models).hold(Weights(key="r:1", folder=tmp_path / "gone")))


# ---- the service over HTTP ----------------------------------------------------------------------------------------
class Stub:
    """The service behind the routes under test."""

    def __init__(self) -> None:
        self.requests = Requests(max_pending=1)

    def create_session(self, body: dict[str, Any]) -> dict[str, Any]:
        future = self.requests.open(str(body["id"]))
        assert future is not None
        self.last: Future[Result] = future
        return {"session_id": "s"}

    def forward_backward(self, request: Any) -> dict[str, Any]:
        raise AssertionError(request)

    async def close(self) -> None: ...


def client(stub: Stub, **headers: str) -> TestClient:
    app = application(lambda: stub, key=KEY, max_request_bytes=1000)  # type: ignore[arg-type, return-value]
    return TestClient(app, headers=headers)


@pytest.mark.parametrize("key", [None, "", "tml-012345678", KEY + "0"])
def test_a_request_without_the_key_gets_401_and_nothing_else(key: str | None) -> None:
    with client(Stub(), **({} if key is None else {"X-API-Key": key})) as http:
        for method, path in (("GET", "healthz"), ("POST", "create_session"), ("GET", "nowhere"), ("PUT", "asample")):
            answer = http.request(method, f"/api/v1/{path}")
            assert (answer.status_code, answer.json()) == (401, {"detail": "unauthorized"})


def test_requests_are_bounded_and_errors_have_the_status_that_the_sdk_expects() -> None:
    stub = Stub()
    with client(stub, **{"X-API-Key": KEY}) as http:

        def status(path: str, content: bytes, **headers: str) -> int:
            return http.post(f"/api/v1/{path}", content=content, headers=headers).status_code

        assert http.get("/api/v1/healthz").json() == {"status": "ok"}
        assert status("create_session", b'{"id": 1}') == 200
        assert status("create_session", b'{"id": 2}') == 429, "the SDK sends it again"
        assert status("create_session", b"{}") == status("create_session", b"[1]") == 400
        assert status("create_session", b"{") == status("forward_backward", b"\xff\xff") == 400
        assert status("create_session", b'{"id": "' + b"x" * 1000 + b'"}') == 413
        assert status("create_session", b"", **{"Content-Encoding": "zstd"}) == 415
        assert status("publish", b"{}") == 404
        assert status("retrieve_future", b'{"request_id": "of a server before"}') == 410
        stub.last.set_exception(InputError(field="loss_fn", value="x"))
        answer = http.post("/api/v1/retrieve_future", json={"request_id": "1"}).json()
        assert answer["category"] == "user"
        assert "loss_fn" in answer["error"]
        assert status("create_session", b'{"id": 3}') == 200
        stub.last.set_exception(OSError("disk"))
        answer = http.post("/api/v1/retrieve_future", json={"request_id": "3"}).json()
        assert answer["category"] == "server"


# ---- settings -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["sampling.temperature=0.5"], "sampling"),
        (["reward.score=2"], "reward"),
        (["actor.optim.lr=1"], "actor.optim"),
        (["actor.zero.stage=1"], "actor.zero.stage"),
        (["actor.lora.dropout=0.1"], "actor.lora.dropout"),
        (["api.full=true", "actor.lora.rank=8", "rollout.max_lora_rank=8"], "rollout.max_lora_rank"),
        (["warm_start.steps=1"], "warm_start.steps"),
        (["trainer.max_staleness=1"], "trainer.max_staleness"),
        (["trainer.take_turns=both"], "trainer.take_turns"),
        (["trainer.ray_address=auto"], "trainer.ray_address"),
    ],
)
def test_settings_that_clients_decide_or_that_cannot_be_served_are_refused(overrides: list[str], field: str) -> None:
    config = load_config(ServeConfig, presets=[PRESET], overrides=overrides)
    with raises(InputError, field=field):
        config.check_given()


def test_the_longest_sequence_is_the_context_of_the_servers() -> None:
    config = load_config(ServeConfig, presets=[PRESET])
    config.check_given()
    prepared = prepare(config)
    assert prepared.data.max_prompt_length + prepared.sampling.response_tokens == 256
    assert prepare(ServeConfig()).rollout.max_model_len == 8192


def test_the_key_is_that_of_the_file_or_the_environment_or_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    key, is_new = read_key(ServeConfig())
    assert is_new
    assert key.startswith("tml-")
    assert key != read_key(ServeConfig())[0]
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    assert read_key(ServeConfig()) == (KEY, False)
    (tmp_path / "key").write_text("short\n")
    with raises(InputError, field="api.api_key_file"):
        read_key(ServeConfig(api=ApiConfig(api_key_file=str(tmp_path / "key")), trainer=TrainerConfig()))


def test_settings_of_a_step_are_those_of_the_sdk() -> None:
    settings = step_settings({"learning_rate": 0.0, "beta1": 0.8, "grad_clip_norm": 2.0})
    assert (settings.lr, settings.betas, settings.eps, settings.grad_clip) == (0.0, (0.8, 0.95), 1e-12, 2.0)
    with raises(InputError, field="optim_params"):
        step_settings({"type": "dimuon", "learning_rate": 1.0})
    with raises(EngineConfigError, field="lr"):
        step_settings({"learning_rate": -1.0})


def test_stops_and_limits_of_a_sample_are_those_of_the_sdk() -> None:
    for stop, expected in (
        (None, ((), (), False)),
        ([], ((), (), True)),
        ("a", (("a",), (), False)),
        (["a", "b"], (("a", "b"), (), False)),
        ([7], ((), (7,), False)),
    ):
        settings, _ = sampling_settings({"stop": stop, "max_tokens": 99}, 4, room=10)
        assert (settings.stop, settings.stop_token_ids, settings.ignore_eos) == expected
        assert (settings.num_samples, settings.response_tokens) == (4, 10)
    assert sampling_settings({"temperature": 0.0}, 4, room=10)[0].num_samples == 1
    with raises(InputError, field="sampling_params.stop"):
        sampling_settings({"stop": [1, "a"]}, 1, room=10)


# ---- saved states -------------------------------------------------------------------------------------------------
def test_saved_states_have_paths_that_survive_the_server_and_stay_in_their_folder(tmp_path: Path) -> None:
    states = States(tmp_path)
    states.add_run(Run(run_id="s-1:train:0", base_model="m", lora={"rank": 4}))
    saved = states.new("s-1:train:0", "weights", "step.1")
    saved.folder.mkdir(parents=True)
    again = States(tmp_path)
    assert again.find("tinker://s-1:train:0/weights/step.1", "weights").folder == saved.folder
    assert again.run("s-1:train:0").lora == {"rank": 4}
    assert [one.uri for one in again.saved("s-1:train:0")] == [saved.uri]
    with raises(InputError, field="name"):
        states.new("s-1:train:0", "weights", "step.1")
    assert states.new("s-1:train:0", "weights", "step.1", overwrite=True) == saved
    for name in ("..", ".", "a/b", "", "x" * 200):
        with raises(InputError, field="name"):
            states.new("s-1:train:0", "weights", name)
    with raises(InputError, field="training_run_id"):
        states.find("tinker://../weights/a", "weights")
    for path in ("tinker://s-1:train:0/weights/..", "file:///a", saved.uri + "2"):
        with raises(InputError, field="path"):
            states.find(path, "weights")
    with raises(InputError, field="path"):
        states.find(saved.uri, "sampler_weights")
