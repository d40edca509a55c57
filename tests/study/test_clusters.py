"""A real Ray cluster on this machine: the same run, though a process dies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import polars as pl
import pytest
from commands import process
from studies import TOY, TOY_SCRIPT, refused, write

from normjax import study

pytestmark = pytest.mark.jax_defaults
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the extra ray"
)

# The first process that comes to the arm `extra` dies in it, as if out of memory.
DIES = """
import os, pathlib, signal
def measure(cell, key):
    first = pathlib.Path(FOLDER) / "first"
    if cell.settings.form == "extra" and first.exists():
        first.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return toy(cell, key)
"""
QUIET = "".join(line for line in TOY.splitlines(True) if "H2" not in line)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    script = TOY_SCRIPT.read_text(encoding="utf-8").replace("def measure", "def toy")
    write(tmp_path, script + DIES.replace("FOLDER", repr(str(tmp_path))), "mine.py")
    write(tmp_path, QUIET.replace(str(TOY_SCRIPT), "mine.py"))
    return tmp_path


@needs_ray
@pytest.mark.slow
def test_a_worker_that_is_killed_in_a_block_is_replaced(folder: Path):
    whole, _ = study.run(folder / "study.yaml", out=folder / "whole")
    write(folder, "", "first")
    options = ("--executor", "ray", "--out", "run", "--cache", "programs")
    done = process("", "run", "study.yaml", *options, folder=folder)
    assert done.code == 0, done.err
    assert not (folder / "first").exists()  # somebody died
    assert study.load(folder / "run").table.equals(whole.table)
    assert not list((folder / "run").rglob("*.failed"))
    assert pl.read_parquet(folder / "run/results.parquet").equals(whole.table)


@needs_ray
@pytest.mark.slow
def test_a_block_that_raises_is_recorded_and_stops_no_other(folder: Path):
    script = (folder / "mine.py").read_text(encoding="utf-8")
    script = script.replace(
        "        os.kill(os.getpid(), signal.SIGKILL)",
        '        raise RuntimeError("the disk is on fire")',
    ).replace("        first.unlink()\n", "")
    write(folder, script, "mine.py")
    write(folder, "", "first")
    options = ("--executor", "ray", "--out", "run", "--cache", "programs")
    done = process("", "run", "study.yaml", *options, folder=folder)
    assert done.code == 1, done.err
    assert "run: 2 of 8 blocks failed: extra, seeds 0 to 3: RuntimeError: the" in (
        done.out
    )
    (folder / "first").unlink()
    done = process("", "run", "study.yaml", *options, "--resume", folder=folder)
    assert done.code == 0, done.err


def test_without_ray_it_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused("ray is missing: pip install 'normjax[ray]'"):
        study.run(folder / "study.yaml", out=folder / "run", executor="ray")
    assert not (folder / "run").exists()


def test_executors_have_names(folder: Path):
    with refused("executor: got 'slurm', expected one of local, ray"):
        study.run(folder / "study.yaml", out=folder / "run", executor="slurm")
    assert not (folder / "run").exists()
