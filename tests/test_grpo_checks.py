"""Configurations that the GRPO app refuses before any process starts; its check runs in this process."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from apps.grpo.config import GrpoConfig
from apps.grpo.main import check
from benchmarks.random_model import write_random_model
from plinth_testing import raises
from rl_runtime import InputError, ResolvedConfig, resolve_job
from rl_runtime.launch import cluster
from rl_runtime.ranks.environment import cache_variables
from run_kit import load_config

DEMO = Path(__file__).resolve().parents[1] / "apps" / "grpo" / "presets" / "demo.yaml"


REFUSED = """
advantage: algorithm.advantage=gae
algorithm.advantage: algorithm.advantage=rlo
algorithm.loss: algorithm.loss=apps.grpo.calculator:nobody
algorithm.loss: algorithm.loss=apps.grpo.calculator:calculate
score: reward.score=0
format_score: reward.format_score=1.0
seed: trainer.seed=-1
step_timeout_s: trainer.step_timeout_s=0
step_timeout_s: trainer.step_timeout_s=1e10
output_dir: trainer.output_dir=
output_dir: trainer.output_dir=a[1]
warm_start.optim.warmup_steps: warm_start.steps=5
actor.optim.warmup_steps: trainer.total_training_steps=5 actor.optim.schedule=cosine actor.optim.warmup_steps=10
actor.optim.total_steps: actor.optim.total_steps=7
actor.dropout: actor.dropout=true
max_model_len: sampling.max_tokens=64
max_model_len: data.max_prompt_length=500
builtin:tiny: data.val=some.parquet
rollout.device: rollout.device=cuda
sampling.top_p: actor.match_servers=true sampling.top_p=0.9
actor.match_servers: rollout.speculative=ngram actor.match_servers=true
sampling.stop: rollout.speculative=ngram sampling.stop=[a]
sampling.min_p: rollout.speculative=ngram sampling.min_p=0.1
sampling.repetition_penalty: rollout.speculative=ngram sampling.repetition_penalty=1.1
rollout.urls: actor.match_servers=true rollout.urls=[http://127.0.0.1:9]
rollout.dtype: actor.match_servers=true actor.dtype=bfloat16
actor.compile: actor.match_servers=true actor.compile=true
actor.lora: actor.match_servers=true actor.lora.rank=8
max_lora_rank: rollout.max_lora_rank=8
max_lora_rank: rollout.max_lora_rank=8 actor.lora.rank=16
max_lora_rank: rollout.max_lora_rank=9 actor.lora.rank=4
sync.transport: sync.transport=nccl
GPU: trainer.device=cuda
actor.attention: trainer.device=cpu actor.attention=flash4
trainer.ray_address: trainer.ray_address=cluster
Ray cluster: trainer.ray_address=127.0.0.1:9
trainer.ray_address: trainer.ray_address=auto
ranks_per_node: trainer.ranks_per_node=0
num_ranks: trainer.num_ranks=1099511627776
num_servers: rollout.num_servers=1099511627776
mini_batch_size: trainer.num_ranks=2 batch.train_batch_size=3 batch.mini_batch_size=3 sampling.n=3
127.0.0.1:9: rollout.urls=http://127.0.0.1:9
one host: rollout.urls=http://198.51.100.7:9 sync.transport=shm
api_key_file: rollout.urls=http://127.0.0.1:9 rollout.api_key_file=~nobody-here/key
rollout.host: rollout.host=198.51.100.7
kv_cache_gib: rollout.kv_cache_gib=1e5 rollout.num_servers=2
kv_cache_gib: rollout.max_model_len=512 rollout.kv_cache_gib=0.0001
stop_token_ids: sampling.stop_token_ids=[-1]
reward.url: reward.url=http://127.0.0.1:9/score
api_key_file: reward.url=http://127.0.0.1:9 reward.api_key_file=~nobody-here/key
reward.function: reward.function=apps.grpo.calculator:calculate
offload: trainer.save_freq=1 actor.zero.stage=3 actor.zero.offload.optimizer=nvme actor.zero.offload.nvme_path=/mnt
nvme_path: actor.zero.stage=3 actor.zero.offload.optimizer=nvme actor.zero.offload.nvme_path=/no/where
keep_every: trainer.keep_every=-1
extra_prompts: oversampling.extra_prompts=-1
episode.function: episode.function=apps.grpo.calculator:nobody
episode.function: episode.function=apps.grpo.calculator:calculate
episode.environment: episode.environment=apps.grpo.stones:Nobody
reset: episode.environment=apps.grpo.calculator:calculate
episode.options: episode.environment=apps.grpo.stones:StoneGame episode.options={size:3}
stones: episode.environment=apps.grpo.stones:StoneGame
episode.options: episode.options={size:3}
episode.agent: episode.agent=apps.grpo.calculator:calculate
__call__: episode.agent=apps.grpo.stones:StoneGame
agent: episode.agent=a:b episode.function=a:b
call_format: episode.call_format=xml
isolated: episode.isolated=true
memory_gib: episode.memory_gib=1
run folder: trainer.resume=auto trainer.resume_from=nowhere
resume_from: trainer.resume_from=nowhere
resume_from: trainer.resume=auto trainer.resume_from=
resume_from: trainer.resume=auto trainer.resume_from=LONG
output_dir: trainer.resume=auto trainer.output_dir=LONG
checkpoint_url: trainer.checkpoint_url=nothing://runs
checkpoint_url: trainer.checkpoint_url=file:///proc/runs
model.path: model.path=a*b warm_start.steps=0
model.path: model.path=LONG warm_start.steps=0
"""
"""A word of the error, such as the key, and the settings that are refused."""


@pytest.mark.parametrize("line", REFUSED.split("\n")[1:-1])
def test_settings_that_cannot_work_are_refused_by_key(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "read_ray_address", lambda: None)  # a cluster of this host would be joined
    word, settings = line.split(": ", 1)
    overrides = settings.replace("LONG", "a" * 5000).replace("size:3", "size: 3").split(" ")
    if "{size:" in overrides:  # the value has a blank
        overrides = [*overrides[:-2], " ".join(overrides[-2:])]
    with pytest.raises(ValueError, match=re.escape(word)):
        check(load_config(GrpoConfig, presets=[DEMO], overrides=overrides))


FILES = {
    "empty.jsonl": "",
    "other.jsonl": '{"question": "a", "solution": "#### 1"}\n',
    "no_answer.jsonl": '{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "no answer here"}\n',
    "numbers.jsonl": '{"question": 1, "answer": "#### 1"}\n',
    "lines.csv": "question,answer\na,#### 1\n",
    "saved/dataset_dict.json": '{"splits": ["train", "test"]}',
    "good.jsonl": '{"question": "a", "answer": "#### 1"}\n',
}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("data.train=nowhere.parquet", "nowhere.parquet"),
        ("data.train=empty.jsonl", "empty.jsonl"),
        ("data.train=other.jsonl", "answer.*solution"),
        ("data.train=no_answer.jsonl", "line 2.*answer"),
        ("data.train=numbers.jsonl", "data.train.*question"),
        ("data.train=lines.csv data.columns.prompt=text reward.method=flexible", "text.*question, answer"),
        ("data.train=saved", "saved:train"),
        ("trainer.seed=1", "data.train"),
        ("data.train=good.jsonl model.path=bert actor.optim.lr=1e-6", "BertLMHeadModel cannot be trained"),
        ("data.train=good.jsonl model.path=empty", "tokenizer"),
        ("reward.function=quits:score", "reward.function.*SystemExit"),
        ("reward.function=broken:score", "reward.function.*SyntaxError"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    settings: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "quits.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "broken.py").write_text("def score(:\n")
    write_random_model("qwen3-tiny", tmp_path / "model")
    for name in ("bert", "empty"):  # a check before loading reads the headers of safetensors only
        (tmp_path / name).mkdir()
        save_file({}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 32} | SMALL))
    (tmp_path / "bert" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"(?s){words}"):
        check(
            load_config(GrpoConfig, overrides=["model.path=model", "trainer.total_training_steps=1", *settings.split()])
        )


SMALL = {"num_attention_heads": 2, "num_hidden_layers": 1}


def test_a_reward_with_the_parameters_of_another_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text(
        "def trl(prompts, completions, **kwargs):\n    return [float(len(one)) for one in completions]\n"
        "def strict(response_text, prompt):\n    return float(response_text.split('#### ')[1] == prompt.ground_truth)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for warm_start in ("0", "400"):
        overrides = ["reward.function=own_rewards:trl", f"warm_start.steps={warm_start}"]
        with pytest.raises(InputError) as refused:
            check(load_config(GrpoConfig, presets=[DEMO], overrides=overrides))
        assert refused.value.field == "reward.function"
    good = check(load_config(GrpoConfig, presets=[DEMO], overrides=["reward.function=own_rewards:strict"]))
    assert not any("own_rewards" in line for line in good.lines)


@pytest.mark.parametrize(("name", "batched"), [("of_verl", False), ("of_trl", True)])
def test_the_adapters_of_the_page_are_accepted(
    name: str, batched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "rewards.md").read_text()
    (block,) = re.findall(r"```python\n(from theirs import .*?)```", page, re.DOTALL)
    (tmp_path / "adapters.py").write_text(block)
    (tmp_path / "theirs.py").write_text(
        "def trl_reward(prompts, completions, **columns):\n"
        "    return [len(one if isinstance(one, str) else one[0]['content']) for one in completions]\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str.endswith('#### ' + ground_truth))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    overrides = [f"reward.function=adapters:{name}", f"reward.batched={str(batched).lower()}"]
    assert not any(
        "adapters" in line for line in check(load_config(GrpoConfig, presets=[DEMO], overrides=overrides)).lines
    )


def test_samples_of_older_policies_are_corrected_unless_that_means_nothing() -> None:
    """`trainer.max_staleness` chooses truncated importance weights, not for log-probs of another distribution."""

    def chosen(*overrides: str) -> ResolvedConfig[GrpoConfig]:
        return resolve_job(load_config(GrpoConfig, presets=[DEMO], overrides=overrides))

    ahead = chosen("trainer.max_staleness=1")
    assert ahead.config.algorithm.rollout_correction.mode == "truncate"
    assert "algorithm.rollout_correction.mode=truncate" in ahead.lines()[0]
    with raises(InputError, field="sampling.top_p"):
        chosen("trainer.max_staleness=1", "sampling.top_p=0.9")
    without = chosen("trainer.max_staleness=1", "sampling.top_p=0.9", "algorithm.rollout_correction.mode=none")
    assert not without.config.algorithm.rollout_correction.enabled
    assert chosen().config.algorithm.rollout_correction.mode is None


def test_a_home_that_cannot_be_written_is_refused_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PLINTH_CACHE_DIR", "XDG_CACHE_HOME", *cache_variables({})):
        monkeypatch.setenv(name, "restored after the test, also where it was not set")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    with raises(ValueError, value="/proc/nowhere/.cache/vllm"):
        check(load_config(GrpoConfig, presets=[DEMO], overrides=[]))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    check(load_config(GrpoConfig, presets=[DEMO], overrides=[]))


def test_the_demo_itself_is_accepted() -> None:
    placement = check(load_config(GrpoConfig, presets=[DEMO], overrides=[])).placement
    assert len(placement.ranks) == 2


def test_a_data_source_without_a_reward_is_refused_with_its_row(tmp_path: Path) -> None:
    model = write_random_model("qwen3-tiny", tmp_path / "model")
    rows = [
        {"data_source": source, "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}
        for source in ("openai/gsm8k", "somebody/else")
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    overrides = ["trainer.total_training_steps=1", f"model.path={model}", f"data.train={tmp_path / 'train.parquet'}"]
    with raises(ValueError, field="data.train"):
        check(load_config(GrpoConfig, presets=[], overrides=overrides))


def test_a_model_of_the_hub_is_found_where_its_download_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    stored = tmp_path / "models--somebody--tiny"
    write_random_model("qwen3-tiny", stored / "snapshots" / "0a1b")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("0a1b")
    rows = [{"question": "1+1?", "answer": "#### 2"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    data = f"data.train={tmp_path / 'train.parquet'}"
    check(load_config(GrpoConfig, presets=[DEMO], overrides=["model.path=somebody/tiny", data, "warm_start.steps=0"]))
    with raises(ValueError, field="model.path"):
        check(
            load_config(GrpoConfig, presets=[DEMO], overrides=["model.path=somebody/else", data, "warm_start.steps=0"])
        )
