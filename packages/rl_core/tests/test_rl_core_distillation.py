"""Divergences to a teacher, their chunked form from hidden states, and the advantages of on-policy distillation."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from plinth_testing.strategies import seeds
from rl_core import (
    TeacherHead,
    TeacherTopK,
    distillation_advantages,
    divergence,
    linear_divergence,
)
from rl_core.options import DivergenceKind

PROPERTY = settings(deadline=None, derandomize=True, max_examples=40)
KINDS: tuple[DivergenceKind, ...] = ("forward", "reverse", "jsd")
kinds, betas = st.sampled_from(KINDS), st.sampled_from((0.1, 0.5, 0.8))
positions, vocabularies = st.integers(1, 5), st.integers(2, 9)


def draw(seed: int, *shape: int, scale: float = 1.5) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def textbook(student_KV: Tensor, teacher_KV: Tensor, kind: str, beta: float) -> Tensor:
    """The divergence by its definition, with probabilities."""
    s, t = student_KV.exp(), teacher_KV.exp()

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p / q).log()).sum(-1)

    m = beta * t + (1 - beta) * s
    return {"forward": kl(t, s), "reverse": kl(s, t), "jsd": beta * kl(t, m) + (1 - beta) * kl(s, m)}[kind]


@PROPERTY
@given(seeds(), positions, vocabularies, kinds, betas)
def test_with_every_token_it_is_the_textbook_divergence_and_has_its_gradient(
    seed: int, num: int, size: int, kind: DivergenceKind, beta: float
) -> None:
    student, teacher = draw(seed, num, size).requires_grad_(), draw(seed + 1, num, size).log_softmax(-1)
    weights = draw(seed + 2, num)
    actual = divergence(student.log_softmax(-1), teacher, kind=kind, beta=beta)
    expected = textbook(student.log_softmax(-1), teacher, kind, beta)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    (actual_gradient,) = torch.autograd.grad((weights * actual).sum(), student)
    (expected_gradient,) = torch.autograd.grad((weights * expected).sum(), student)
    torch.testing.assert_close(actual_gradient, expected_gradient, rtol=1e-8, atol=1e-11)


@PROPERTY
@given(seeds(), positions, st.integers(3, 9), kinds, betas, st.data())
def test_more_tokens_never_lower_it_and_the_whole_vocabulary_is_the_most(
    seed: int, num: int, size: int, kind: DivergenceKind, beta: float, data: st.DataObject
) -> None:
    student, teacher = (draw(seed + i, num, size).log_softmax(-1) for i in range(2))
    order = teacher.argsort(-1, descending=True)
    few = data.draw(st.integers(1, size - 1))
    values = [
        divergence(student.gather(1, order[:, :n]), teacher.gather(1, order[:, :n]), kind=kind, beta=beta)
        for n in (few, few + 1, size)
    ]
    assert (values[0] >= -1e-12).all()
    assert (values[0] <= values[1] + 1e-12).all()
    assert (values[1] <= values[2] + 1e-12).all()
    assert kind != "jsd" or (values[2] <= math.log(2) + 1e-12).all()


@PROPERTY
@given(seeds(), positions, vocabularies, kinds, betas, st.data())
def test_equal_distributions_have_none_and_no_gradient(
    seed: int, num: int, size: int, kind: DivergenceKind, beta: float, data: st.DataObject
) -> None:
    logits = draw(seed, num, size).requires_grad_()
    known = data.draw(st.integers(1, size))
    student = logits.log_softmax(-1)[:, :known]
    actual = divergence(student, student.detach(), kind=kind, beta=beta)
    (gradient,) = torch.autograd.grad(actual.sum(), logits)
    torch.testing.assert_close(actual, torch.zeros_like(actual), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_tokens_make_no_nan(kind: DivergenceKind) -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    teacher = torch.tensor([[math.log(0.25), math.log(0.75), -math.inf]])
    actual = divergence(logits.log_softmax(-1), teacher, kind=kind)
    actual.sum().backward()
    assert logits.grad is not None
    assert actual.isfinite().all()
    assert logits.grad.isfinite().all()


@example(0, 0, 3, "reverse", 1.0, None, True, 1)  # a rank without positions
@PROPERTY
@given(
    seeds(),
    st.integers(0, 7),
    vocabularies,
    kinds,
    st.sampled_from((0.7, 1.0)),
    st.sampled_from((None, 3.0)),
    st.booleans(),
    st.integers(1, 4),
)
def test_from_hidden_states_in_chunks_it_has_the_values_and_gradients_of_plain_autograd(
    seed: int,
    num: int,
    size: int,
    kind: DivergenceKind,
    temperature: float,
    cap: float | None,
    biased: bool,
    rows_per_chunk: int,
) -> None:
    """The teacher has another hidden size and two more rows of padding."""
    hidden, weight = draw(seed, num, 4).requires_grad_(), draw(seed + 1, size, 4).requires_grad_()
    bias = draw(seed + 2, size).requires_grad_() if biased else None
    head = TeacherHead(hidden_KG=draw(seed + 3, num, 3), weight_VG=draw(seed + 4, size + 2, 3), soft_cap=cap)
    weights = draw(seed + 5, num)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    actual = linear_divergence(
        hidden,
        weight,
        head,
        temperature,
        kind=kind,
        beta=0.3,
        bias=bias,
        soft_cap=cap,
        chunk_bytes=rows_per_chunk * size * 8,
    )
    logits = hidden @ weight.T + (0.0 if bias is None else bias)
    of_teacher = head.hidden_KG @ head.weight_VG[:size].T
    if cap is not None:
        logits, of_teacher = cap * (logits / cap).tanh(), cap * (of_teacher / cap).tanh()
    expected = textbook((logits / temperature).log_softmax(-1), (of_teacher / temperature).log_softmax(-1), kind, 0.3)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    gradients = [torch.autograd.grad((weights * x).sum(), inputs) for x in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-11)


@PROPERTY
@given(seeds(), st.integers(1, 6), st.integers(4, 9), kinds)
def test_from_hidden_states_a_top_k_is_the_divergence_of_its_log_probs(
    seed: int, num: int, size: int, kind: DivergenceKind
) -> None:
    hidden, weight = draw(seed, num, 4).requires_grad_(), draw(seed + 1, size, 4).requires_grad_()
    log_probs, ids = draw(seed + 2, num, size).log_softmax(-1).topk(3)
    actual = linear_divergence(
        hidden, weight, TeacherTopK(ids_KC=ids, log_probs_KC=log_probs), kind=kind, chunk_bytes=2 * size * 8
    )
    expected = divergence((hidden @ weight.T).log_softmax(-1).gather(1, ids), log_probs, kind=kind)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        *[torch.autograd.grad(x.sum(), (hidden, weight)) for x in (actual, expected)], rtol=1e-9, atol=1e-12
    )


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    hidden, weight = draw(0, 6, 8).bfloat16().requires_grad_(), draw(1, 11, 8).bfloat16().requires_grad_()
    head = TeacherHead(hidden_KG=draw(2, 6, 8).bfloat16(), weight_VG=draw(3, 11, 8).bfloat16())
    actual = linear_divergence(hidden, weight, head, chunk_bytes=2 * 11 * 4)
    student, teacher = ((h.double() @ w.double().T).log_softmax(-1) for h, w in ((hidden, weight), vars_of(head)))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), textbook(student, teacher, "reverse", 0.5), rtol=1e-4, atol=1e-5)
    actual.sum().backward()
    assert hidden.grad is not None
    assert (hidden.grad.dtype, weight.grad.dtype if weight.grad is not None else None) == (torch.bfloat16,) * 2


def vars_of(head: TeacherHead) -> tuple[Tensor, Tensor]:
    return head.hidden_KG, head.weight_VG


def test_the_expected_policy_gradient_of_the_advantages_is_that_of_the_reverse_kl() -> None:
    """Of whole responses with gamma 1, and of each token in sampled contexts with gamma 0; by enumeration."""
    size, length = 3, 2
    first = draw(0, size).requires_grad_()
    second = draw(1, size, size).requires_grad_()
    teacher = draw(2, size).log_softmax(-1), draw(3, size, size).log_softmax(-1)
    parameters = (first, second)

    def log_probs(a: Tensor, b: Tensor, tokens: tuple[int, ...]) -> Tensor:
        return torch.stack((a[tokens[0]], b[tokens]))

    def expected_gradient(gamma: float) -> tuple[Tensor, ...]:
        loss = torch.zeros((), dtype=torch.float64)
        for tokens in itertools.product(range(size), repeat=length):
            student = log_probs(first.log_softmax(-1), second.log_softmax(-1), tokens)
            actual = distillation_advantages(student, log_probs(*teacher, tokens), torch.tensor([length]), gamma=gamma)
            loss = loss - student.sum().exp().detach() * (actual * student).sum()
        return torch.autograd.grad(loss, parameters)

    s, t = (first.log_softmax(-1), second.log_softmax(-1)), teacher
    of_first = textbook(s[0][None], t[0][None], "reverse", 0.5)[0]
    of_second = textbook(s[1], t[1], "reverse", 0.5)
    whole = of_first + (s[0].exp() * of_second).sum()
    each = of_first + (s[0].exp().detach() * of_second).sum()
    for gamma, kl in ((1.0, whole), (0.0, each)):
        torch.testing.assert_close(expected_gradient(gamma), torch.autograd.grad(kl, parameters, retain_graph=True))


def test_the_advantage_of_a_token_is_the_teachers_log_prob_minus_the_students() -> None:
    student, teacher = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-0.5, -4.0, -0.5])
    assert distillation_advantages(student, teacher, torch.tensor([2, 1])).tolist() == [0.5, -2.0, 0.0]
    assert distillation_advantages(student, teacher, torch.tensor([2, 1]), gamma=1.0).tolist() == [-1.5, -2.0, 0.0]
