"""Blocks of the README that a command writes between two markers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def put(block: str, begin: str, end: str, path: Path = README) -> None:
    """Replace what stands between the markers of a file."""
    text = path.read_text(encoding="utf-8")
    if text.count(begin) != 1 or end not in text.split(begin)[1]:
        print(f"{path.name} needs the lines {begin} and {end}", file=sys.stderr)
        sys.exit(2)
    before, rest = text.split(begin)
    after = rest.split(end, 1)[1]
    path.write_text(f"{before}{begin}\n{block}\n{end}{after}", encoding="utf-8")
