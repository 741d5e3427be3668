"""A pretrained model (SmolLM2-135M-Instruct) on real text: what random weights and made-up words hide."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from csv import DictReader
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing import run_script
from rl_data import DataConfig, load_pairs, load_prompts, load_tokenizer
from rl_data.lost_characters import LostCharacters, compared
from rl_data.package_index import FetchError
from rl_data.tasks.fetched import fetch
from rl_runtime.training.ledger import read_samples
from tests.real_model_game import RETORTS
from tests.run_folders import check_ledger, exact_metrics, metrics_rows, only, rollouts

QUESTIONS = [
    "What is 7 + 5?",
    "Name the capital of France.",
    "Was ist 12 × 7? Antworte mit «Größe».",
    "日本の首都はどこですか。",
    "Say 🙂🏳️‍🌈 and e\u0301, then stop.",
    "كم عدد أيام الأسبوع؟",
    "def f(x):\n\treturn x  # two\u00a0spaces",
    "  Is <|im_end|> a word?\r\n",
]
MAX_TOKENS = 48
# On one worker: to fetch the model takes a minute, in which the others have tests to run.
fetches = pytest.mark.xdist_group("fetched")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return fetch("fetched:smollm2")
    except FetchError as error:
        pytest.skip(f"no model: {error}")


@pytest.fixture(scope="module")
def prompts(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": text, "answer": "#### 1"}) + "\n" for text in QUESTIONS))
    return load_prompts([file], load_tokenizer(smollm2), DataConfig(max_prompt_length=128))


@fetches
@pytest.mark.long
def test_questions_are_in_their_prompts_to_the_last_character(smollm2: Path, prompts: list[Any]) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert len(prompts) == len(QUESTIONS)
    for prompt, question in zip(prompts, QUESTIONS, strict=True):
        assert f"<|im_start|>user\n{question}<|im_end|>\n" in prompt.text
        assert prompt.text.endswith("<|im_start|>assistant\n")
        assert tokenizer.decode(prompt.token_ids) == prompt.text
        assert prompt.token_ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == prompt.text.count(
            "<|im_start|>"
        )


MISSING_BYTES = frozenset(b"\x04\x06\x13\x14\x16\x1d\xf1\xf2")
"""Bytes of UTF-8 that the vocabulary has no token for, and that the tokenizer drops without a word."""


@fetches
@pytest.mark.long
def test_text_comes_back_from_its_tokens(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)

    characters = LostCharacters(tokenizer)

    @settings(deadline=None, max_examples=200)
    @given(text=st.text(max_size=60), more=st.text(alphabet="\x04\x1d\U00050000", max_size=2))
    def check(text: str, more: str) -> None:
        text += more
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if MISSING_BYTES & set(text.encode()):
            assert characters.lost(text, ids) >= compared(more)
            assert tokenizer.decode(ids) != text
        else:
            assert characters.lost(text, ids) == {}
            assert tokenizer.decode(ids) == text

    check()
    assert tokenizer.decode(tokenizer("a\x04b")["input_ids"]) == "ab"


@fetches
@pytest.mark.long
@pytest.mark.parametrize("ends", [True, False])
def test_turns_continue_with_the_tokens_of_the_whole_conversation(smollm2: Path, ends: bool) -> None:
    from rollout_vllm import ChatFormat

    tokenizer = load_tokenizer(smollm2)
    chat = ChatFormat(tokenizer)
    conversation: list[dict[str, str]] = []
    ids: list[int] = []
    for question, answer in zip(QUESTIONS, reversed(QUESTIONS), strict=True):
        turn: list[int] = []
        if conversation:
            content = conversation[-1]["content"]
            turn = tokenizer(content + "<|im_end|>" * ends, add_special_tokens=False)["input_ids"]
            assert chat.text(turn) == content
        conversation.append({"role": "user", "content": question})
        ids += [*turn, *chat.context_ids(turn, question)] if turn else chat.prompt_ids(question)
        rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids) == rendered
        assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
        # A turn is sampled behind the line break of the template; encoded again, spaces at its start would join it.
        conversation.append({"role": "assistant", "content": answer.lstrip()})


def served(folder: Path, requests: list[Any], log_dir: Path, **sampling: Any) -> list[Any]:
    """Samples of a float32 server of this folder."""
    from rollout_vllm import RolloutClient, RolloutConfig, SamplingConfig, ServerGroup

    config = RolloutConfig(max_model_len=256, kv_cache_gib=0.3, dtype="float32", cpu_threads=1, startup_timeout_s=400.0)
    with ServerGroup.launch(folder, config, log_dir=log_dir) as servers:
        servers.wait_ready()
        with RolloutClient(servers.endpoints, config) as client:
            groups = client.generate_blocking(requests, SamplingConfig(**sampling))
    assert [failure for group in groups for failure in group.failures] == []
    return [sample for group in groups for sample in group.samples]


def requests_of(prompts: list[Any]) -> list[Any]:
    from rollout_vllm import Request

    return [Request(prompt_id=one.id, prompt_ids=list(one.token_ids), seed=7 * i) for i, one in enumerate(prompts)]


@pytest.fixture(scope="module")
def samples(smollm2: Path, prompts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Two responses to each question at temperature 1."""
    folder = tmp_path_factory.mktemp("server")
    return served(smollm2, requests_of(prompts), folder, n=2, max_tokens=MAX_TOKENS)


