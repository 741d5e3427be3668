"""Compute the prompt of a group once in a trainer of your own: plain torch and a Hugging Face model.

Eight responses to one prompt are usually eight rows. Here they are one row, [prompt | response 1 … response 8]:
`with_prefixes` chooses its tokens, and `mask()` lets each response see the prompt and itself. Needs `transformers`.

Run: python examples/shared_prompts.py
"""

import torch
from torch import Tensor

from rl_core import Batch, pack


def row_of_each(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Log-probs of the targets, [K], from one row per sequence; all sequences have the same length."""
    hidden_BLH = model.get_decoder()(input_ids=batch.input_ids_T.view(batch.num_sequences, -1)).last_hidden_state
    return target_log_probs(model, hidden_BLH.flatten(0, 1)[batch.target_index_K], batch)


def one_tree(model: torch.nn.Module, batch: Batch) -> Tensor:
    """`row_of_each` from one row in which each shared prefix stands once."""
    tree = batch.prefixes
    hidden_1UH = model.get_decoder()(
        input_ids=batch.input_ids_T[tree.computed_U][None],
        position_ids=batch.position_ids_T[tree.computed_U][None],
        attention_mask=tree.mask()[None, None],
    ).last_hidden_state
    return target_log_probs(model, hidden_1UH[0, tree.place_T[batch.target_index_K]], batch)


def target_log_probs(model: torch.nn.Module, hidden_KH: Tensor, batch: Batch) -> Tensor:
    """Log-prob of each target, [K], from the hidden state that predicts it."""
    return model.get_output_embeddings()(hidden_KH).log_softmax(-1).gather(1, batch.target_ids_K[:, None])[:, 0]


def compare(prompt: int = 96, response: int = 32, samples: int = 8) -> dict[str, float]:
    """Relative differences of loss and gradient, and how many times fewer tokens are computed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=1000, attn_implementation="sdpa", **sizes, **heads))
    prompts = [torch.randint(0, 1000, (prompt,))] * samples
    batch = pack(prompts, list(torch.randint(0, 1000, (samples, response)))).with_prefixes()
    losses, grads = [], []
    for compute in (row_of_each, one_tree):
        model.zero_grad()
        losses.append(-compute(model, batch).mean())
        losses[-1].backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    loss, gradient = (float(((a - b).norm() / a.norm()).detach()) for a, b in (losses, grads))
    return {"loss": loss, "gradient": gradient, "token ratio": batch.num_tokens / batch.num_computed_tokens}


if __name__ == "__main__":
    print("\n".join(f"{name:12s} {value:.2g}" for name, value in compare().items()))
