"""The run directory: a Parquet file for each block, JSON beside it, one table.

    plan.json          resolved settings, differences, hypotheses and their hash
    provenance.json    versions, device, commit, data hashes, command line
    config.yaml        the config as it was
    blocks/ID.parquet  long format: seed, metric, coordinate, value
    blocks/ID.json     arm, seeds, seconds; written last, so it marks a whole block
    results.parquet    all blocks, with study, arm, role and block before these columns
    analysis.json      verdicts, contrasts, manipulation checks

Files are written under another name and moved, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from normjax.study.cells import Row
from normjax.study.document import ConfigError
from normjax.study.plan import Block, Plan, resolved

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

    def open(self, plan: Plan, provenance: dict[str, Any], mode: str) -> None:
        """Start a run, or go on with one.

        Args:
            plan: what will run.
            provenance: where the numbers come from.
            mode: ``"new"``, ``"resume"`` or ``"force"``.

        Raises:
            ConfigError: if the folder holds a run and the mode is ``"new"``, or holds
                something else; on ``"resume"`` also if other hypotheses were declared.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; choose another --out")
        if self.folder.exists() and any(self.folder.iterdir()):
            if not (self.folder / "plan.json").exists():
                raise ConfigError(
                    f"{self.folder} is not empty and holds no run; choose another --out"
                )
            if mode == "new":
                raise ConfigError(
                    f"{self.folder} holds a run already: --resume computes what is "
                    "missing, --force starts anew, --out takes another folder"
                )
            if mode == "resume":
                before = json.loads((self.folder / "plan.json").read_text("utf-8"))
                if before["hypotheses_hash"] != plan.hypotheses_hash:
                    raise ConfigError(
                        f"{self.folder}: hypotheses or outcomes are not those that "
                        "were declared before its first cell ran; --force starts anew"
                    )
            if mode == "force":
                shutil.rmtree(self.folder)
        self.blocks.mkdir(parents=True, exist_ok=True)
        self.write_json("plan.json", resolved(plan))
        self.write_json("provenance.json", provenance)
        source = Path(plan.document.name)
        _replace(self.folder / "config.yaml", source.read_bytes())

    def has(self, block: Block) -> bool:
        """Whether a block is there as a whole."""
        return (self.blocks / f"{block.id}.json").exists()

    def write(self, block: Block, rows: list[Row], **facts: Any) -> None:
        """Store a block: the table first, then the file that marks it as whole."""
        frame = pl.DataFrame(rows, schema=ROW, orient="row")
        target = self.blocks / f"{block.id}.parquet"
        draft = target.with_suffix(".part")
        frame.write_parquet(draft)
        os.replace(draft, target)
        about = {"arm": block.arm, "seeds": list(block.seeds), **facts}
        self.write_json(f"blocks/{block.id}.json", about)

    def finish(self, plan: Plan) -> Results:
        """Join the blocks of the plan into ``results.parquet``.

        Raises:
            ConfigError: naming the blocks that are missing.
        """
        missing = [block.id for block in plan.blocks if not self.has(block)]
        if missing:
            raise ConfigError(
                f"{self.folder}: {len(missing)} of {len(plan.blocks)} blocks are "
                f"missing ({', '.join(missing[:3])}...); run again with --resume"
            )
        parts = []
        for block in plan.blocks:
            frame = pl.read_parquet(self.blocks / f"{block.id}.parquet")
            arm = plan.arms[block.arm]
            names = {
                "study": plan.study.study,
                "arm": block.arm,
                "role": arm.role,
                "block": block.id,
            }
            columns = [pl.lit(value).alias(name) for name, value in names.items()]
            parts.append(frame.select(*columns, *ROW))
        draft = self.folder / "results.part"
        pl.concat(parts).write_parquet(draft)
        os.replace(draft, self.folder / "results.parquet")
        return load(self.folder)

    def write_json(self, name: str, data: Any) -> None:
        """Write a JSON file at once."""
        text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
        _replace(self.folder / name, text.encode())


def load(folder: str | Path) -> Results:
    """Read a finished run.

    Args:
        folder: the run directory.

    Returns:
        Its ``Results``.

    Raises:
        ConfigError: if there is no finished run.
    """
    folder = Path(folder)
    for name in ("plan.json", "provenance.json", "results.parquet"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} holds no finished run: {name} is missing")
    return Results(
        folder,
        json.loads((folder / "plan.json").read_text(encoding="utf-8")),
        json.loads((folder / "provenance.json").read_text(encoding="utf-8")),
        pl.read_parquet(folder / "results.parquet"),
    )


def _replace(target: Path, content: bytes) -> None:
    draft = target.with_name(target.name + ".part")
    draft.write_bytes(content)
    os.replace(draft, target)
