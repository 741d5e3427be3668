"""Speculative decoding: the target model's distribution and log-probs, and drafts only where they save time."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_vllm_helpers import config_for_tests

from plinth_testing import raises, random_model, tiny_config, write_word_tokenizer
from rollout_vllm import Request, RolloutClient, RolloutConfig, RolloutConfigError, SamplingConfig, ServerGroup
from rollout_vllm.servers.command import server_arguments, server_environment
from rollout_vllm.servers.fast.drafting import DraftTrial, draft_where_it_pays
from rollout_vllm.servers.launch import check_launch
from rollout_vllm.servers.speculating import expand

STEPS = 4 * 16
"""Of a trial."""
VOCABULARY = 6


def run_steps(
    trial: DraftTrial, count: int, *, with_drafts_s: float, without_s: float, requests: int = 8
) -> list[bool]:
    """True for each of `count` steps that drafted. A drafted step makes two tokens for each request."""
    kinds, now = list[bool](), run_steps.clock  # type: ignore[attr-defined]
    for _ in range(count):
        drafts = trial.drafts
        kinds.append(drafts)
        now += with_drafts_s if drafts else without_s
        num_drafted = 3 * requests * drafts
        num_tokens = requests * (1 + drafts)
        trial.end_step(now, num_sequences=requests, num_tokens=num_tokens, num_drafted=num_drafted, decodes=True)
    run_steps.clock = now  # type: ignore[attr-defined]
    return kinds


run_steps.clock = 0.0  # type: ignore[attr-defined]


@given(with_drafts_s=st.floats(0.1, 10), without_s=st.floats(0.1, 10), requests=st.integers(1, 300))
def test_the_faster_kind_of_steps_is_used_after_a_trial(with_drafts_s: float, without_s: float, requests: int) -> None:
    lines = list[str]()
    trial = DraftTrial(lines.append)
    tried = run_steps(trial, STEPS + 1, with_drafts_s=with_drafts_s, without_s=without_s, requests=requests)
    assert sum(tried[:STEPS]) == STEPS // 2
    later = run_steps(trial, 1000, with_drafts_s=with_drafts_s, without_s=without_s, requests=requests)
    pays = with_drafts_s / 2 < without_s
    if abs(with_drafts_s / 2 - without_s) > 1e-3:
        assert later == [pays] * 1000
    assert len(lines) == 1
    again = run_steps(trial, 2 * STEPS, with_drafts_s=3 * without_s, without_s=without_s, requests=requests)
    assert {True, False} == set(again)  # another trial, in which drafts do not pay
    assert not any(run_steps(trial, 500, with_drafts_s=3 * without_s, without_s=without_s, requests=requests))


def test_each_number_of_requests_has_its_own_trial() -> None:
    trial = DraftTrial()
    run_steps(trial, STEPS + 1, with_drafts_s=9, without_s=1, requests=256)
    run_steps(trial, STEPS + 1, with_drafts_s=1, without_s=1, requests=4)
    assert all(run_steps(trial, 50, with_drafts_s=1, without_s=1, requests=5)[1:])
    assert not any(run_steps(trial, 50, with_drafts_s=1, without_s=1, requests=300)[1:])


def test_steps_that_compute_prompts_are_not_measured() -> None:
    trial = DraftTrial()
    for now in range(500):
        trial.end_step(float(now), num_sequences=8, num_tokens=8, num_drafted=0, decodes=False)
        assert trial.drafts


def test_a_server_neither_makes_nor_schedules_drafts_that_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    now, scheduled = 0.0, list[Any]()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: {})
    monkeypatch.setattr(Scheduler, "update_draft_token_ids", lambda _, drafts: scheduled.append(drafts.draft_token_ids))
    monkeypatch.setattr(GPUModelRunner, "propose_draft_token_ids", lambda _, output, sampled: [[1, 2]] * len(sampled))

    def replace(target: Any, **values: Any) -> Any:
        for name, value in values.items():
            monkeypatch.setattr(target, name, value)

    draft_where_it_pays(replace)
    made = list[list[int]]()
    for _ in range(STEPS + 40):
        drafts = scheduled[-1][0] if scheduled else []
        now += 3.0 if drafts else 1.0
        step = SimpleNamespace(
            num_scheduled_tokens={"a": 1 + len(drafts)},
            scheduled_spec_decode_tokens={"a": drafts},
            total_num_scheduled_tokens=1 + len(drafts),
        )
        Scheduler.update_from_output(None, step, SimpleNamespace(sampled_token_ids=[[5]]))  # type: ignore[arg-type]
        [ids] = GPUModelRunner.propose_draft_token_ids(None, step, [[5]])  # type: ignore[arg-type, call-arg, misc]
        made.append(ids)
        Scheduler.update_draft_token_ids(None, DraftTokenIds(["a"], [ids]))  # type: ignore[arg-type]
    assert [1, 2] in made
    assert made[-40:] == [[]] * 40
    assert scheduled[-40:] == [[[]]] * 40


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=6), data=st.data())
def test_each_draft_has_the_settings_of_its_request(counts: list[int], data: st.DataObject) -> None:
    values = data.draw(st.lists(st.sampled_from((0.0, 0.5, 2.0)), min_size=len(counts), max_size=len(counts)))
    result = expand(torch.tensor(values), torch.tensor(counts).cumsum(0), sum(counts), 0, 1)
    assert result.tolist() == [value or 1.0 for value, count in zip(values, counts, strict=True) for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "value"), [("deterministic", True), ("match_trainer", True), ("routes", True), ("urls", ("http://a:1",))]
)
def test_settings_that_drafts_do_not_meet_are_refused(name: str, value: Any) -> None:
    with raises(RolloutConfigError, field=name, value=value):
        RolloutConfig(speculative="ngram", **{name: value})
    with raises(RolloutConfigError, field=name, value=value):
        RolloutConfig(extra_args=('--speculative-config={"model": "draft"}',), **{name: value})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("0", "0")),
        ({"speculative": "ngram"}, ("1", "1")),
        ({"extra_args": ("--speculative_config", "{}")}, ("1", "0")),
    ],
)
def test_drafts_of_arguments_are_verified_by_request_and_not_tried(
    changes: dict[str, Any], expected: tuple[str, str]
) -> None:
    env = server_environment({}, RolloutConfig(**changes), device="cpu", api_key="", num_cores=2)
    assert (env["PLINTH_ROLLOUT_SPECULATIVE"], env["PLINTH_ROLLOUT_DRAFTING"]) == expected


def test_graphs_are_captured_for_steps_that_verify_drafts() -> None:
    config = RolloutConfig(speculative="ngram", speculative_tokens=3, max_num_seqs=8)
    arguments = server_arguments(config, "m", port=1, device="cuda")
    sizes = arguments[arguments.index("--cudagraph-capture-sizes") + 1 :]
    assert sizes[:5] == ["4", "8", "16", "32", "64"]


# ---- the real vLLM ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model of six tokens."""
    folder = tmp_path_factory.mktemp("small")
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = tiny_config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=1, pad_token_id=0, **sizes)
    model = random_model(config)
    model.save_pretrained(folder)
    write_word_tokenizer(folder, VOCABULARY, eos_token="w1", pad_token="w0", unk_token="w2")
    return folder, model


