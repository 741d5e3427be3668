"""One rank of test_compact_grpo.py: its share of each drawn batch has to add up to the gradient of the whole batch."""

import test_compact_grpo as example
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing.batches import pad
from plinth_testing.strategies import TokenSequence, batches, shardings


@settings(max_examples=20, deadline=None, derandomize=True)  # the same draws on every rank
@given(batches(vocab_size=example.VOCABULARY), st.data())
def check_a_share(sequences: list[TokenSequence], data: st.DataObject) -> None:
    own = data.draw(shardings(len(sequences), dist.get_world_size()))[dist.get_rank()]
    advantages = [example.some_advantages(len(sequences))[row] for row in own]
    batch = pad([sequences[row] for row in own] or sequences[:1])
    if not own:  # no sequence on this rank: it takes part with a row that has no response
        batch, advantages = pad([TokenSequence(prompt_ids=(0, 0), response_ids=())]), [0.0]
    gradient = example.gradient(batch, advantages, [[row] for row in range(len(advantages))])
    torch.testing.assert_close(gradient, example.expected_gradient(sequences))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    check_a_share()
    dist.destroy_process_group()
