"""GRPO in a plain torch loop, without trainer or distributed runtime; takes a few seconds on a CPU.

The task: digit d + 1 follows digit d. A bigram policy starts at random (10% right) and is rewarded for the share of
right steps. rl_core provides everything except the model and the sampling, and does not depend on the model. A token
budget splits a mini batch into micro batches, whose gradients add up.

Run: python examples/plain_torch_loop.py
"""

import torch
from torch import Tensor, nn

from rl_core import (
    aggregate_loss,
    broadcast_to_tokens,
    group_advantages,
    linear_log_prob,
    pack,
    plan_micro_batches,
    ppo_clip_loss,
    token_weights,
)

NUM_DIGITS, NUM_PROMPTS, SAMPLES_PER_PROMPT, RESPONSE_LENGTH = 10, 16, 8, 6


class BigramPolicy(nn.Module):
    """Hidden states [T, H] from token ids [T]; `head.weight` [V, H] turns them into logits."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_DIGITS, hidden)
        self.mix = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh())
        self.head = nn.Linear(hidden, NUM_DIGITS, bias=False)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.mix(self.embed(ids_T))


@torch.no_grad()
def sample(policy: BigramPolicy, prompts_N: Tensor) -> tuple[Tensor, Tensor]:
    """(responses_NL, log_probs_NL), as a rollout engine returns them."""
    ids_N, tokens, log_probs = prompts_N, [], []
    for _ in range(RESPONSE_LENGTH):
        log_probs_NV = policy.head(policy(ids_N)).log_softmax(-1)
        ids_N = torch.multinomial(log_probs_NV.exp(), 1).squeeze(1)
        tokens.append(ids_N)
        log_probs.append(log_probs_NV.gather(1, ids_N[:, None]).squeeze(1))
    return torch.stack(tokens, 1), torch.stack(log_probs, 1)


def train(num_steps: int = 60, *, num_updates: int = 2, token_budget: int = 256, seed: int = 0) -> list[float]:
    """Mean score of each step."""
    torch.manual_seed(seed)
    policy = BigramPolicy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    history = []
    for step in range(num_steps):
        group_ids_N = torch.arange(NUM_PROMPTS).repeat_interleave(SAMPLES_PER_PROMPT)
        prompts_N = torch.randint(0, NUM_DIGITS, (NUM_PROMPTS,))[group_ids_N]
        responses_NL, old_log_probs_NL = sample(policy, prompts_N)
        before_NL = torch.cat([prompts_N[:, None], responses_NL[:, :-1]], dim=1)
        scores_N = (responses_NL == (before_NL + 1) % NUM_DIGITS).float().mean(dim=1)

        advantages_N = group_advantages(scores_N, group_ids_N)
        batch = pack(prompts_N[:, None].unbind(), responses_NL.unbind())
        lens_N = batch.response_lens_S
        batch.add_columns(
            old_log_probs=old_log_probs_NL.flatten(), advantages=broadcast_to_tokens(advantages_N, lens_N)
        )
        weights_N = token_weights("token_mean", lens_N)  # computed once, for the whole mini batch
        plan = plan_micro_batches(batch.seq_lens_S.tolist(), num_ranks=1, token_budget=token_budget)

        for _ in range(num_updates):
            optimizer.zero_grad()
            for rows in plan.assignment[0]:
                micro = batch.select(rows)
                hidden_KH = policy(micro.input_ids_T)[micro.target_index_K]
                log_probs_K, _ = linear_log_prob(hidden_KH, policy.head.weight, micro.target_ids_K)
                loss_K, _ = ppo_clip_loss(log_probs_K, micro.columns["old_log_probs"], micro.columns["advantages"])
                aggregate_loss(loss_K, weights_N[list(rows)], micro.response_lens_S).backward()
            optimizer.step()
        history.append(float(scores_N.mean()))
        if step % 10 == 9:
            print(f"step {step + 1:3d}   score {history[-1]:.2f}   {plan.num_micro_batches} micro batches an update")
    return history


if __name__ == "__main__":
    train()
