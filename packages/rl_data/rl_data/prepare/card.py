"""The report of `prepare_data` and its Markdown form, the data card."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

UNUSABLE, CONTAMINATED = "unusable", "contains a held-out prompt"
LONG_PROMPT, LONG_RESPONSE = "prompt too long", "response too long"
EXACT, NEAR = "duplicate of a prompt", "near duplicate of a prompt"
REASONS = (UNUSABLE, LONG_PROMPT, LONG_RESPONSE, CONTAMINATED, EXACT, NEAR)
"""Reasons to drop rows; each dropped row is counted once."""
CONFLICT = "duplicate with another ground truth"
"""Counted and shown among the duplicates; another ground truth is no reason to keep or drop a row."""
MAX_EXAMPLES, _MAX_TEXT = 5, 400


@dataclass(frozen=True)
class File:
    """A file that was read, held out or written (`use`). `num_rows` counts its usable rows."""

    use: str
    name: str
    layout: str
    num_rows: int
    num_bytes: int
    sha256: str


@dataclass(kw_only=True)
class Report:
    """The result of `prepare_data`."""

    command: str
    files: list[File] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Lines about columns and layouts that were chosen or left out."""
    counts: Counter[str] = field(default_factory=Counter)
    """Rows by reason."""
    examples: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The first rows of each reason: place, text, and the row or limit that it was compared with."""
    num_responses: int = 0
    num_ground_truths: int = 0
    data_sources: Counter[str] = field(default_factory=Counter)

    def count(self, reason: str, *lines: object) -> None:
        """Count one row; the lines show it."""
        self.counts[reason] += 1
        self.show(reason, *lines)

    def show(self, reason: str, *lines: object) -> None:
        """Add an example, unless there are enough."""
        if len(self.examples[reason]) < MAX_EXAMPLES:
            self.examples[reason].append("\n".join(_short(str(line)) for line in lines))

    @property
    def num_read(self) -> int:
        """Rows of all inputs, unusable ones included."""
        return sum(file.num_rows for file in self.files if file.use == "read") + self.counts[UNUSABLE]

    @property
    def num_kept(self) -> int:
        """Rows of all files written."""
        return sum(file.num_rows for file in self.files if file.use == "written")


def card(report: Report) -> str:
    """The report as Markdown."""
    needed = " Supervised fine-tuning needs a response in every row." * (report.num_responses < report.num_kept)
    rows: list[tuple[str, int]] = [
        ("read", report.num_read),
        *((f"dropped: {reason}", report.counts[reason]) for reason in REASONS),
    ]
    rows += [("kept", report.num_kept), (f"reported: {CONFLICT}", report.counts[CONFLICT])]
    files = [(one.use, one.name, one.layout, one.num_rows, one.num_bytes, one.sha256) for one in report.files]
    blocks = [
        "# Data card",
        f"{report.num_kept:,} of {report.num_read:,} rows are kept. {report.num_ground_truths:,} of them have a ground "
        f"truth, {report.num_responses:,} have a response.{needed}",
        *([_code(report.command)] if report.command else []),
        *("## Files", _table(("", "file", "layout", "rows", "bytes", "SHA-256"), files)),
        *("## Rows", _table(("rows", "number"), rows), *report.notes),
        *("## Data sources", _table(("data source", "rows"), sorted(report.data_sources.items()))),
    ]
    for reason, examples in report.examples.items():
        blocks += [f"## Examples: {reason}", *map(_code, examples)]
    return "\n\n".join(blocks) + "\n"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text):,} characters)"


def _code(text: str) -> str:
    fence = "`" * (max(map(len, ["``", *re.findall("`+", text)])) + 1)
    return f"{fence}\n{text}\n{fence}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str | int]]) -> str:
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *cells])
