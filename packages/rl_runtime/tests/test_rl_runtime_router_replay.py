"""Router replay in a run: from samples to batches, settings that need each other, and R2's own record."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rl_runtime_samples import sample

from ds_engine import EngineConfig, TokenOutputs
from plinth_testing import raises
from rl_runtime import JobConfig, ModelConfig, PolicyConfig
from rl_runtime.errors import InputError
from rl_runtime.ranks.model_handle import _frozen, log_probs
from rl_runtime.resolve.job import resolve_job_for
from rl_runtime.resolve.own_model import ModelFacts
from rl_runtime.samples import batch_of
from rl_runtime.supervised_job_config import SupervisedJobConfig
from rollout_vllm import RolloutConfig


def test_a_batch_has_the_experts_of_every_token_of_its_samples() -> None:
    rows = [np.arange(2 * n, dtype=np.uint8).reshape(n, 1, 2) + 10 * n for n in (3, 5)]
    first = sample(3, routes=rows[0])  # with a prompt of one token: only the last token has no row
    second = sample(5, routes=rows[1][:3], response_mask=[True, True, True, False, False])  # and context behind
    batch = batch_of([first, second])
    routes_TLk = batch.per_token["routes"]
    assert (routes_TLk.dtype, tuple(routes_TLk.shape)) == (
        torch.int16,
        (first.token_ids.size + second.token_ids.size, 1, 2),
    )
    begin = first.token_ids.size
    assert routes_TLk[: len(rows[0])].tolist() == rows[0].tolist()
    assert routes_TLk[begin : begin + 3].tolist() == rows[1][:3].tolist()
    assert (routes_TLk[begin + 3 :] == -1).all(), "no router is asked what it would have chosen there"
    assert batch_of([first]).per_token["routes"].dtype == torch.uint8
    assert batch.select([1]).per_token["routes"].tolist() == routes_TLk[begin:].tolist()
    wide = batch_of([sample(3, routes=rows[0].astype(np.uint16) + 300)]).per_token["routes"]
    assert (wide.dtype, int(wide.max())) == (torch.int16, int(rows[0].max()) + 300)
    assert batch_of([first, sample(2)]).per_token == {}


def job(mode: Any, **rollout: Any) -> JobConfig:
    return JobConfig(
        model=ModelConfig(path="own"), actor=EngineConfig(router_replay=mode), rollout=RolloutConfig(**rollout)
    )


@pytest.mark.parametrize(("mode", "routes"), [("off", False), ("R2", False), ("R3", True)])
def test_servers_return_routes_where_they_are_replayed(mode: Any, routes: bool) -> None:
    facts = ModelFacts(num_parameters=10**9, context=2048)
    resolved = resolve_job_for(job(mode), gpus=(), shape=None, facts=facts)
    assert resolved.config.rollout.routes is routes
    assert resolved.config.frozen_engine.router_replay == "off"
    assert _frozen(resolved.config.actor).router_replay == "off"


def test_settings_that_no_replay_can_use_are_refused() -> None:
    with raises(InputError, field="rollout.routes", value=False):
        job("R3", routes=False)
    with raises(InputError, field="actor.router_replay", value="R2", allowed="off"):
        replace(job("R2"), model=ModelConfig())


@pytest.mark.parametrize(("key", "value"), [("router_replay", "R3"), ("match_servers", True)])
def test_models_without_servers_agree_with_none(key: str, value: Any) -> None:
    engine = EngineConfig(**{key: value})
    with raises(InputError, field=f"engine.{key}"):
        SupervisedJobConfig(engine=engine)
    assert JobConfig(model=ModelConfig(path="own"), actor=engine).frozen_engine == EngineConfig(optim=engine.optim)


def test_only_r2_needs_a_pass_for_old_log_probs() -> None:
    policy = PolicyConfig(kl_coef=0.0)
    deferring = {mode: policy.may_defer_log_probs(job(mode).actor) for mode in ("off", "R2", "R3")}
    assert deferring == {"off": True, "R2": False, "R3": True}


def test_routes_of_old_log_probs_stay_on_the_rank_for_its_updates() -> None:
    micro_batches = [batch_of([sample(n)]) for n in (2, 3)]
    routes_TLk = torch.ones(3, 1, 2, dtype=torch.int16)
    outputs = [
        TokenOutputs(log_probs_K=torch.zeros(n), entropy_K=torch.zeros(n), routes_TLk=routes)
        for n, routes in ((2, routes_TLk), (3, None))
    ]
    engine: Any = SimpleNamespace(log_probs=lambda *_, **__: outputs)
    log_probs(engine, micro_batches, temperature=1.0, adapters=True)
    assert [micro.per_token.get("routes") is routes_TLk for micro in micro_batches] == [True, False]
