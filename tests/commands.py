"""How the command line is called in a test, and how its tables are read."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from normjax import cli, terminal


class Done(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Done]


@pytest.fixture
def normjax(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> Call:
    """Run the command in this process, in an empty folder, on a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(terminal.out, "width", 1000)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["normjax", *arguments])
        with pytest.raises(SystemExit, match=r"\A([012]|130)\Z") as stopped:
            cli.main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        return Done(int(str(stopped.value.code)), captured.out, captured.err)

    return call


def table(text: str) -> list[list[str]]:
    """Rows of a printed table; columns stand two blanks apart."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [re.split(r"\s{2,}", line) for line in lines]


def process(code: str, *arguments: str, folder: Path) -> Done:
    """The command in a process of its own, as a user starts it."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nfrom normjax.cli import main\nmain()",
         *arguments],
        capture_output=True, text=True, cwd=folder, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)
