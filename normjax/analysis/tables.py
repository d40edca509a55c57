"""The numbers of every group and example as Parquet, written as they come."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import polars as pl

from normjax.analysis.record import ActivationAnalysis
from normjax.analysis.source import AnalysisError

RECORD = "analysis.json"
# So many numbers are gathered in memory before a part is written.
PART = 4 * 2**20


class Tables:
    """Parquet files that grow by parts, in a folder.

    Args:
        folder: where they go.
    """

    def __init__(self, folder: Path):
        """Nothing is written yet."""
        self.folder = folder
        self.waiting: dict[str, list[pl.DataFrame]] = {}
        self.parts: dict[str, list[Path]] = {}

    def append(self, name: str, columns: dict[str, np.ndarray]) -> None:
        """Add rows to ``NAME.parquet``; the columns are the same at every call."""
        frame = pl.DataFrame(columns)
        waiting = self.waiting.setdefault(name, [])
        waiting.append(frame)
        if sum(f.height for f in waiting) * frame.width >= PART:
            self._write(name)

    def finish(self) -> None:
        """Join the parts into one file for each name."""
        for name in list(self.waiting):
            self._write(name)
            parts = self.parts.pop(name)
            whole = self.folder / f"{name}.parquet"
            if len(parts) == 1:
                os.replace(parts[0], whole)
                continue
            pl.scan_parquet(parts).sink_parquet(whole)
            for part in parts:
                part.unlink()

    def _write(self, name: str) -> None:
        waiting = self.waiting[name]
        if waiting:
            parts = self.parts.setdefault(name, [])
            path = self.folder / f"{name}.{len(parts):06d}.part"
            pl.concat(waiting).write_parquet(path)
            parts.append(path)
            self.waiting[name] = []


def save_record(found: ActivationAnalysis, folder: Path) -> None:
    """Write the record as ``analysis.json``, and who moves whom as ``.npy``."""
    text = json.dumps(found.to_dict(), ensure_ascii=False, allow_nan=False, indent=1)
    (folder / RECORD).write_text(text, encoding="utf-8")
    if found.strongest is not None:
        np.save(folder / "influence.npy", found.strongest.influence)


@contextmanager
def new_folder(out: Path, force: bool) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place only when all went well.

    Args:
        out: where the results go.
        force: replace an earlier analysis.

    Yields:
        The folder to write into.

    Raises:
        AnalysisError: if something is there already that may not be replaced.
    """
    if out.exists() or out.is_symlink():
        if out.is_dir() and not any(out.iterdir()):
            pass
        elif not (out / RECORD).is_file():
            raise AnalysisError(f"{out} holds no analysis: choose another --out")
        elif not force:
            raise AnalysisError(
                f"{out} holds an analysis already: --force replaces it, --out takes "
                "another folder"
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    draft.chmod(0o755)
    try:
        yield draft
        if out.is_dir():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
            os.replace(out, old / out.name)
            os.replace(draft, out)
            shutil.rmtree(old)
        else:
            os.replace(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
