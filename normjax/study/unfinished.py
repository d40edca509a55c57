"""What is said of a run that is not whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normjax.study.document import ConfigError

FAILED = ".failed"
# How many blocks a message names.
SHOWN = 5


class UnfinishedError(ConfigError):
    """Blocks of a run are missing: one line that names them.

    Args:
        folder: the run directory.
        total: how many blocks there are.
        lost: those of ``plan.json`` that are not there.

    Attributes:
        failed: those that failed.
        missing: those that nobody has tried, or that were cut off.
    """

    def __init__(self, folder: Path, total: int, lost: Sequence[Mapping[str, Any]]):
        """Look up which of them failed, and how."""
        said: dict[str, list[str]] = {"failed": [], "missing": []}
        found: dict[str, list[Mapping[str, Any]]] = {"failed": [], "missing": []}
        for block in lost:
            path = folder / "blocks" / f"{block['id']}{FAILED}"
            kind = "failed" if path.exists() else "missing"
            reason = f": {_reason(path)} ({path})" if path.exists() else ""
            found[kind].append(block)
            said[kind].append(_named(block) + reason)
        self.failed, self.missing = tuple(found["failed"]), tuple(found["missing"])
        parts = []
        for kind, names in said.items():
            if names:
                more = f"; {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                text = "; ".join(names[:SHOWN])
                parts.append(f"{len(names)} of {total} blocks {kind}: {text}{more}")
        fix = "--retry-failed computes those that failed, " if self.failed else ""
        super().__init__(f"{folder}: {'. '.join(parts)}. {fix}--resume computes all")


def _named(block: Mapping[str, Any]) -> str:
    """Arm, seeds and shard of a block."""
    seeds, shard = block["seeds"], block.get("shard")
    text = block["arm"]
    if seeds:
        many = f"seeds {seeds[0]} to {seeds[-1]}"
        text += f", {many}" if len(seeds) > 1 else f", seed {seeds[0]}"
    return text if shard is None else f"{text} (shard {shard})"


def _reason(path: Path) -> str:
    """What was raised, in one line; the lines after it say where."""
    return path.read_text(encoding="utf-8").split("\n", 1)[0]
