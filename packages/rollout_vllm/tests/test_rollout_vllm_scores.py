"""Scores of sampled tokens: the kernels under Triton's interpreter, in a process of its own, and on a GPU."""

import importlib.util
from typing import Any

import pytest
import torch
from rollout_vllm_helpers import FAST_PATHS

from plinth_testing import run_under_the_interpreter
from rollout_vllm.servers.patch import SCORES

CASES = """
import importlib, itertools
import torch
import scores

count = 0
sizes = [*itertools.product((1, 5), (7, 8191, 8192)), (2, 20_000)]
for (rows, size), dtype in itertools.product(sizes, (torch.float32, torch.bfloat16)):
    wide = (4 * torch.randn(rows, size + 3, generator=torch.Generator().manual_seed(size))).to(dtype)
    logits = wide[:, :size]  # rows with a stride of their own
    logits[0, : size // 2] = float("-inf")  # whole blocks of masked tokens
    tokens = torch.arange(rows) % (size - size // 2) + size // 2
    log_probs, ranks = scores.token_scores(logits, tokens)
    chosen = logits.gather(1, tokens[:, None])
    torch.testing.assert_close(
        log_probs.double(), logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0], rtol=0, atol=5e-6
    )
    assert ranks.tolist() == (logits >= chosen).sum(1).tolist()
    count += 1
masked, _ = scores.token_scores(torch.tensor([[0.0, float("-inf"), 1.0]]), torch.tensor([1]))
assert masked.item() == float("-inf")
print(count, "cases")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_scores_under_the_interpreter_are_those_of_a_log_softmax() -> None:
    assert "14 cases" in run_under_the_interpreter(CASES, str(FAST_PATHS))


def reference(logits: torch.Tensor, num_logprobs: int, tokens: torch.Tensor, *_: object, **__: object) -> object:
    """The result of vLLM's function, in torch: its kernels need a GPU."""
    from vllm.v1.outputs import LogprobsTensors

    chosen = logits.gather(1, tokens[:, None])
    return LogprobsTensors(
        logprob_token_ids=tokens[:, None],
        logprobs=logits.float().log_softmax(-1).gather(1, tokens[:, None]),
        selected_token_ranks=(logits >= chosen).sum(1),
    )


@pytest.mark.parametrize(
    ("error", "wrong_rank", "said"),
    [(0.0, 0, ""), (0.01, 0, "log-probs"), (0.0, 1, "ranks"), (None, 0, "RuntimeError: no such kernel")],
)
def test_the_first_scores_are_compared_with_vllms(
    error: float | None, wrong_rank: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = pytest.importorskip("rollout_vllm.servers.fast.scores", reason="triton is not installed")
    from vllm.v1.worker.gpu.sample import sampler

    calls = []

    def stock(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return reference(*args, **kwargs)  # type: ignore[arg-type]

    def in_parts(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if error is None:
            raise RuntimeError("no such kernel")
        scores: Any = reference(logits, 0, tokens)
        return scores.logprobs[:, 0] + error, scores.selected_token_ranks + wrong_rank

    monkeypatch.setattr(sampler, "compute_topk_scores", stock)
    monkeypatch.setattr(scores, "token_scores", in_parts)
    scores.divide_rows(SCORES.replace)
    logits, tokens = torch.randn(3, 11), torch.tensor([0, 10, 4])
    for _ in range(3):
        scores = sampler.compute_topk_scores(logits, 0, tokens, None, max_per_req_token_ids=0, logits_mode=False)
        expected: Any = reference(logits, 0, tokens)
        assert (scores.logprobs - expected.logprobs).abs().max() < 1e-6
        assert scores.selected_token_ranks.tolist() == expected.selected_token_ranks.tolist()
        assert scores.logprobs.shape == scores.logprob_token_ids.shape == (3, 1)
    assert len(calls) == (3 if said else 1), "vLLM's own path from the first difference on"
    assert (f"vLLM's own path is used: {said}" in capsys.readouterr().out) == bool(said)


@pytest.mark.parametrize(
    ("num_logprobs", "options"), [(2, {}), (0, {"max_per_req_token_ids": 1}), (0, {"logits_mode": True})]
)
def test_other_scores_are_vllms(num_logprobs: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    scores = pytest.importorskip("rollout_vllm.servers.fast.scores", reason="triton is not installed")
    from vllm.v1.worker.gpu.sample import sampler

    monkeypatch.setattr(sampler, "compute_topk_scores", lambda *_, **__: "stock")
    monkeypatch.setattr(scores, "token_scores", None)
    scores.divide_rows(SCORES.replace)
    logits, tokens = torch.randn(3, 11), torch.tensor([0, 10, 4])
    assert sampler.compute_topk_scores(logits, num_logprobs, tokens, **options) == "stock"
    assert sampler.compute_topk_scores(logits, 0, tokens, [0, 1, 3]) == "stock"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_on_a_gpu_are_those_of_vllms_kernels(dtype: torch.dtype) -> None:
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    from rollout_vllm.servers.fast.scores import token_scores

    logits = (4 * torch.randn(128, 151_936, device="cuda")).to(dtype)
    logits[0, :100_000] = float("-inf")
    tokens = torch.randint(100_000, 151_936, (128,), device="cuda")
    log_probs, ranks = token_scores(logits, tokens)
    expected = compute_topk_scores(logits, 0, tokens)
    torch.testing.assert_close(log_probs, expected.logprobs[:, 0], rtol=1e-5, atol=1e-5)
    assert torch.equal(ranks, expected.selected_token_ranks)
