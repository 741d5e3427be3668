"""Configurations that the GRPO app refuses before any process starts; its check runs in this process."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from apps.grpo.config import GrpoConfig
from apps.grpo.main import check
from benchmarks.random_model import write_random_model
from rl_runtime import InputError, ResolvedConfig, resolve_job
from rl_runtime.launch import auto_address
from rl_runtime.ranks.environment import cache_variables
from run_kit import load_config

DEMO = Path(__file__).resolve().parents[1] / "apps" / "grpo" / "presets" / "demo.yaml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.n=1"], "sampling.n"),
        (["sampling.temperature=0", "sampling.n=2"], "temperature"),
        (["algorithm.kl_coef=.nan"], "kl_coef"),
        (["algorithm.advantage=gae"], "^algorithm.*advantage.*the PPO app"),
        (["algorithm.advantage=rlo"], "algorithm.advantage"),
        (["algorithm.overlong_penalty=1", "algorithm.overlong_buffer=21"], "^algorithm.overlong_buffer"),
        (["algorithm.advantage=reinforce_pp", "dynamic_sampling.max_rounds=1"], "dynamic_sampling.max_rounds"),
        (["algorithm.loss=apps.grpo.calculator:nobody"], "algorithm.loss is .* no function 'nobody'"),
        (["algorithm.loss=apps.grpo.calculator:calculate"], r"cannot be called as calculate\(log_probs_K, batch\)"),
        (["reward.score=0"], "score"),
        (["reward.format_score=1.0"], "format_score"),
        (["task.num_train=0"], "num_train"),
        (["trainer.seed=-1"], "seed"),
        (["trainer.step_timeout_s=0"], "step_timeout_s"),
        (["trainer.experiment=a b"], "experiment"),
        (["trainer.output_dir="], "output_dir"),
        (["warm_start.steps=5"], r"^warm_start.*optim\.warmup_steps"),
        (
            ["trainer.total_training_steps=5", "actor.optim.schedule=cosine", "actor.optim.warmup_steps=10"],
            r"^actor.*optim\.warmup_steps",
        ),
        (["actor.optim.total_steps=7"], "actor.optim.total_steps"),
        (["actor.dropout=true"], "^actor.dropout"),
        (["sampling.max_tokens=64"], "^rollout.max_model_len"),
        (["validation.max_tokens=64"], "^rollout.max_model_len"),
        (["data.max_prompt_length=500"], "^rollout.max_model_len"),
        (["data.val=some.parquet"], "^model.path"),
        (["warm_start.files=some.parquet"], "^warm_start.files"),
        (["rollout.device=cuda"], "rollout.device"),
        (["rollout.max_lora_rank=8"], "^rollout.max_lora_rank"),
        (["rollout.max_lora_rank=8", "actor.lora.rank=16"], "^actor.lora.rank"),
        (["rollout.max_lora_rank=9", "actor.lora.rank=4"], "^rollout.max_lora_rank: got 9"),
        (["sync.transport=nccl"], "^sync.*transport"),
        (["trainer.device=cuda"], "GPUs"),
        (["trainer.ray_address=cluster"], "^trainer.ray_address"),
        (["trainer.ray_address=127.0.0.1:9"], "^trainer.ray_address"),
        (["trainer.ray_address=auto"], "^trainer.ray_address"),
        (["trainer.ranks_per_node=0"], "^trainer.ranks_per_node"),
        (["rollout.urls=http://127.0.0.1:9"], "^rollout.urls"),
        (["rollout.urls=http://198.51.100.7:9", "sync.transport=shm"], "^sync.*transport"),
        (["reward.url=http://127.0.0.1:9/score"], "^reward.url"),
        (["reward.url=http://a:1", "reward.service=judge", "reward.judge_prompt={answer}"], "judge_prompt"),
        (
            [
                "trainer.save_freq=1",
                "actor.zero.stage=3",
                "actor.zero.offload.optimizer=nvme",
                "actor.zero.offload.nvme_path=/mnt",
            ],
            "^actor.zero.offload.optimizer",
        ),
        (["trainer.keep_every=-1"], "keep_every"),
        (["trainer.max_server_restarts=-1"], "max_server_restarts"),
        (["episode.function=apps.grpo.calculator:nobody"], "episode.function is .*no function 'nobody'"),
        (["episode.function=apps.grpo.calculator:calculate"], "no coroutine function"),
        (["episode.timeout_s=0"], "timeout_s"),
        (["reward.function=apps.grpo.calculator:calculate"], r"cannot be called as calculate\(response_text, prompt\)"),
        (["reward.service=judge"], "judge_prompt"),
        (["oversampling.extra_prompts=-1"], "extra_prompts"),
        (["episode.environment=apps.grpo.stones:Nobody"], "episode.environment is .*no class 'Nobody'"),
        (["episode.environment=apps.grpo.calculator:calculate"], r"which has no method reset\(prompt\)"),
        (["episode.environment=apps.grpo.stones:StoneGame", "episode.options={size: 3}"], "episode.options is .*size"),
        (
            ["episode.environment=apps.grpo.stones:StoneGame"],
            r"^episode.environment.*train:0.*KeyError: 'stones'",
        ),
        (["episode.environment=a:B", "episode.function=a:b"], "^episode.environment"),
        (["episode.options={size: 3}"], "^episode.options"),
        (["episode.max_turns=0"], "max_turns"),
        (["trainer.keep_best=-1"], "keep_best"),
        (["trainer.resume=auto", "trainer.resume_from=nowhere"], "^trainer.resume_from"),
        (["trainer.resume_from=nowhere"], "^trainer.resume_from"),
        (["trainer.checkpoint_url=nothing://runs"], "^trainer.checkpoint_url.*Protocol not known"),
        (
            ["trainer.checkpoint_url=file:///proc/runs"],
            "^trainer.checkpoint_url.*cannot be written",
        ),
        (["trainer.checkpoint_url=memory://runs"], "^trainer.checkpoint_url"),
        (["actor.zero.stage=2", "actor.zero.offload.param=cpu"], "offload.param"),
        (
            ["actor.zero.stage=3", "actor.zero.offload.optimizer=nvme", "actor.zero.offload.nvme_path=/no/where"],
            "^actor.zero.offload.nvme_path",
        ),
        (["trainer.output_dir=a[1]"], "^trainer.output_dir"),
        (["model.path=a*b", "warm_start.steps=0"], "^model.path: .*no such folder"),
        (["model.path=" + "a" * 5000, "warm_start.steps=0"], "^model.path: .*no such folder"),
        (["trainer.resume=auto", "trainer.resume_from="], "^trainer.resume_from"),
        (["trainer.resume=auto", "trainer.resume_from=" + "a" * 5000], "^trainer.resume_from: .*File name too long"),
        (["trainer.resume=auto", "trainer.output_dir=" + "a" * 5000], "^trainer.output_dir: .*File name too long"),
        (["trainer.num_ranks=1099511627776"], "^trainer.num_ranks"),
        (["rollout.num_servers=1099511627776"], "^rollout.num_servers"),
        (["rollout.host=198.51.100.7"], "^rollout.host: got '198.51.100.7'"),
        (["rollout.host=" + "a" * 5000], "^rollout.host: got 'aaaa"),
        (["sampling.stop_token_ids=[-1]"], "sampling.stop_token_ids"),
        (
            ["rollout.urls=http://127.0.0.1:9", "rollout.api_key_file=~nobody-here/key"],
            "^rollout.api_key_file",
        ),
        (
            ["rollout.kv_cache_gib=1e5", "rollout.num_servers=2"],
            "^rollout.kv_cache_gib",
        ),
        (
            ["reward.url=http://127.0.0.1:9", "reward.api_key_file=~nobody-here/key"],
            "^reward.api_key_file",
        ),
        (["trainer.step_timeout_s=1e10"], "trainer.step_timeout_s: got 10000000000.0; allowed: at most 1e.09 seconds"),
    ],
)
def test_refused(overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_address, "read_raylets", lambda _: iter(()))  # a cluster of this host would be joined
    with pytest.raises(ValueError, match=message):
        check(load_config(GrpoConfig, presets=[DEMO], overrides=overrides))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trl", r"reward.function is own_rewards:trl, .* first prompt of training \(train:0\): TypeError: .*are TRL's"),
        ("nothing", "own_rewards:nothing, which gives no score .*: the reward is NoneType None, not a number"),
    ],
)
def test_a_reward_that_scores_nothing_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text(
        "def trl(prompts, completions, **kwargs):\n    return [float(len(one)) for one in completions]\n"
        "def nothing(response_text, prompt):\n    float(len(response_text))\n"
        "def strict(response_text, prompt):\n    return float(response_text.split('#### ')[1] == prompt.ground_truth)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for warm_start in ("0", "400"):
        overrides = [f"reward.function=own_rewards:{name}", f"warm_start.steps={warm_start}"]
        with pytest.raises(InputError, match=message):
            check(load_config(GrpoConfig, presets=[DEMO], overrides=overrides))
    good = check(load_config(GrpoConfig, presets=[DEMO], overrides=["reward.function=own_rewards:strict"]))
    assert not any("own_rewards" in line for line in good.lines)


@pytest.mark.parametrize(("name", "batched"), [("of_verl", False), ("of_trl", True), ("of_trl_chat", True)])
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
    why = r"sampling.top_p.* was chosen: samples are up to 1 policy versions old"
    with pytest.raises(InputError, match=why):
        chosen("trainer.max_staleness=1", "sampling.top_p=0.9")
    without = chosen("trainer.max_staleness=1", "sampling.top_p=0.9", "algorithm.rollout_correction.mode=none")
    assert not without.config.algorithm.rollout_correction.enabled
    assert chosen().config.algorithm.rollout_correction.mode is None


def test_a_home_that_cannot_be_written_is_refused_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", *cache_variables({})):
        monkeypatch.setenv(name, "restored after the test, also where it was not set")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    with pytest.raises(ValueError, match=r"/proc/nowhere/.cache/vllm cannot be written .*set HOME, XDG_CACHE_HOME"):
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
    overrides = [f"model.path={model}", f"data.train={tmp_path / 'train.parquet'}"]
    with pytest.raises(ValueError, match=r"data.train: .*train.parquet: row 1.*somebody/else"):
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
    with pytest.raises(ValueError, match="fetch it with `hf download somebody/else`"):
        check(
            load_config(GrpoConfig, presets=[DEMO], overrides=["model.path=somebody/else", data, "warm_start.steps=0"])
        )
