"""The run directory: a Parquet file for each block, JSON beside it, one table.

    plan.json          resolved settings, differences, hypotheses and their hash
    provenance.json    versions, device, commit, data hashes, command line
    config.yaml        the config as it was
    blocks/ID.parquet  long format: seed, metric, coordinate, value
    blocks/ID.json     arm, seeds, seconds; written last, so it marks a whole block
    blocks/ID.failed   what a block raised, with traceback, until it succeeds
    results.parquet    all blocks, with study, arm, role and block before these columns
    analysis.json      verdicts, contrasts, manipulation checks

Files are written under a name of their own and moved, so a reader never sees half of
one, and several processes may write to one directory without knowing of each other.
"""

from __future__ import annotations

import json
import os
import shutil
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from normjax.study.cells import Row
from normjax.study.document import ConfigError
from normjax.study.plan import Block, Plan, resolved
from normjax.study.unfinished import FAILED, UnfinishedError
from normjax.study.validation import canonical

DRAFT = ".part"
ROW = {
    "seed": pl.Int64,
    "metric": pl.String,
    "coordinate": pl.Float64,
    "value": pl.Float64,
}


@dataclass(frozen=True)
class Results:
    """What a finished run holds.

    Attributes:
        folder: the run directory.
        plan: the resolved plan as plain data.
        provenance: where the numbers come from.
        table: the long table.
    """

    folder: Path
    plan: dict[str, Any]
    provenance: dict[str, Any]
    table: pl.DataFrame

    def values(self, arm: str, metric: str) -> dict[int, float]:
        """Scalars of one metric by seed; null and absent ones are left out."""
        chosen = self.table.filter(
            (pl.col("arm") == arm)
            & (pl.col("metric") == metric)
            & pl.col("coordinate").is_null()
            & pl.col("value").is_not_null()
            & pl.col("seed").is_not_null()
        ).sort("seed")
        seeds, found = chosen["seed"].to_list(), chosen["value"].to_list()
        return dict(zip(seeds, found, strict=True))

    def curve(self, arm: str, metric: str) -> pl.DataFrame:
        """Columns seed, coordinate and value of one curve."""
        return (
            self.table.filter(
                (pl.col("arm") == arm)
                & (pl.col("metric") == metric)
                & pl.col("coordinate").is_not_null()
            )
            .select("seed", "coordinate", "value")
            .sort("coordinate", "seed", maintain_order=True)
        )


