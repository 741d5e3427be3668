"""The report of `prepare_data` and its Markdown form, the data card."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

UNUSABLE, HELD_OUT, DUPLICATE = "unusable", "contains a held-out prompt", "duplicate or near duplicate of a prompt"
MAX_EXAMPLES, _MAX_TEXT = 5, 400


@dataclass(frozen=True)
class File:
    """A file that was read, held out or written (`use`). `num_rows` counts its usable rows."""

    use: str
    name: str
    num_rows: int


@dataclass(kw_only=True)
class Report:
    """The result of `prepare_data`."""

    files: list[File] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Lines about columns and layouts that were chosen or left out."""
    counts: Counter[str] = field(default_factory=Counter)
    """Dropped rows by reason; each is counted once."""
    examples: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The first rows of each reason: place, text, and the row that it was compared with."""
    num_responses: int = 0
    num_ground_truths: int = 0
    data_sources: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, *lines: object) -> None:
        """Count one row; the lines show it."""
        self.counts[reason] += 1
        if len(self.examples[reason]) < MAX_EXAMPLES:
            self.examples[reason].append("\n".join(str(line)[:_MAX_TEXT] for line in lines))

    def summary(self) -> list[str]:
        """The counts as lines of text."""
        num_rows = Counter[str]()
        for file in self.files:
            num_rows[file.use] += file.num_rows
        lines = [*self.notes, f"{num_rows['read'] + self.counts[UNUSABLE]:,} rows read"]
        lines += [f"{count:,} dropped: {reason}" for reason, count in self.counts.items() if count]
        lines += [f"{file.num_rows:,} rows in {file.name}" for file in self.files if file.use == "written"]
        lines += [f"{count:,} rows of the data source {name}" for name, count in sorted(self.data_sources.items())]
        if missing := num_rows["written"] - self.num_ground_truths:
            lines.append(f"{missing:,} rows have no ground truth: rewards of answers refuse them (grpo, ppo)")
        if missing := num_rows["written"] - self.num_responses:
            lines.append(f"{missing:,} rows have no response, which supervised fine-tuning needs in every row")
        return lines


def card(report: Report, command: str) -> str:
    """The report as Markdown."""
    files = "\n".join(f"{file.use}: {file.name}, {file.num_rows:,} rows" for file in report.files)
    blocks = ["# Data card", *map(_code, (command, files, "\n".join(report.summary())))]
    for reason, examples in report.examples.items():
        blocks += [f"## Examples: {reason}", *map(_code, examples)]
    return "\n\n".join(blocks) + "\n"


def _code(text: str) -> str:
    fence = "`" * (max(map(len, ["``", *re.findall("`+", text)])) + 1)
    return f"{fence}\n{text}\n{fence}"
