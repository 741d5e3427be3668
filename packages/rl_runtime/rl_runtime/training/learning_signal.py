"""Warns when the scores of a step teach nothing: a run that trains on nothing says so in its first steps."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from rollout_vllm import Sample

from ..rollout.groups import score_of

_STAYS = 3
"""Steps in a row after which a reason is said again."""
_SHOWN_CHARACTERS = 200
_KEYS = {
    "cut": "raise sampling.max_tokens, or ask for short responses (data.system_prompt)",
    "no answer": "ask for the format that the reward reads (data.system_prompt, docs/rewards.md)",
    "zero": "use easier prompts, warm_start, or a reward that gives partial credit (reward.format_score, reward.terms)",
    "equal": "raise sampling.n or sampling.temperature, use prompts of other difficulty, or replace such groups with "
    "dynamic_sampling.max_rounds",
}
"""Reason, the most specific first -> settings that help."""


class LearningSignal:
    """Looks at the scored samples of each step.

    Args:
        report: gets a line in the first step that teaches nothing for a reason, and where that stays for three steps.
        compares_group: only differences within a group are learned from, not those in the whole batch.
        finds_answers: False if the reward looks for an answer and finds none in any of these samples.
        read_answer: the answer that the reward finds in a sample, in words; empty: it looks for none.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        *,
        compares_group: bool,
        finds_answers: Callable[[Sequence[Sample]], bool] = lambda _: True,
        read_answer: Callable[[Sample], str] = lambda _: "",
    ) -> None:
        self._report, self._compares_group = report, compares_group
        self._finds_answers, self._read_answer = finds_answers, read_answer
        self._has_answers = False
        self._in_a_row: Mapping[str, int] = {}
        self._said: set[str] = set()

    def check(self, step: int, samples: Sequence[Sample]) -> None:
        """Says why the scores of this step teach nothing, or that all responses were cut."""
        reasons = self._reasons(samples)
        self._in_a_row = {reason: self._in_a_row.get(reason, 0) + 1 for reason in _KEYS if reason in reasons}
        reason = next(iter(self._in_a_row), None)
        if reason is None or (reason in self._said and self._in_a_row[reason] != _STAYS):
            return
        self._said.add(reason)  # small steps teach nothing now and then, which is no news
        one = samples[0]
        if reason == "zero":  # some response has an answer, a wrong one: show that
            one = next((sample for sample in samples if self._finds_answers([sample])), one)
        thinks = ", or turn thoughts off (data.chat_template_kwargs.enable_thinking=false)"
        key = _KEYS[reason] + thinks * (reason == "cut" and ends_in_thoughts(one.prompt.text + one.text))
        answer = self._read_answer(one)
        reads = f", in which the reward reads {answer}" if answer else ""
        teaches = " teaches nothing" if "equal" in reasons else ""
        self._report(
            f"warning: step {step}{teaches}: {reasons[reason]}; {key}. One response, to "
            f"{one.prompt.id}, ends in {one.text[-_SHOWN_CHARACTERS:]!r}{reads}: score {score_of(one):g}"
        )

    def _reasons(self, samples: Sequence[Sample]) -> dict[str, str]:
        """Reason -> words."""
        count, reasons = len(samples), dict[str, str]()
        scores = [score_of(sample) for sample in samples]
        if all(sample.finish_reason == "length" for sample in samples):
            reasons["cut"] = f"all {count} responses were cut at sampling.max_tokens"
        if not self._has_answers or not any(scores):
            self._has_answers = self._finds_answers(samples)
            if not self._has_answers:
                reasons["no answer"] = f"the reward finds no answer in any of {count} responses"
        if not any(scores):
            reasons["zero"] = f"the score of all {count} responses is 0"
        if not differ(samples, compares_group=self._compares_group):
            reasons["equal"] = "no response has another score than those that it is compared with"
        return reasons


def ends_in_thoughts(text: str) -> bool:
    """True if the last `<think>`, of the model or of its template, is still open."""
    return text.rfind("<think>") > text.rfind("</think>")


def differ(samples: Sequence[Sample], *, compares_group: bool) -> bool:
    """True if a score differs from those that it is compared with: of its group, its baseline, or the batch."""
    compared: dict[str, set[float]] = defaultdict(set)
    for sample in samples:
        others = compared[sample.prompt_id if compares_group else ""]
        others |= (
            {score_of(sample)} if sample.baseline_score is None else {score_of(sample) - sample.baseline_score, 0.0}
        )
    return any(len(scores) > 1 for scores in compared.values())
