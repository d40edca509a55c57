"""What the README shows besides its doctests: an experiment, its error, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from normjax import study
from normjax.cli import app

pytestmark = pytest.mark.jax_defaults

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(first_line: str) -> str:
    (found,) = [
        text
        for text in re.findall(r"```\w*\n(.*?)```", README, re.DOTALL)
        if text.startswith(first_line)
    ]
    return found


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The README's script and config in an empty project."""
    for name in ("experiments/noise.py", "configs/noise.yaml"):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(block(f"# {name}"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("project")
def test_the_experiment_runs_and_supports_its_hypothesis():
    results, analysis = study.run("configs/noise.yaml")
    assert [verdict.verdict for verdict in analysis.verdicts] == ["supported"]
    assert (results.folder / "results.parquet").exists()


def test_an_arm_with_two_changes_gets_the_message_that_is_shown(project):
    config = project / "configs/noise.yaml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("{noise: 0.2}", "{noise: 0.2, size: 32}"))
    message = block("configs/noise.yaml:8").strip()
    with pytest.raises(study.ConfigError, match=re.escape(message)):
        study.make_plan("configs/noise.yaml")


def test_every_command_and_config_that_is_named_exists():
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"`normjax (\w+)", README))
    assert named <= commands
    for config in re.findall(r"configs/(\w+)\.yaml", README):
        assert config == "noise" or (ROOT / f"configs/{config}.yaml").is_file()


def test_every_picture_and_file_that_is_named_exists():
    for path in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"`(tests/\w+\.py)`", README):
        assert (ROOT / path).is_file(), path
