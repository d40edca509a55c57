"""kill -9 at random moments: what was stored stays, and the rest is computed once."""

from __future__ import annotations

import random
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from studies import TOY, write

pytestmark = pytest.mark.jax_defaults

# Long enough that a moment within it hits blocks, and short.
STUDY = TOY.replace("count: 6, block: 4", "count: 96, block: 2")
BLOCKS = 4 * 48
PROGRAM = """
import sys
from pathlib import Path
from normjax import study
study.run("study.yaml", out=sys.argv[1], mode=sys.argv[2], programs=Path("programs"))
"""


def start(folder: Path, out: str, mode: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, out, mode]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()


def blocks(folder: Path) -> dict[str, tuple[int, bytes]]:
    """When each whole block was stored, and its table."""
    return {
        path.stem: (
            path.stat().st_mtime_ns,
            path.with_suffix(".parquet").read_bytes(),
        )
        for path in (folder / "blocks").glob("*.json")
    }


def kill(folder: Path, mode: str, moment: float, before: int) -> None:
    """Start, wait for the first new block, and a moment more; then kill -9."""
    process = start(folder, "killed", mode)
    try:
        while process.poll() is None and len(blocks(folder / "killed")) <= before:
            time.sleep(0.002)
        time.sleep(moment)
    finally:
        process.kill()  # signal 9
        process.communicate()
    assert process.returncode in (0, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("seed", "kills"), [(0, 3), pytest.param(1, 20, marks=pytest.mark.slow)]
)
def test_killed_runs_go_on(tmp_path: Path, seed: int, kills: int):
    write(tmp_path, STUDY)
    finish(start(tmp_path, "whole", "new"))
    whole = blocks(tmp_path / "whole")
    assert len(whole) == BLOCKS
    stamps = sorted(stamp for stamp, _ in whole.values())
    gap = statistics.median(b - a for a, b in pairwise(stamps)) * 1e-9
    draw, done, interrupted = random.Random(seed), {}, 0
    for number in range(kills):
        # With whole blocks left for every kill: a finished run cannot be cut off.
        moment = draw.uniform(0, gap * BLOCKS / kills)
        mode = "resume" if number else "new"
        kill(tmp_path, mode, moment, len(done))
        after = blocks(tmp_path / "killed")
        assert {name: after[name] for name in done} == done
        interrupted += len(after) < BLOCKS
        done = after
    assert interrupted >= kills / 2
    finish(start(tmp_path, "killed", "resume"))
    after = blocks(tmp_path / "killed")
    assert {name: after[name] for name in done} == done
    assert {k: table for k, (_, table) in after.items()} == {
        k: table for k, (_, table) in whole.items()
    }
    first, second = (
        pl.read_parquet(tmp_path / name / "results.parquet")
        for name in ("whole", "killed")
    )
    assert first.equals(second)
    assert not list(tmp_path.rglob("*.part"))


def test_control_c_says_how_to_go_on(tmp_path: Path):
    write(tmp_path, STUDY)
    command = [sys.executable, "-c", "from normjax.cli import main; main()", "run"]
    command += ["study.yaml", "--out", "run", "--cache", "programs"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        while process.poll() is None and not blocks(tmp_path / "run"):
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert (out, errors) == (b"interrupted: --resume computes the rest\n", b"")
    assert 0 < len(blocks(tmp_path / "run")) < BLOCKS