def log_probs_of_ranks(folder: Path, samples: list[Any], dtype: str, work: Path) -> list[np.ndarray]:
    (work / "samples.json").write_text(
        json.dumps([[one.prompt_ids.tolist(), one.response_ids.tolist()] for one in samples])
    )
    worker = Path(__file__).with_name("real_model_worker.py")
    text = run_script(worker, folder, work / "samples.json", dtype, timeout_s=600)
    line = next(line for line in text.splitlines() if line.startswith("log-probs "))
    return [np.array(row) for row in json.loads(line.removeprefix("log-probs "))]


def stated(name: str, log_probs: list[np.ndarray], samples: list[Any]) -> tuple[float, float, float]:
    """Mean and largest difference of a token, and the largest of a whole response; prints them."""
    rows = [theirs - one.log_probs for theirs, one in zip(log_probs, samples, strict=True)]
    tokens = np.abs(np.concatenate(rows))
    mean, largest, sequence = float(tokens.mean()), float(tokens.max()), max(abs(float(row.sum())) for row in rows)
    print(f"{name}: token {mean:.2g} (largest {largest:.2g}), response {sequence:.2g}; {tokens.size} tokens")
    return mean, largest, sequence


@pytest.mark.slow
@pytest.mark.thorough
def test_log_probs_of_servers_and_ranks_agree_on_real_distributions(
    smollm2: Path, samples: list[Any], tmp_path: Path
) -> None:
    mean, largest, sequence = stated("float32", log_probs_of_ranks(smollm2, samples, "float32", tmp_path), samples)
    assert mean < 1e-5
    assert largest < 1e-3
    assert sequence < 1e-3
    mean, largest, sequence = stated("bfloat16", log_probs_of_ranks(smollm2, samples, "bfloat16", tmp_path), samples)
    assert 1e-4 < mean < 0.05, "the ranks of bfloat16 round"
    assert largest < 1


@pytest.mark.slow
@pytest.mark.thorough
def test_responses_end_with_the_end_token_or_at_the_limit(smollm2: Path, samples: list[Any]) -> None:
    end = load_tokenizer(smollm2).eos_token_id
    assert load_tokenizer(smollm2).convert_ids_to_tokens(end) == "<|im_end|>"
    for sample in samples:
        ids = sample.response_ids.tolist()
        assert end not in ids[:-1]
        assert (sample.finish_reason == "stop") == (ids[-1] == end)
        assert (sample.finish_reason == "length") == (len(ids) == MAX_TOKENS and ids[-1] != end)
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}, "both ends occur"


GRPO = (
    "preset=smollm2",
    "overlay=two_cores",
    "actor.dtype=float32",  # in bfloat16, log-probs of servers and ranks differ by 0.05 on average
    *("rollout.dtype=float32", "rollout.deterministic=true", "batch.train_batch_size=2", "batch.mini_batch_size=2"),
    *("sampling.n=2", "sampling.max_tokens=24"),
    "algorithm.entropy_coef=0.01",  # a gradient even where all answers are equally wrong
    "trainer.total_training_steps=2",
)
"""Two steps of at most 24 tokens a response in float32."""


