"""The unmodified `tinker` SDK against a started server: exact, ordered, resumable. Needs tests/extras/tinker.txt."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

tinker: Any = pytest.importorskip("tinker", reason="tests/extras/tinker.txt is not installed")

from apps.serve.losses import batch_of, summed_loss  # noqa: E402
from apps.serve.states import States, load_state  # noqa: E402
from apps.serve.wire import Datum, message  # noqa: E402
from ds_engine import EngineConfig, OptimConfig, ZeroConfig, ZeroEngine, init_distributed, shutdown_distributed  # noqa: E402
from rl_core import BatchConfig, linear_log_prob  # noqa: E402
from rl_runtime.ranks.train_batch import assignment  # noqa: E402

pytestmark = pytest.mark.e2e
KEY = "tml-test-0123456789"
NAME = "builtin:tiny"
LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
ADAM = {
    "learning_rate": LR,
    "beta1": BETAS[0],
    "beta2": BETAS[1],
    "eps": EPS,
    "weight_decay": DECAY,
    "grad_clip_norm": CLIP,
}


class Server:
    """`plinth serve` in its own process; `start` again after a kill, on the same folder of states."""

    def __init__(self, folder: Path, start_app: Callable[..., Any], *overrides: str) -> None:
        os.environ["TINKER_API_KEY"] = KEY
        os.environ["TINKER_TELEMETRY"] = "0"
        self.folder, self._start_app, self._overrides = folder, start_app, overrides

    def start(self, *further: str) -> None:
        given = (*self._overrides, *further)
        overrides = ("preset=demo", "api.port=0", f"api.states_dir={self.folder / 'states'}", *given)
        self.app = self._start_app(self.folder / "outputs", *overrides, app="serve")
        self.app.wait_for("TINKER_BASE_URL=")
        self.url = self.app.output.rpartition("TINKER_BASE_URL=")[2].split()[0]
        self.app.read_in_background()
        self.http = httpx.Client(base_url=f"{self.url}/api/v1/", headers={"X-API-Key": KEY}, timeout=60)

    @property
    def model_folder(self) -> Path:
        return max((self.folder / "outputs").glob("serve_demo_*")) / "initial_model"

    @contextmanager
    def client(self) -> Iterator[Any]:
        """A session of the SDK, which ends with the block."""
        with tinker.ServiceClient(base_url=self.url, api_key=KEY) as client:
            yield client

    def kill(self) -> None:
        self.app.process.kill()
        self.app.finish()
        assert not self.app.survivors()

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.post(route, json=body).raise_for_status().json()
        return answer

    def result(self, request_id: str) -> Any:
        while (answer := self.http.post("retrieve_future", json={"request_id": request_id})).status_code == 408:
            pass
        return answer.json() if "json" in answer.headers["content-type"] else answer.content


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, start_shared_app: Callable[..., Any]) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("serve"), start_shared_app, "api.full=true")
    server.start()
    yield server
    server.app.stop()
    assert not server.app.survivors()


def make_data(seed: int, num: int = 4) -> list[Any]:
    """Sequences of random tokens, lengths and weights."""
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(num):
        tokens, weights = rng.integers(3, 60, size=rng.integers(5, 20)), rng.standard_normal
        inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": weights(len(tokens) - 1).astype(np.float32)}
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
    return data


def log_probs(result: Any) -> list[float]:
    return [value for row in result.loss_fn_outputs for value in row["logprobs"].data]


def step(client: Any, data: list[Any]) -> tuple[list[float], float]:
    """Log-probs before a step, and the norm of its gradient."""
    result, optim = client.forward_backward(data, "cross_entropy"), client.optim_step(tinker.AdamParams(**ADAM))
    return log_probs(result.result()), optim.result().metrics["grad_norm:mean"]


def direct_steps(folder: Path, steps: list[list[Any]]) -> Iterator[tuple[list[float], float]]:
    """`step` by the engine alone, in this process."""
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    cpu = torch.device("cpu")
    init_distributed(rank=0, world_size=1, master_addr="127.0.0.1", master_port=port, device=cpu)
    optim = OptimConfig(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, grad_clip=CLIP)
    config = EngineConfig(zero=ZeroConfig(stage=2), optim=optim, dtype="float32", gradient_checkpointing=False)
    engine = ZeroEngine.from_pretrained(str(folder), config, log_prob_fn=linear_log_prob, device=cpu, total_steps=9)
    try:
        for data in steps:
            own = [
                Datum(
                    tokens=np.array(one.model_input.to_ints(), np.int32),
                    inputs={name: value.to_numpy() for name, value in one.loss_fn_inputs.items()},
                )
                for one in data
            ]
            batch = batch_of(own, "cross_entropy", vocab_size=64, max_tokens=256)
            lens = batch.seq_lens_S.tolist()
            [[order]] = assignment(lens, lens, range(len(lens)), 1, BatchConfig(token_budget=16384), 1)
            micro = batch.select(order)
            values_K = torch.empty(batch.num_targets)
            values_K[batch.target_places(order)] = engine.log_probs([micro])[0].log_probs_K
            stats = engine.train_mini_batch([micro], lambda o, b: summed_loss(o, b, name="cross_entropy", options={}))
            yield values_K.tolist(), stats.grad_norm
    finally:
        engine.close()
        shutdown_distributed()


def test_steps_of_the_api_are_those_of_the_engine_bit_for_bit(server: Server) -> None:
    steps = [make_data(seed) for seed in range(4)]
    with server.client() as client:
        training = client.create_lora_training_client(NAME, rank=4).result()
        assert training.get_info().is_lora is False, "api.full"
        assert len(training.get_tokenizer()) == 64
        given = [step(training, data) for data in steps]
    assert given == list(direct_steps(server.model_folder, steps))
    assert given[0] != given[1]


def test_samples_have_the_log_probs_of_the_ranks_and_snapshots_keep_their_weights(server: Server) -> None:
    tokens = make_data(7, num=1)[0].model_input.to_ints()
    prompt, settings = tinker.ModelInput.from_ints(tokens), tinker.SamplingParams(max_tokens=6, seed=3)
    with server.client() as client:
        training = client.create_lora_training_client(NAME).result()

        def scores() -> list[float]:
            data = [tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]
            return log_probs(training.forward(data, "cross_entropy").result())

        inputs = {"target_tokens": tokens[1:], "weights": [0.0] * (len(tokens) - 1)}
        start = scores()
        step(training, make_data(1))
        moved, sampler = scores(), training.save_weights_and_get_sampling_client().result()
        answer = sampler.sample(prompt, 3, settings, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
        assert answer.prompt_logprobs[0] is None
        np.testing.assert_allclose(answer.prompt_logprobs[1:], moved, atol=1e-5)
        assert [len(row) for row in answer.topk_prompt_logprobs[1:]] == [2] * (len(tokens) - 1)
        assert len({one.sequence_id for one in answer.sequences}) == 3
        whole = [*tokens, *answer.sequences[0].tokens]
        again = sampler.compute_logprobs(tinker.ModelInput.from_ints(whole)).result()
        np.testing.assert_allclose(again[len(tokens) :], answer.sequences[0].logprobs, atol=1e-5)
        named = training.save_weights_for_sampler("named").result().path
        step(training, make_data(2))
        inflight = training.save_weights_and_get_sampling_client(kind="inflight").result()
        np.testing.assert_allclose(inflight.compute_logprobs(prompt).result()[1:], scores(), atol=1e-5)
        step(training, make_data(3))
        training.save_weights_and_get_sampling_client(kind="inflight").result()
        np.testing.assert_allclose(inflight.compute_logprobs(prompt).result()[1:], scores(), atol=1e-5)
        for kept, expected in (({"model_path": named}, moved), ({"base_model": NAME}, start)):
            old = client.create_sampling_client(**kept).result()
            np.testing.assert_allclose(old.compute_logprobs(prompt).result()[1:], expected, atol=1e-5)
        assert sampler.sample(prompt, 2, tinker.SamplingParams(max_tokens=1, temperature=0.0)) is not None
        with pytest.raises(tinker.RequestFailedError):
            sampler.sample(prompt, 1, settings).result()


def test_a_custom_loss_has_the_gradient_of_its_formula(server: Server) -> None:
    data = make_data(5)

    def loss(given: list[Any], rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        pairs = zip(rows, given, strict=True)
        total = -torch.stack([(row * one.loss_fn_inputs["weights"].to_torch()).sum() for row, one in pairs]).sum()
        return total, {"mine": float(total.detach())}

    norms = []
    for custom in (False, True):
        with server.client() as client:
            training = client.create_lora_training_client(NAME).result()
            if custom:
                result = training.forward_backward_custom(data, loss)
            else:
                result = training.forward_backward(data, "cross_entropy")
            norms.append(training.optim_step(tinker.AdamParams(**ADAM)).result().metrics["grad_norm:mean"])
            assert custom == ("mine" in result.result().metrics)
    assert norms[0] == norms[1]


def test_requests_run_in_the_order_of_their_numbers_and_once(server: Server) -> None:
    """A step that arrives before its gradient waits for it; a request that is sent again has the first one's result."""
    session = server.post("create_session", tags=[], user_metadata=None, sdk_version="test")["session_id"]
    made = server.post("create_model", session_id=session, model_seq_id=0, base_model=NAME)
    model = server.result(made["request_id"])["model_id"]
    early = server.post("optim_step", model_id=model, seq_id=2, adam_params=ADAM)
    request = message("ForwardBackwardRequest")(model_id=model, seq_id=1, loss_fn="cross_entropy")
    one = request.data.add()
    one.model_input.add().encoded_text.tokens = np.array([5, 6], np.int32).tobytes()
    for name, values in (("target_tokens", np.array([6, 7])), ("weights", np.ones(2, np.float32))):
        one.loss_fn_inputs[name].dense = values.tobytes()
        one.loss_fn_inputs[name].dtype = 1 if name == "weights" else 2
    body = request.SerializeToString()
    first, second = (server.http.post("forward_backward", content=body).json()["request_id"] for _ in range(2))
    assert first == second
    assert server.result(early["request_id"])["metrics"]["grad_norm:mean"] > 0
    failed = server.post("optim_step", model_id=model, seq_id=3, adam_params=ADAM)
    assert server.result(failed["request_id"])["category"] == "user", "no gradient waits"
    server.post(f"sessions/{session}/finish", reason={"type": "success"})


