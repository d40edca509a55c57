"""Compiled programs on the disk: the next process takes them from there."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from studies import TOY, write

from normjax.study.caching import default_folder, kept_programs

pytestmark = pytest.mark.jax_defaults

PROGRAM = """
import collections, json, sys
from pathlib import Path
import jax
from normjax import study
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
study.run("study.yaml", out=sys.argv[1], programs=Path("programs"))
kind = "/jax/compilation_cache/cache_"
print(json.dumps([events[kind + "misses"], events[kind + "hits"]]))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path):
    write(tmp_path, TOY)
    counts = []
    for out in ("first", "second"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, out],
            capture_output=True, text=True, cwd=tmp_path, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        counts.append(json.loads(done.stdout))
    (misses, _), (again, hits) = counts
    assert misses >= 2
    assert (again, hits >= misses) == (0, True)
    first, second = (
        tmp_path / name / "results.parquet" for name in ("first", "second")
    )
    assert first.read_bytes() == second.read_bytes()


def test_what_jax_had_is_restored(tmp_path: Path):
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = [getattr(jax.config, name) for name in names]
    with kept_programs(None):
        assert [getattr(jax.config, name) for name in names] == before
    with contextlib.suppress(KeyboardInterrupt), kept_programs(tmp_path):
        assert getattr(jax.config, names[0]) == str(tmp_path)
        raise KeyboardInterrupt
    assert [getattr(jax.config, name) for name in names] == before


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/said")
    assert default_folder() == Path("/said")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/normjax/programs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_folder() == Path("/home/somebody/.cache/normjax/programs")