def test_recurrent_models_are_refused(small: tuple[Path, Any], tmp_path: Path) -> None:
    for file in small[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    check_launch(tmp_path, config_for_tests(speculative="ngram"))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "x", "linear_conv_kernel_dim": 4}')
    with raises(RolloutConfigError, field="speculative", value="ngram"):
        check_launch(tmp_path, config_for_tests(speculative="ngram"))


@pytest.fixture(scope="module")
def drafting(small: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerGroup]:
    config = config_for_tests(speculative="ngram", control_routes=True)
    env = {"NUMBA_DISABLE_JIT": "1"}  # compiling vLLM's search for drafts takes 20 CPU-seconds
    with ServerGroup.launch(small[0], config, log_dir=tmp_path_factory.mktemp("logs"), env=env) as group:
        group.wait_ready()
        yield group


def distribution(model: Any, ids: list[int], sampling: SamplingConfig) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1] / sampling.temperature
    if sampling.top_k > 0:
        logits[logits < logits.topk(sampling.top_k).values[-1]] = float("-inf")
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        probabilities[order[ordered.cumsum(0) - ordered >= sampling.top_p]] = 0
    return probabilities / probabilities.sum()


@pytest.mark.slow
@pytest.mark.long  # a server of its own
def test_tokens_have_the_distribution_and_the_log_probs_of_the_model(
    drafting: ServerGroup, small: tuple[Path, Any]
) -> None:
    """Chi-square of the first three tokens together: after each there are drafts, since the prompt has all pairs."""
    model = small[1]
    pairs = [token for pair in itertools.product(range(VOCABULARY), repeat=2) for token in pair]
    prompt = [*pairs, 3]
    sampling = SamplingConfig(n=250, max_tokens=3, temperature=0.6, top_k=4, top_p=0.95, ignore_eos=True)
    requests = [Request(prompt_id=f"p{i}", prompt_ids=prompt, seed=1000 * i) for i in range(4)]
    with RolloutClient(drafting.endpoints, config_for_tests()) as client:
        before = client.metrics()
        samples = [sample for group in client.generate_blocking(requests, sampling) for sample in group.samples]
        after = client.metrics()
    assert len(samples) == 1000
    assert after["accepted_tokens"] - before["accepted_tokens"] > 75
    assert after["draft_tokens"] - after["accepted_tokens"] > 75 + before["draft_tokens"] - before["accepted_tokens"]

    expected, log_probs = {(): 1.0}, dict[tuple[int, ...], float]()
    for _ in range(3):
        longer = dict[tuple[int, ...], float]()
        for ids, probability in expected.items():
            for token, share in enumerate(distribution(model, prompt + list(ids), sampling).tolist()):
                if share:
                    longer[(*ids, token)] = probability * share
                    log_probs[(*ids, token)] = float(torch.tensor(share).log())
        expected = longer
    for sample in samples[::25]:
        ids = tuple(sample.response_ids.tolist())
        theirs = [log_probs[ids[: i + 1]] for i in range(3)]
        assert sample.log_probs is not None
        assert sample.log_probs.tolist() == pytest.approx(theirs, abs=1e-4)
    seen = Counter(tuple(sample.response_ids.tolist()) for sample in samples)
    assert seen.keys() <= expected.keys()
    common = {ids for ids, probability in expected.items() if probability * len(samples) >= 5}
    cells = [(seen[ids], expected[ids] * len(samples)) for ids in common]
    rest = len(samples) - sum(count for count, _ in cells), len(samples) - sum(mean for _, mean in cells)
    cells += [rest] if rest[1] >= 5 else []
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    halves = torch.tensor([len(cells) - 1, statistic], dtype=torch.float64) / 2
    assert torch.special.gammaincc(*halves) > 1e-3, (statistic, len(cells))  # chance of a larger chi-square