class Store:
    """Writes a run directory.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: Path):
        """Remember the folder; nothing is written yet."""
        self.folder = folder
        self.blocks = folder / "blocks"

    def open(
        self,
        plan: Plan,
        provenance: dict[str, Any],
        mode: str,
        shards: int | None = None,
    ) -> None:
        """Start a run, or go on with one.

        Args:
            plan: what will run.
            provenance: where the numbers come from.
            mode: ``"new"``, ``"resume"``, ``"retry"`` or ``"force"``.
            shards: how many processes fill the folder, each of them opening it; a
                ``"new"`` one joins a run that the same plan and number began.

        Raises:
            ConfigError: if the folder holds another run and the mode is ``"new"``, or
                holds something else; if ``"resume"`` or ``"retry"`` meets other
                hypotheses than were declared; if ``"force"`` is one of several.
        """
        if mode == "force" and shards is not None:
            raise ConfigError(
                "--force would remove what the other shards computed; remove "
                f"{self.folder} before they start, or take another --out"
            )
        decided = resolved(plan, shards)
        before = self._before()
        if before is not None:
            if mode == "new" and not (shards and before == canonical(decided)):
                raise ConfigError(self._occupied(shards))
            if mode != "force":
                self.check_hypotheses(plan)
            else:
                shutil.rmtree(self.folder)
        # The plan comes first: a folder that holds a plan is known to hold a run.
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_json("plan.json", decided)
        self.blocks.mkdir(exist_ok=True)
        self.write_json("provenance.json", provenance)
        source = Path(plan.document.name)
        _replace(self.folder / "config.yaml", source.read_bytes())
        # What was joined and judged before may not be what this run will say.
        for name in ("results.parquet", "analysis.json", "report.html"):
            (self.folder / name).unlink(missing_ok=True)

    def _before(self) -> dict[str, Any] | None:
        """The plan of the run that the folder holds; None if it is empty."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; choose another --out")
        if not self.folder.exists():
            return None
        path, occupied = (
            self.folder / "plan.json",
            any(entry.suffix != DRAFT for entry in self.folder.iterdir()),
        )
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        if occupied:
            raise ConfigError(
                f"{self.folder} is not empty and holds no run; choose another --out"
            )
        return None

    def _occupied(self, shards: int | None) -> str:
        if shards is None:
            return (
                f"{self.folder} holds a run already: --resume computes what is "
                "missing, --force starts anew, --out takes another folder"
            )
        return (
            f"{self.folder} holds a run of another plan, or of another number of "
            "shards: --out takes another folder"
        )

    def check_hypotheses(self, plan: Plan) -> None:
        """Refuse to go on with a run that declared other hypotheses."""
        before = self._before()
        if before is None:
            raise ConfigError(f"{self.folder} holds no run")
        if before["hypotheses_hash"] != plan.hypotheses_hash:
            raise ConfigError(
                f"{self.folder}: hypotheses or outcomes are not those that "
                "were declared before its first cell ran; --force starts anew"
            )

    def has(self, block: Block) -> bool:
        """Whether a block is there as a whole."""
        return (self.blocks / f"{block.id}.json").exists()

    def failed(self, block: Block) -> bool:
        """Whether a block failed and has not succeeded since."""
        path = self.blocks / f"{block.id}{FAILED}"
        return not self.has(block) and path.exists()

    def write(self, block: Block, rows: list[Row], **facts: Any) -> None:
        """Store a block: the table first, then the file that marks it as whole."""
        frame = pl.DataFrame(rows, schema=ROW, orient="row")
        target = self.blocks / f"{block.id}.parquet"
        draft = _draft(target)
        frame.write_parquet(draft)
        os.replace(draft, target)
        about = {"arm": block.arm, "seeds": list(block.seeds), **facts}
        self.write_json(f"blocks/{block.id}.json", about)
        (self.blocks / f"{block.id}{FAILED}").unlink(missing_ok=True)

    def fail(self, block: Block, error: Exception) -> None:
        """Record why a block is not there: in one line, then the traceback."""
        first = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        text = "".join([first, "\n\n", *traceback.format_exception(error)])
        _replace(self.blocks / f"{block.id}{FAILED}", text.encode())

    def finish(self, plan: Plan, shards: int | None = None) -> Results:
        """Join the blocks of the plan into ``results.parquet``.

        Raises:
            UnfinishedError: naming the blocks that are missing or failed.
        """
        table = join(self.folder, resolved(plan, shards))
        target = self.folder / "results.parquet"
        draft = _draft(target)
        table.write_parquet(draft)
        os.replace(draft, target)
        for left in self.blocks.glob(f"*{DRAFT}"):  # by a process that was killed
            left.unlink(missing_ok=True)
        return load(self.folder)

    def read(self, plan: Plan) -> Results:
        """What the folder says of a plan; nothing is written.

        Raises:
            ConfigError: if it holds no run, or one that declared other hypotheses.
            UnfinishedError: naming the blocks that are missing or failed.
        """
        self.check_hypotheses(plan)
        decided = resolved(plan)
        source = json.loads((self.folder / "provenance.json").read_text("utf-8"))
        return Results(self.folder, decided, source, join(self.folder, decided))

    def write_json(self, name: str, data: Any) -> None:
        """Write a JSON file at once."""
        text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
        _replace(self.folder / name, text.encode())


def load(folder: str | Path) -> Results:
    """Read a finished run.

    Args:
        folder: the run directory.

    Returns:
        Its ``Results``; their table is ``results.parquet``, or joined from the blocks.

    Raises:
        ConfigError: if there is no run.
        UnfinishedError: if blocks of it are missing or failed; which ones.
    """
    folder = Path(folder)
    for name in ("plan.json", "provenance.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} holds no finished run: {name} is missing")
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    source = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    path = folder / "results.parquet"
    table = pl.read_parquet(path) if path.is_file() else join(folder, plan)
    return Results(folder, plan, source, table)


def join(folder: Path, plan: Mapping[str, Any]) -> pl.DataFrame:
    """The long table of all blocks.

    Args:
        folder: the run directory.
        plan: of ``plan.json``.

    Returns:
        The table, in the order of the plan.

    Raises:
        UnfinishedError: naming the blocks that are missing or failed.
    """
    blocks = folder / "blocks"
    lost = [b for b in plan["blocks"] if not (blocks / f"{b['id']}.json").exists()]
    if lost:
        raise UnfinishedError(folder, len(plan["blocks"]), lost)
    parts = []
    for block in plan["blocks"]:
        names = {
            "study": plan["study"],
            "arm": block["arm"],
            "role": plan["arms"][block["arm"]]["role"],
            "block": block["id"],
        }
        columns = [pl.lit(value).alias(name) for name, value in names.items()]
        frame = pl.read_parquet(blocks / f"{block['id']}.parquet")
        parts.append(frame.select(*columns, *ROW))
    return pl.concat(parts)


def _draft(target: Path) -> Path:
    """A name that no other process takes."""
    return target.with_name(f"{target.name}.{uuid.uuid4().hex}{DRAFT}")


def _replace(target: Path, content: bytes) -> None:
    draft = _draft(target)
    draft.write_bytes(content)
    os.replace(draft, target)