def test_all_weights_of_one_model_are_trained_at_a_time(server: Server) -> None:
    """The model of a session that has ended makes room; in its own session a second one is refused."""
    with server.client() as client:
        client.create_lora_training_client(NAME).result()
        with pytest.raises(tinker.RequestFailedError):
            client.create_lora_training_client(NAME).result()
        with server.client() as other:
            waiting = other.create_lora_training_client(NAME)
            time.sleep(1)
            client.close("success").result()
            assert waiting.result().get_info().model_id
    with server.client() as client, pytest.raises(tinker.BadRequestError):
        client.create_lora_training_client("another/model").result()


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_saved_state_resumes_to_the_bit(server: Server, killed: bool) -> None:
    """Also the state whose client went away when it was accepted. Weights alone start with a new optimizer.

    With a kill before it, thorough: the runs that share the base below also resume in a server that has started again.
    """
    with server.client() as client:
        training = client.create_lora_training_client(NAME, user_metadata={"name": "mine"}).result()
        step(training, make_data(1))
        state = training.save_state("kept").result().path
        expected = step(training, make_data(2)), step(training, make_data(3))
        run_id = training.get_info().model_id
    session = server.post("create_session", tags=[], user_metadata=None, sdk_version="test")["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "path": state, "optimizer": True}
    model = server.result(server.post("load_weights", **body)["request_id"])["model_id"]
    server.post("save_weights", model_id=model, seq_id=1, path="dropped")  # nobody asks for its result
    server.post("save_weights", model_id=model, seq_id=2, path="later")
    while f"tinker://{model}/weights/later" not in str(server.http.get("checkpoints").json()):
        time.sleep(0.1)
    server.post(f"sessions/{session}/finish", reason={"type": "success"})
    if killed:
        server.kill()
        server.start()
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    assert rest.get_training_run(run_id).result().user_metadata == {"name": "mine"}
    for path in (state, f"tinker://{model}/weights/dropped"):
        with server.client() as client:
            training = client.create_training_client_from_state_with_optimizer(path).result()
            assert (step(training, make_data(2)), step(training, make_data(3))) == expected
    with server.client() as client:
        training = client.create_training_client_from_state(state).result()
        prompt = make_data(2)[0].model_input
        reference = training.save_weights_and_get_sampling_client().result()
        start = reference.compute_logprobs(prompt).result()
        alone = step(training, make_data(2)), step(training, make_data(3))
        assert alone[0] == expected[0], "the weights and the gradient are the same"
        assert alone[1] != expected[1], "the step is that of a new optimizer"
        moved = training.save_weights_and_get_sampling_client().result().compute_logprobs(prompt).result()
        assert reference.compute_logprobs(prompt).result() == start != moved, "weights before the first step stay"


ADAPTERS = {"a": {"rank": 4, "seed": 1}, "b": {"rank": 8, "seed": 2, "train_mlp": False}}


def test_runs_that_share_the_base_are_those_of_runs_alone(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    """Bit for bit on two ranks: log-probs, gradient norms and weights, also of states that a killed server has saved.

    The death of a rollout server ends the service with an error that names it; what was acknowledged is there.
    """
    server = Server(tmp_path, start_app, "trainer.num_ranks=2", "api.max_models=2")
    server.start()
    data = {name: [make_data(10 * number + len(name), num=6) for number in range(3)] for name in ("a", "bb")}
    batches = dict(zip(ADAPTERS, data.values(), strict=True))

    def weights(path: str) -> dict[str, torch.Tensor]:
        (file,) = (tmp_path / "states" / path.removeprefix("tinker://").replace(":", "_")).glob("*.safetensors")
        return load_file(file)

    alone: dict[str, tuple[Any, Any]] = {}
    for name, settings in ADAPTERS.items():
        with server.client() as client:
            training = client.create_lora_training_client(NAME, **settings).result()
            steps = [step(training, batch) for batch in batches[name]]
            alone[name] = steps, weights(training.save_weights_for_sampler("last").result().path)

    def next_step(runs: dict[str, Any], number: int) -> dict[str, Any]:
        """A step of each run, whose gradients wait at the same time."""
        passes = {name: run.forward_backward(batches[name][number], "cross_entropy") for name, run in runs.items()}
        optims = {name: run.optim_step(tinker.AdamParams(**ADAM)) for name, run in runs.items()}
        return {n: (log_probs(passes[n].result()), optims[n].result().metrics["grad_norm:mean"]) for n in runs}

    def check_weights(runs: dict[str, Any]) -> None:
        for name, run in runs.items():
            given, expected = weights(run.save_weights_for_sampler("end").result().path), alone[name][1]
            assert given.keys() == expected.keys()
            assert all(torch.equal(given[key], expected[key]) for key in expected)

    states: dict[str, str] = {}
    with server.client() as client:
        runs = {
            name: client.create_lora_training_client(NAME, **kind, user_metadata={"name": name}).result()
            for name, kind in ADAPTERS.items()
        }
        with pytest.raises(tinker.RequestFailedError):
            client.create_lora_training_client(NAME).result()
        for number in range(3):
            assert next_step(runs, number) == {name: steps[number] for name, (steps, _) in alone.items()}
            if number == 1:
                states = {name: run.save_state("kept").result().path for name, run in runs.items()}
        check_weights(runs)
        samplers = {name: run.save_weights_and_get_sampling_client().result() for name, run in runs.items()}
        for name in (*runs, *runs):
            one = batches[name][0][0]
            expected = log_probs(runs[name].forward([one], "cross_entropy").result())
            whole = tinker.ModelInput.from_ints([*one.model_input.to_ints(), 5])
            given = samplers[name].compute_logprobs(whole).result()[1:-1]
            np.testing.assert_allclose(given, expected[: len(given)], atol=1e-5)
    assert alone["a"][0][2] != alone["b"][0][2]
    server.kill()
    server.start("actor.lora.rank=8", "rollout.max_lora_rank=8")
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    for name, run in runs.items():
        assert rest.get_training_run(run.get_info().model_id).result().user_metadata == {"name": name}
    with server.client() as client:
        resume = client.create_training_client_from_state_with_optimizer
        runs = {name: resume(path).result() for name, path in states.items()}
        assert next_step(runs, 2) == {name: steps[2] for name, (steps, _) in alone.items()}
        check_weights(runs)
        named = runs["a"].save_weights_for_sampler("named").result().path
        samplers = {name: run.save_weights_and_get_sampling_client().result() for name, run in runs.items()}
        samplers["named"] = client.create_sampling_client(model_path=named).result()
        asked = {
            name: sampler.sample(whole, 2, tinker.SamplingParams(max_tokens=8, temperature=1.0, seed=1))
            for name, sampler in samplers.items()
        }
        for name, answer in asked.items():
            for one in answer.result().sequences:
                tokens = [*whole.to_ints(), *one.tokens]
                inputs = {"target_tokens": tokens[1:], "weights": [0.0] * (len(tokens) - 1)}
                given = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
                run = runs["a" if name == "named" else name]
                expected = log_probs(run.forward([given], "cross_entropy").result())[-len(one.tokens) :]
                np.testing.assert_allclose(one.logprobs, expected, atol=1e-5)
        with pytest.raises(tinker.RequestFailedError):
            samplers["a"].compute_logprobs(whole).result()
        with pytest.raises(tinker.BadRequestError):
            client.create_lora_training_client(NAME, rank=16).result()
        path = runs["a"].save_state("before").result().path
    session = server.post("create_session", tags=[], user_metadata=None, sdk_version="test")["session_id"]
    sampler = server.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=NAME)
    (vllm,) = [p for p in server.app.children("_serve.py") if "_supervise.py" not in " ".join(p.cmdline())]
    vllm.kill()
    while server.app.children("_supervise.py"):
        time.sleep(0.1)
    prompt, sampler_id = {"chunks": [{"tokens": whole.to_ints()}]}, sampler["sampling_session_id"]
    lost = server.post("asample", sampling_session_id=sampler_id, seq_id=1, prompt=prompt)["request_id"]
    assert server.result(lost)["category"] == "server"
    assert server.app.finish() != 0
    assert "server_0.log" in server.app.output, "the error names the server and its log"
    assert not server.app.survivors()
    assert load_state(States(tmp_path / "states").find(path, "weights"))
