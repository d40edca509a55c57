"""A script beside its config is an experiment if it has settings and a measure."""

from __future__ import annotations

from pathlib import Path

import pytest
from studies import EXACT, exact, refused, write

from normjax.study.document import ConfigError
from normjax.study.plan import make_plan

pytestmark = pytest.mark.jax_defaults


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(text: str):
    return make_plan(write(Path(), text, "c.yaml"))


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("def measure(cell, key): ...\n", "defines no Settings"),
        (EXACT.split("def")[0], "defines no measure"),
        ("import nothing_of_this_name\n" + EXACT, "fails at import: "
         "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("raise ValueError('one\\ntwo')\n", "fails at import: ValueError: one"),
        ("def (:\n", "fails at import: SyntaxError: invalid syntax (mine.py, line 1)"),
    ],
)  # fmt: skip
def test_scripts_that_are_no_experiment(folder: Path, script: str, problem: str):
    with refused(f"c.yaml:3:1: experiment: {folder.resolve() / 'mine.py'} {problem}"):
        plan(exact(folder, script))


def test_settings_of_a_script_are_a_schema(folder: Path):
    with pytest.raises(ConfigError, match=r"py: Settings is <class 'dict'>, expected a "
                       r"class from study\.Settings\Z"):  # fmt: skip
        plan(exact(folder, "Settings = dict\ndef measure(cell, key): ...\n"))


def test_experiments_that_there_are_not(folder: Path):
    text = "study: s\nquestion: q?\nexperiment: "
    with refused(
        "c.yaml:3:1: experiment: got 'trainin', expected training or the path of a "
        "script (../experiments/mine.py)"
    ):
        plan(text + "trainin\n")
    path = folder.resolve() / "gone.py"
    with refused(f"c.yaml:3:1: experiment: there is no script {path}"):
        plan(text + "gone.py\n")


def test_a_script_may_use_annotations_that_are_text(folder: Path):
    script = "from __future__ import annotations\nfrom typing import Literal\n"
    script += EXACT.replace("x: float = 1.0", "x: Literal['a', 'b'] = 'a'")
    decided = plan(exact(folder, script) + "arms:\n  other: {set: {x: b}}\n")
    assert decided.arms["other"].cell.settings.x == "b"
