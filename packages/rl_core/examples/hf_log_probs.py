"""Replace the log-prob computation of a Hugging Face causal LM (as in TRL's trainers) by the fused op.

    python packages/rl_core/examples/hf_log_probs.py [MODEL]

The usual way asks the model for logits, ``[batch, length, vocabulary]``, casts them to float32 and takes a log-softmax.
Here the model's body gives hidden states and the fused op takes the output layer's weight: the logits never exist.
Without MODEL a tiny random model is built, so this runs anywhere ``transformers`` is installed; on a GPU the op runs
its Triton kernels, on a CPU its plain torch path.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from rl_core import linear_log_prob


def usual_log_probs(
    model: Any, input_ids: Tensor, attention_mask: Tensor, num_response: int, temperature: float
) -> Tensor:
    """``[B, R]`` log-probs of the last ``num_response`` tokens, by way of all their logits."""
    logits = model(input_ids, attention_mask=attention_mask, logits_to_keep=num_response + 1).logits[:, :-1]
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return log_probs.gather(-1, input_ids[:, -num_response:, None])[..., 0]


def fused_log_probs(
    model: Any, input_ids: Tensor, attention_mask: Tensor, num_response: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same ``[B, R]`` and the entropies with it; only hidden states of response tokens reach the output layer."""
    hidden = model.get_decoder()(input_ids, attention_mask=attention_mask).last_hidden_state
    hidden = hidden[:, -num_response - 1 : -1]  # the state before a token predicts it
    targets = input_ids[:, -num_response:]
    head = model.get_output_embeddings()
    log_probs, entropy = linear_log_prob(
        hidden.reshape(-1, hidden.shape[-1]),
        head.weight,
        # Padded positions are left out before any arithmetic.
        torch.where(attention_mask[:, -num_response:] == 1, targets, -100).reshape(-1),
        bias=head.bias,
        temperature=temperature,
        soft_cap=getattr(model.config, "final_logit_softcapping", None),
        ignore_index=-100,
    )
    return log_probs.view(targets.shape), entropy.view(targets.shape)


def load(name: str | None, device: str) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
    config = Qwen3Config(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(device, dtype)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(sys.argv[1] if len(sys.argv) > 1 else None, device)
    input_ids = torch.randint(model.config.vocab_size, (4, 48), device=device)
    mask = torch.ones_like(input_ids)
    mask[1, -7:] = 0  # a response that ended early
    num_response, temperature = 32, 0.9
    response_mask = mask[:, -num_response:]
    usual = usual_log_probs(model, input_ids, mask, num_response, temperature) * response_mask
    fused, entropy = fused_log_probs(model, input_ids, mask, num_response, temperature)
    print(f"largest difference of log-probs: {(usual - fused).abs().max().item():.2e}")
    print(f"mean entropy of the response tokens: {(entropy.sum() / response_mask.sum()).item():.3f}")

    weight = model.get_output_embeddings().weight
    grads = [torch.autograd.grad(-x.sum(), weight)[0].float() for x in (usual, fused)]
    difference = (grads[0] - grads[1]).norm() / grads[0].norm()
    print(f"relative difference of the output weight's gradient: {difference.item():.2e}")


if __name__ == "__main__":
    main()