@pytest.mark.slow
@pytest.mark.long  # a server of its own
def test_interrupted_responses_keep_their_accepted_drafts_and_log_probs(
    drafting: ServerGroup, small: tuple[Path, Any]
) -> None:
    prompt = [3, 4, 5, 3, 4]
    sampling = SamplingConfig(n=2, max_tokens=80, ignore_eos=True)
    requests = [Request(prompt_id=f"p{i}", prompt_ids=prompt, seed=100 * i) for i in range(4)]
    with RolloutClient(drafting.endpoints, config_for_tests()) as client:
        running = client.start(client.generate(requests, sampling))
        interrupted = 0
        for version in range(1, 4):
            time.sleep(0.1)
            client.run(client.pause())
            interrupted += any(
                sample.response_ids.size for group in client.partial_groups() for sample in group.samples
            )
            client.resume(version)
        groups = running.result()
    assert interrupted
    for group in groups:
        assert group.complete
        [sample, *_] = group.samples
        assert sample.response_ids.size == 80
        assert sum(span.num_tokens for span in sample.version_spans) == 80
        ids = torch.tensor([prompt + sample.response_ids.tolist()])
        with torch.no_grad():
            theirs = (
                small[1](ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
            )
        assert sample.log_probs is not None
        assert sample.log_probs.tolist() == pytest.approx(theirs[:, 0].tolist(), abs=1e-4)
