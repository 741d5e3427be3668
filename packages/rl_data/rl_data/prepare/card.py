"""The data card of prepared files, as Markdown and as a page without external resources."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .report import CONFLICT, CONTAMINATED_KEPT, REASONS, Example, Lengths, Report

_BAR_WIDTH = 40
_MAX_TEXT = 400


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells; cells that are int are right-aligned, float is a share and drawn as a bar."""

    header: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]


Block = Heading | Paragraph | Code | Table


def write_card(report: Report, folder: Path) -> None:
    """Write card.md and card.html."""
    blocks = card(report)
    (folder / "card.md").write_text("\n\n".join(map(_markdown, blocks)) + "\n", encoding="utf-8")
    (folder / "card.html").write_text(_page("".join(map(_html, blocks))), encoding="utf-8")


def card(report: Report) -> list[Block]:
    """The content of the card."""
    blocks: list[Block] = [Paragraph(_summary(report))]
    if report.command:
        blocks.append(Code(report.command))
    blocks += [Heading("Files"), _files(report), Heading("Rows"), _rows(report), *map(Paragraph, report.notes)]
    if report.bands is not None:
        found = ", ".join(f"{report.bands.probability(share):.3f} at {share}" for share in (0.5, 0.7, 0.8, 0.9, 0.95))
        blocks.append(Paragraph(f"Probability of a near duplicate by the similarity of two prompts: {found}."))
    blocks += [Heading("Lengths"), *_lengths("prompt", report.unit, report.prompt_lengths)]
    if report.response_lengths is not None:
        blocks += _lengths("response", report.unit, report.response_lengths)
    blocks += [Heading("Columns"), Table(("column", "type"), list(report.columns.items()))]
    blocks += [Heading("Data sources"), Table(("data source", "rows"), list(report.data_sources.items()))]
    blocks += [Heading("The first training rows"), *map(Code, map(_short, report.samples))]
    for reason in (*REASONS, CONFLICT, CONTAMINATED_KEPT):
        if examples := report.removed.examples.get(reason):
            blocks += [Heading(f"Examples: {reason}"), *(Code(_example(example)) for example in examples)]
    return blocks


def _summary(report: Report) -> str:
    parts = [
        f"{report.num_kept:,} of {report.num_read:,} rows are kept.",
        f"{report.num_ground_truths:,} of them have a ground truth, {report.num_responses:,} have a response.",
    ]
    if report.num_responses < report.num_kept:
        parts.append("Supervised fine-tuning needs a response in every row.")
    return " ".join(parts)


def _files(report: Report) -> Table:
    rows: list[Sequence[str | int | float]] = [
        (name, given.file, given.layout, given.num_rows, given.num_bytes, given.sha256)
        for name, inputs in (("read", report.inputs), ("held out", report.held_out))
        for given in inputs
    ]
    rows += [("written", one.name, "", one.num_rows, one.num_bytes, one.sha256) for one in report.outputs]
    return Table(("", "file", "layout", "rows", "bytes", "SHA-256"), rows)


def _rows(report: Report) -> Table:
    counts = report.removed.counts
    rows: list[Sequence[str | int | float]] = [("read", report.num_read)]
    rows += [(f"dropped: {reason}", counts[reason]) for reason in REASONS]
    rows.append(("kept", report.num_kept))
    rows += [(f"reported: {reason}", counts[reason]) for reason in (CONFLICT, CONTAMINATED_KEPT) if counts[reason]]
    return Table(("rows", "number"), rows)


def _lengths(what: str, unit: str, lengths: Lengths) -> list[Block]:
    total = sum(count for _, _, count in lengths.bins)
    quantiles = ", ".join(f"{name} {value:,}" for name, value in lengths.quantiles.items())
    bins = [(f"{first:,} to {last:,}", count, count / total) for first, last, count in lengths.bins]
    return [Paragraph(f"Length of the {what} in {unit}: {quantiles}."), Table((unit, "rows", "share"), bins)]


def _example(example: Example) -> str:
    other = f"against: {_short(example.other)}" if example.other else ""
    return "\n".join(filter(None, (example.place, _short(example.text), other)))


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text):,} characters)"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {text}"
        case Paragraph(text):
            return text
        case Code(text):
            fence = "`" * (max(map(len, ["``", *re.findall("`+", text)])) + 1)
            return f"{fence}\n{text}\n{fence}"
        case Table(header, rows):
            first = rows[0] if rows else [""] * len(header)
            lines = [header, ["---:" if isinstance(cell, int) else "---" for cell in first]]
            lines += [[_cell(cell) for cell in row] for row in rows]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: str | int | float) -> str:
    if isinstance(cell, float):
        return f"{'█' * round(cell * _BAR_WIDTH)} {cell:.1%}".strip()
    return f"{cell:,}" if isinstance(cell, int) else cell.replace("|", "\\|").replace("\n", " ")


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{escape(text)}</h2>\n"
        case Paragraph(text):
            return f"<p>{escape(text)}</p>\n"
        case Code(text):
            return f"<pre>{escape(text)}</pre>\n"
        case Table(header, rows):
            head = "".join(f"<th>{escape(name)}</th>" for name in header)
            body = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>\n" for row in rows)
            return f"<div class=wide><table><tr>{head}</tr>\n{body}</table></div>\n"


def _html_cell(cell: str | int | float) -> str:
    if isinstance(cell, float):
        return f'<td class=share><i style="width:{240 * cell:.1f}px"></i> {cell:.1%}</td>'
    return f"<td class=num>{cell:,}</td>" if isinstance(cell, int) else f"<td>{escape(cell)}</td>"


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { --paper:#fff; --card:#f7f8fa; --ink:#1c2430; --soft:#667085; --edge:#e2e6ec; --accent:#0072b2; }
@media (prefers-color-scheme: dark) { :root { --paper:#12161c; --card:#1a2028; --ink:#e6eaf0; --soft:#98a2b3;
  --edge:#2c3440; --accent:#56b4e9; } }
body { max-width:1100px; margin:0 auto; padding:0 20px 60px; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui, sans-serif; }
h2 { font-size:18px; margin:34px 0 10px; } .wide { overflow-x:auto; }
table { border-collapse:collapse; font-size:14px; } th { text-align:left; color:var(--soft); font-weight:500; }
th, td { padding:4px 12px; border-bottom:1px solid var(--edge); overflow-wrap:anywhere; }
.num { text-align:right; white-space:nowrap; font-variant-numeric:tabular-nums; } .share { min-width:340px; }
.share i { display:inline-block; height:10px; background:var(--accent); border-radius:2px; }
pre { background:var(--card); border:1px solid var(--edge); border-radius:8px; padding:10px 14px;
  white-space:pre-wrap; overflow-wrap:anywhere; font:13px/1.5 ui-monospace, monospace; }
"""


def _page(body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Data card</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>Data card</h1>\n{body}</body></html>\n"
    )
