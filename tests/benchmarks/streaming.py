"""Memory and time of ``normjax analyze`` on a file that is larger than its bound.

``python -m benchmarks.streaming --readme`` writes 2,000,000 × 256 float32 (2 GB) to a
temporary folder, analyzes it, and puts what it took into the README. Linux only: the
anonymous memory of the process is read from /proc.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from benchmarks.readme import put, table

BEGIN = "<!-- streaming: cd tests && python -m benchmarks.streaming -->"
END = "<!-- end of streaming -->"
FEATURES = 256
COMMAND = [sys.executable, "-c", "from normjax.cli import main; main()", "analyze"]
RUNS = {
    "layer norm": ["--spec", "layer_norm"],
    "batch norm, 256 examples": ["--spec", "batch_norm", "--batch-size", "256"],
}


class Taken(NamedTuple):
    """What one command took."""

    anonymous: float  # MiB, the most at any time
    cpu: float  # seconds
    wall: float


def write(path: Path, rows: int) -> None:
    """Activations with an offset, a constant row, one with NaN, and a repeated one."""
    shape = (rows, FEATURES)
    kind: type = np.float32
    file = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
    random = np.random.default_rng(0)
    for start in range(0, rows, 50_000):
        part = file[start : start + 50_000]
        part[:] = random.standard_normal(part.shape, dtype=kind) * 2 + 3
    file[1], file[rows // 2, 5] = 7, np.nan
    file[rows // 4 + 1] = file[rows // 4]
    file.flush()


def taken(command: list[str]) -> Taken:
    """Run a command, and look at its memory fifty times a second.

    Raises:
        RuntimeError: if it fails, with what it printed.
    """
    begin, most = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        while process.poll() is None:
            most = max(most, _anonymous(process.pid))
            time.sleep(0.02)
        output.seek(0)
        if process.returncode:
            raise RuntimeError(output.read())
    used = os.times()
    return Taken(
        most / 1024,
        used.children_user + used.children_system,
        time.perf_counter() - begin,
    )


def _anonymous(pid: int) -> int:
    """KiB of a process that no file backs; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(lines[0].split()[1]) if lines else 0


def rows(count: int) -> Iterator[list[str]]:
    """One line of the table for each run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "activations.npy"
        write(path, count)
        size = path.stat().st_size / 1e9
        before = 0.0
        for name, options in RUNS.items():
            out = ["--out", str(Path(folder) / name.partition(",")[0])]
            found = taken([*COMMAND, str(path), *options, *out])
            cpu, before = found.cpu - before, found.cpu
            yield [
                name,
                f"{count:,} × {FEATURES}, {size:.2f} GB",
                f"{found.anonymous:.0f} MiB",
                f"{cpu:.0f} s",
                f"{found.wall:.0f} s",
            ]


HEADER = ("analyzed as", "float32", "anonymous memory", "CPU", "wall")


def main() -> None:
    """Print the table, or put it into the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--readme", action="store_true", help="write the README")
    chosen = parser.parse_args()
    block = table(HEADER, rows(chosen.rows))
    print(block)
    if chosen.readme:
        put(block, BEGIN, END)


if __name__ == "__main__":
    main()
