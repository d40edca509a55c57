"""Small configs, and how a config that is wrong is tested."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from normjax.study import ConfigError

TOY_SCRIPT = Path(__file__).with_name("toy_experiment.py")
TRAINING = """\
study: tiny
question: q?
experiment: training
settings: {task: {train: 40}, model: {widths: [4]}, steps: 4}
seeds: {count: 2}
"""
TOY = f"""\
study: toy
question: Does <b>bold</b> & "loud" text stay text?
experiment: {TOY_SCRIPT}
settings: {{shift: 0.0}}
seeds: {{count: 6, block: 4}}
arms:
  up: {{set: {{shift: 3.0}}}}
  again: {{from: up, set: {{noise: 1.5}}, role: negative_control}}
  extra: {{set: {{form: extra}}}}
outcomes: {{primary: value, equivalent_within: 0.2, diagnostics: [loss, extra]}}
hypotheses:
  - {{id: H1, statement: up.value > baseline.value, at_least: 1.0}}
  - {{id: H2, statement: extra.value = baseline.value, within: 0.1}}
  - {{id: H3, statement: up.value < baseline.value}}
"""


EXACT = """\
from normjax import study
class Settings(study.Settings):
    x: float = 1.0
def measure(cell, key):
    return {"y": cell.settings.x}
"""


def write(folder: Path, text: str, name: str = "study.yaml") -> Path:
    """A config in a folder."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def exact(folder: Path, script: str = EXACT) -> str:
    """A config of a script beside it, which draws no random numbers."""
    write(folder, script, "mine.py")
    return "study: s\nquestion: q?\nexperiment: mine.py\n"


def refused(message: str):
    """Expect a ``ConfigError`` with exactly this message."""
    return pytest.raises(ConfigError, match=rf"\A{re.escape(message)}\Z")


@pytest.fixture(scope="module")
def quick_compile():
    """Programs that are compiled sooner and run slower."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
