"""Replace the log-prob computation of a Hugging Face trainer with the fused op, and compare the two.

Trainers usually call `model(input_ids).logits` and log_softmax, which takes several [B, L, V] float32 tensors. Here the
decoder returns hidden states, and `linear_log_prob` uses them and the weight of the head. Needs `transformers`.

Run: python examples/hugging_face_log_probs.py
"""

import torch
from torch import Tensor

from rl_core import linear_log_prob


def usual_log_probs(model: torch.nn.Module, input_ids_BL: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy) of tokens 1 … L - 1, [B, L - 1] each, from all logits."""
    logits_BLV = model(input_ids=input_ids_BL).logits[:, :-1].float() / temperature
    log_probs_BLV = logits_BLV.log_softmax(-1)
    chosen = log_probs_BLV.gather(-1, input_ids_BL[:, 1:, None]).squeeze(-1)
    return chosen, -(log_probs_BLV.exp() * log_probs_BLV).sum(-1)


def fused_log_probs(model: torch.nn.Module, input_ids_BL: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`usual_log_probs` from hidden states; only the weight of the head has a vocabulary dimension."""
    hidden_BLH = model.get_decoder()(input_ids=input_ids_BL).last_hidden_state[:, :-1]
    log_probs, entropy = linear_log_prob(
        hidden_BLH.flatten(0, 1),
        model.get_output_embeddings().weight,
        input_ids_BL[:, 1:].flatten(),
        temperature=temperature,
    )
    shape = input_ids_BL[:, 1:].shape
    return log_probs.view(shape), entropy.view(shape)


def compare(temperature: float = 0.7) -> dict[str, float]:
    """Largest absolute difference of log-probs and of entropy, and relative difference of the gradient."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = Qwen3ForCausalLM(config).float()
    input_ids_BL = torch.randint(0, config.vocab_size, (4, 33))
    results = []
    for compute in (usual_log_probs, fused_log_probs):
        model.zero_grad()
        log_probs, entropy = compute(model, input_ids_BL, temperature)
        (log_probs.mean() - 0.1 * entropy.mean()).backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((log_probs.detach(), entropy.detach(), grads))
    (log_probs, entropy, grads), (fused_lp, fused_entropy, fused_grads) = results
    return {
        "log_probs": float((log_probs - fused_lp).abs().max()),
        "entropy": float((entropy - fused_entropy).abs().max()),
        "gradient": float((grads - fused_grads).norm() / grads.norm()),
    }


if __name__ == "__main__":
    for name, difference in compare().items():
        print(f"{name:10s} differs by at most {difference:.1e}")
