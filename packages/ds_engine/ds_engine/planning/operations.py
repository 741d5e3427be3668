"""Floating-point operations of a model's forward pass, from its sizes alone. A pure function, standard library only."""

from dataclasses import dataclass

from .model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Of the forward pass of one sequence; a backward pass has twice as many."""

    layers: float
    """Of the products with the layers' weights: two for each weight and token."""
    attention: float
    """Of scores and outputs of causal attention: a token attends to half of the sequence on average, with two
    operations per feature for its scores and two for its output."""
    head: float
    """Of the logits of the response tokens: two for each weight of the LM head."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.layers + self.attention + self.head


def forward_operations(shape: ModelShape, *, prompt: float, response: float) -> Operations:
    """Operations of one sequence of `prompt` + `response` tokens, of which the response has logits."""
    tokens = prompt + response
    return Operations(
        layers=2 * shape.num_layers * sum(weight.size for weight in shape.linear_layers()) * tokens,
        attention=2 * shape.num_layers * shape.query_width * tokens**2,
        head=2 * shape.vocab * shape.hidden * response,
    )