@pytest.mark.e2e
@pytest.mark.thorough
def test_a_run_resumes_to_the_bit_and_transformers_and_vllm_load_its_export(
    smollm2: Path, prompts: list[Any], tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    arguments = [
        *GRPO,
        f"model.path={smollm2}",
        *("trainer.num_ranks=1", "batch.mini_batch_size=1", "sampling.n=4", "trainer.save_freq=1"),
        *("trainer.val_before_train=false", "trainer.val_after_train=false"),
        *("reward.method=strict", 'data.instruction=""'),  # nothing tells the model to write ####
    ]
    whole = start_app(tmp_path / "whole", *arguments)
    assert whole.finish() == 0, whole.output
    assert "warning: reward.method: a response without #### scores 0" in whole.output
    assert "in which the reward reads no answer (reward.method=flexible reads the last number): score 0" in whole.output
    stopped = start_app(tmp_path / "stopped", *arguments)
    stopped.wait_for("step 1/2")
    stopped.press_ctrl_c()
    assert stopped.finish() in (0, 130), stopped.output
    first = only((tmp_path / "stopped").iterdir())
    if len(metrics_rows(first)) == 1:  # the signal may come too late for step 2
        resumed = start_app(tmp_path / "resumed", *arguments, "trainer.resume=auto", f"trainer.resume_from={first}")
        assert resumed.finish() == 0, resumed.output
        first = only((tmp_path / "resumed").iterdir())
    run = only((tmp_path / "whole").iterdir())
    expected, repeated = exact_metrics(run), exact_metrics(first)
    assert repeated == {step: expected[step] for step in repeated}
    assert "2" in repeated
    weights = only((run / "model").glob("*.safetensors"))
    assert weights.read_bytes() == (first / "model" / weights.name).read_bytes()
    for row in metrics_rows(run):
        print({name: row[name] for name in row if "mismatch" in name})
        assert float(row["rollout/log_prob_mismatch"]) < 1e-4
        assert float(row["actor/grad_norm"]) > 0
    again = served(run / "model", requests_of(prompts[:4]), tmp_path, n=1, max_tokens=16)
    assert stated("exported", log_probs_of_transformers(run / "model", again), again)[1] < 1e-3
    moved = np.concatenate(log_probs_of_transformers(smollm2, again)) - np.concatenate([one.log_probs for one in again])
    assert np.abs(moved).max() > 1e-3, "two steps changed nothing"


def log_probs_of_transformers(folder: Path, samples: list[Any]) -> list[np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        for one in samples:
            logits_LV = model(torch.tensor([one.token_ids.tolist()])).logits[0, one.prompt_ids.size - 1 : -1]
            chosen = logits_LV.log_softmax(-1).gather(1, torch.tensor(one.response_ids.tolist())[:, None])
            rows.append(chosen[:, 0].numpy())
    return rows


HARNESSES = {
    "openai_agents": "agents",
    "pydantic_agent": "pydantic_ai",
    "smol": "smolagents",
    "mini_swe": "minisweagent",
}
"""Example -> the library that it needs; .ci/run has their releases."""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_in_harnesses_of_others_every_token_has_the_log_prob_of_its_path(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout_vllm import (
        AgentRollout,
        ChatFormat,
        Request,
        RolloutClient,
        RolloutConfig,
        SamplingConfig,
        ServerGroup,
        agent_spec,
        run_episodes,
    )

    for library in HARNESSES.values():
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples" / "harnesses"))
    config = RolloutConfig(
        max_model_len=4096, kv_cache_gib=1.0, dtype="float32", cpu_threads=1, startup_timeout_s=400.0
    )
    question = ({"role": "user", "content": "How much is 17 + 25?"},)
    prompt = SimpleNamespace(messages=question, ground_truth="42")
    chat, limits = ChatFormat(load_tokenizer(smollm2)), SamplingConfig(n=2, max_tokens=MAX_TOKENS)

    async def play(client: Any) -> dict[str, list[Any]]:
        samples = {}
        for example in HARNESSES:
            spec = agent_spec(f"{example}:solve", start_timeout_s=300.0)
            rollout = AgentRollout(spec=spec, chat=chat, max_turns=3, max_prompt_tokens=3900)
            requests = [Request(prompt_id=example, prompt_ids=[1], prompt=prompt, seed=1)]
            play_one = partial(play_with, rollout)
            (group,) = await run_episodes(client, requests, play_one, limits)
            assert not group.failures, group.failures[0].message
            samples[example] = list(group.samples)
        return samples

    with ServerGroup.launch(smollm2, config, log_dir=tmp_path) as servers:
        servers.wait_ready()
        with RolloutClient(servers.endpoints, config) as client:
            played = asyncio.run(play(client))
    for example, samples in played.items():
        paths = [path for sample in samples for path in sample.paths]
        theirs = log_probs_of_transformers(smollm2, paths)
        errors = [(row - one.log_probs)[one.response_mask] for row, one in zip(theirs, paths, strict=True)]
        tokens = np.abs(np.concatenate(errors))
        print(f"{example}: {len(paths)} paths, {tokens.size} tokens, log-probs differ by at most {tokens.max():.2g}")
        assert tokens.size == sum(sample.num_generated for sample in samples)
        assert tokens.max() < 1e-3


async def play_with(rollout: Any, episode: Any) -> Any:
    """The score that the agent gives the episode."""
    return await rollout(episode, episode.prompt)


def run_of(app: str, folder: Path, *keys: str) -> Path:
    """The folder of a run of this app that succeeded."""
    output = "output_dir" if app == "evaluate" else "trainer.output_dir"
    command = [sys.executable, "-m", f"apps.{app}.main", f"{output}={folder}", *keys]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True, timeout=600)
    return only(folder.iterdir())


NUM_ADAPTER_WEIGHTS = 8 * 30 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
"""Rank 8, 30 layers: in and out of the queries and the output, keys and values, the three of the MLP."""
ONE_RANK = "one rank"
ZERO_RUNS = {
    ONE_RANK: ("trainer.num_ranks=1", "engine.zero.stage=2"),
    **{f"ZeRO-{stage}": ("trainer.num_ranks=2", f"engine.zero.stage={stage}") for stage in (1, 2, 3)},
}


@pytest.fixture(scope="module")
def supervised(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs of the same two supervised steps, with two solutions a step."""
    arguments = (
        "preset=small",
        f"model.path={smollm2}",
        *("supervised.files=[fetched:gsm_symbolic/train]", "supervised.steps=2", "supervised.batch_size=2"),
        *("supervised.num_samples=0", "engine.dtype=float32", "supervised.optim.warmup_steps=0", "trainer.device=cpu"),
        "trainer.save_freq=0",
    )
    folder = tmp_path_factory.mktemp("supervised")
    return {name: run_of("sft", folder / name, *arguments, *keys) for name, keys in ZERO_RUNS.items()}


@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_one_rank_and_all_zero_stages_of_two_take_the_same_steps(supervised: dict[str, Path]) -> None:
    values = {
        name: [[float(row[key]) for key in ("sft/loss", "sft/grad_norm")] for row in metrics_rows(run)]
        for name, run in supervised.items()
    }
    print(values)
    (first_loss, _), (second_loss, _) = values[ONE_RANK]
    assert 0.5 < second_loss < 3, "the model has read such text before"
    assert first_loss != second_loss
    for name, steps in values.items():
        np.testing.assert_allclose(steps, values[ONE_RANK], rtol=1e-5, err_msg=name)


@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_adapters_alone_reach_the_servers_and_merged_checkpoints_evaluate_alike(
    supervised: dict[str, Path], tmp_path: Path
) -> None:
    """A supervised model, GRPO of its adapters by two ranks at ZeRO-3, then `plinth evaluate` of both checkpoints."""
    run = run_of(
        "grpo",
        tmp_path / "grpo",
        *GRPO,
        f"model.path={supervised['ZeRO-2'] / 'model'}",
        *("trainer.num_ranks=2", "actor.zero.stage=3", "actor.lora.rank=8", "actor.optim.lr=3e-4"),
        *("rollout.max_lora_rank=8", "data.max_val_prompts=16", "validation.max_tokens=24", "trainer.save_freq=1"),
        "trainer.keep_checkpoints=2",
    )
    start, *steps = metrics_rows(run)
    for row in steps:
        print({name: row[name] for name in row if "mismatch" in name or name == "sync/num_bytes"})
        assert float(row["rollout/log_prob_mismatch"]) < 1e-4
        assert float(row["actor/grad_norm"]) > 0
        assert float(row["sync/num_bytes"]) == 4 * NUM_ADAPTER_WEIGHTS
    after = float(steps[-1]["val/accuracy"])
    folder = run_of(
        "evaluate",
        tmp_path / "evaluate",
        f"checkpoints.folder={run}",
        *("data.max_val_prompts=16", "reward.method=flexible", "sampling.temperature=0", "sampling.max_tokens=24"),
        *("rollout.dtype=float32", "rollout.deterministic=true"),
    )
    rows = list(DictReader((folder / "results.tsv").open(), delimiter="\t"))
    assert [(row["num_samples"], row["num_failed"]) for row in rows] == [("1", "0")] * 32
    right = {step: sum(int(row["num_right"]) for row in rows if row["step"] == step) for step in ("1", "2")}
    print(start["val/accuracy"], right, after)
    assert right["2"] == round(16 * after)
    first, second = (
        [
            sample["response"]
            for record in map(json.loads, (folder / "samples.jsonl").open())
            for sample in record["samples"]
            if record["step"] == step
        ]
        for step in (1, 2)
    )
    assert first != second, "the second step changed nothing"


@pytest.mark.e2e
@pytest.mark.thorough
def test_turns_of_an_environment_continue_the_tokens_of_the_chat_template(smollm2: Path, tmp_path: Path) -> None:
    run = run_of(
        "grpo",
        tmp_path,
        *GRPO,
        f"model.path={smollm2}",
        *("trainer.num_ranks=1", "sampling.max_tokens=160", "rollout.max_model_len=288"),
        *("trainer.total_training_steps=1", "episode.environment=tests.real_model_game:Doubter"),
        *("trainer.val_before_train=false", "trainer.val_after_train=false"),
    )
    (row,) = metrics_rows(run)
    assert float(row["rollout/num_failed"]) == 0
    assert float(row["rollout/log_prob_mismatch"]) < 1e-4, "ranks and servers read other tokens"
    records = rollouts(run)
    tokenizer = load_tokenizer(smollm2)
    contexts = [f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in RETORTS]
    written = [re.sub("<[|].*?[|]>", "", context) for context in contexts]  # records leave special tokens out
    for record in records:
        rest, num_retorts = record["response"], record["num_turns"] - 1
        for text in written[:num_retorts]:
            _, separator, rest = rest.partition(text)
            assert separator, record
        assert not any(text in rest for text in written)
        num_tokens = sum(len(tokenizer(context)["input_ids"]) for context in contexts[:num_retorts])
        assert record["num_context_tokens"] == num_tokens
    assert max(record["num_turns"] for record in records) == len(RETORTS) + 1


SUMS = ((17, 25), (3, 4), (61, 8), (40, 2), (12, 30), (9, 9), (55, 44), (81, 6))
ON_TWO_RANKS = (
    *("supervised.steps=2", "supervised.batch_size=4", "supervised.optim.warmup_steps=0", "supervised.num_samples=0"),
    *("engine.dtype=float32", "engine.zero.stage=3", "trainer.num_ranks=2", "trainer.device=cpu"),
    *("trainer.save_freq=0", "trainer.test_freq=1"),
)
RL = (
    *("data.train=[fetched:sums/train]", "data.val=[fetched:sums/val]", "data.max_prompt_length=96"),
    *("batch.train_batch_size=2", "batch.mini_batch_size=2", "sampling.n=2", "sampling.max_tokens=24"),
    *("actor.dtype=float32", "actor.zero.stage=2", "rollout.dtype=float32", "rollout.max_model_len=128"),
    *("trainer.num_ranks=1", "trainer.device=cpu", "trainer.save_freq=0", "trainer.export_model=false"),
    *("trainer.val_before_train=false", "trainer.val_after_train=false"),
)
"""Small steps of `plinth ppo` and `plinth distill` on one rank, in float32."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Right sums beside sums that are one more."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"question": f"What is {a} + {b}?", "chosen": f"{a} + {b} = {a + b}.", "rejected": f"{a} + {b} = {a + b + 1}."}
        for a, b in SUMS
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.e2e
@pytest.mark.thorough
def test_a_policy_starts_as_its_reference_and_learns_from_pairs(smollm2: Path, pairs: Path, tmp_path: Path) -> None:
    files = (f"model.path={smollm2}", f"supervised.files=[{pairs}]", f"supervised.val_files=[{pairs}]")
    samples = ("supervised.num_samples=2", "supervised.sample_tokens=4")
    run = run_of("dpo", tmp_path, *files, *ON_TWO_RANKS, *samples, "supervised.optim.lr=1e-5")
    rows = [row for row in metrics_rows(run) if row["val/loss"]]
    print([(row["val/loss"], row["val/accuracy"]) for row in rows])
    assert float(rows[0]["val/loss"]) == pytest.approx(np.log(2), abs=1e-6)
    assert abs(float(rows[0]["val/chosen_reward"])) < 1e-5
    assert float(rows[-1]["val/loss"]) < np.log(2) - 0.01
    assert (run / "model" / "model.safetensors").is_file()
    assert len((run / "rollouts" / "step_000002.jsonl").read_text().splitlines()) == 2


@pytest.fixture(scope="module")
def reward_model(smollm2: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a reward model that two ranks train at ZeRO-3."""
    files = (f"model.path={smollm2}", f"supervised.files=[{pairs}]", f"supervised.val_files=[{pairs}]")
    return run_of("reward", tmp_path_factory.mktemp("reward"), *files, *ON_TWO_RANKS, "supervised.optim.lr=1e-5")


@pytest.mark.e2e
@pytest.mark.thorough
def test_transformers_gives_the_scores_of_a_reward_model(reward_model: Path, pairs: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    rows = [row for row in metrics_rows(reward_model) if row["val/loss"]]
    model = AutoModelForSequenceClassification.from_pretrained(reward_model / "model", dtype=torch.float32)
    tokenizer = load_tokenizer(reward_model / "model")
    with torch.no_grad():
        margins = [
            chosen - rejected
            for chosen, rejected in (
                [float(model(torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0, 0]) for one in both]
                for both in ((pair.chosen, pair.rejected) for pair in load_pairs([pairs], tokenizer, DataConfig()))
            )
        ]
    print([(row["val/loss"], row["val/accuracy"], row["val/margin"]) for row in rows], np.mean(margins))
    assert float(rows[-1]["val/margin"]) == pytest.approx(np.mean(margins), abs=1e-3)
    assert float(rows[-1]["val/loss"]) < float(rows[0]["val/loss"])


@pytest.mark.e2e
@pytest.mark.thorough
def test_ppo_with_a_reward_model_trains_on_samples_of_the_version_before(
    smollm2: Path, reward_model: Path, tmp_path: Path
) -> None:
    run = run_of(
        "ppo",
        tmp_path,
        *RL,
        f"model.path={smollm2}",
        f"reward.model={reward_model / 'model'}",
        *("critic.dtype=float32", "critic.zero.stage=2", "actor.optim.lr=1e-4", "trainer.total_training_steps=3"),
        *("trainer.max_staleness=1", "sync.running_requests=wait"),
    )
    samples = read_samples(run)
    check_ledger(samples, steps=3, groups=2, samples=2, max_staleness=1)
    assert {row.step - 1 - int(row.oldest_version) for row in samples} == {0, 1}
    rows = metrics_rows(run)
    for row in rows:
        print({name: row[name] for name in row if "mismatch" in name or name.startswith(("critic/", "actor/grad"))})
        assert float(row["rollout/log_prob_mismatch"] or 0) < 1e-4, "a token has the version of other weights"
        assert float(row["critic/vf_loss"]) > 0
        assert float(row["critic/grad_norm"]) > 0
        assert float(row["critic/score/max"]) > float(row["critic/score/min"])
    assert max(float(row["rollout/log_prob_mismatch_stale"] or 0) for row in rows) > 1e-4


@pytest.mark.e2e
@pytest.mark.thorough
def test_a_student_differs_from_itself_as_its_teacher_by_rounding_until_it_moves(smollm2: Path, tmp_path: Path) -> None:
    """The teacher is a server, whose log-probs of the sampled tokens are compared with those of the rank."""
    run = run_of(
        "distill",
        tmp_path,
        *RL,
        *(f"model.path={smollm2}", f"teacher.model={smollm2}", "trainer.total_training_steps=2"),
        *("teacher.server.dtype=float32", "teacher.server.kv_cache_gib=0.3", "teacher.server.cpu_threads=1"),
        *("algorithm.entropy_coef=0.01", "actor.optim.lr=1e-4"),
    )
    first, second = (abs(float(row["teacher/kl"])) for row in metrics_rows(run))
    print(first, second)
    assert first < 1e-4
    assert second > 1e-2
