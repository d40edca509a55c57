"""``normjax run`` and ``report``: modes, options, and what the exit status says."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Call, Done, process, table
from commands import normjax as normjax
from studies import TOY, TOY_SCRIPT, TRAINING, write
from studies import quick_compile as quick_compile

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("quick_compile")]


def test_a_config_with_a_mistake(normjax: Call):
    write(Path(), TRAINING.replace("steps", "stepz"))
    message = "settings.stepz: there is no such key; did you mean 'steps'?"
    assert normjax("run", "study.yaml") == Done(2, "", f"study.yaml:4:53: {message}\n")
    write(Path(), TRAINING + "arms: {a: {set: {steps: 5, record_every: 1}}}\n")
    assert normjax("run", "study.yaml").err == (
        "study.yaml:6:12: arms.a.set: changes 2 properties of 'baseline': steps, "
        "record_every; change one, say decompose: true to have them told apart, "
        "or confounded: true\n"
    )
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "settings.shift"], "--set #1: got 'settings.shift', expected KEY=V"),
        (
            ["--set", "settings.shft=1"],
            "--set #1: settings.shft: there is no such key;",
        ),
        (["--set", "arms.up.set=1"], "--set #1: arms.up.set: arms are not settable;"),
        (["--seeds", "1"], "--seeds: seeds.count: expected 2 or more, got 1"),
    ],
)
def test_wrong_options_of_run(normjax: Call, options: list[str], message: str):
    write(Path(), TOY)
    done = normjax("run", "study.yaml", *options)
    assert done.code == 2
    assert done.err.startswith(message)
    assert done.err.count("\n") == 1


def test_plan_shows_what_would_run_and_stops(normjax: Call):
    write(Path(), TOY)
    done = normjax("run", "study.yaml", "--plan", "--seeds", "9")
    assert done.code == 0
    rows = table(done.out)
    assert ["up", "baseline", "shift: 0.0 → 3.0", "treatment"] in rows
    assert ["again", "up", "noise: 1.0 → 1.5", "negative_control"] in rows
    assert done.out.endswith(
        "4 arms, 9 seeds, 12 blocks, 2 programs to compile, 3 hypotheses\n"
        f"compiled programs are kept in {Path().resolve()}/caches/normjax/programs\n"
    )
    assert not Path("runs").exists()


def test_run_prints_verdicts_and_where_the_page_is(normjax: Call):
    write(Path(), TOY)
    done = normjax("run", "study.yaml")
    assert done.code == 0
    assert done.out.startswith('Does <b>bold</b> & "loud" text stay text?\n')
    rows = {row[0]: row for row in table(done.out)}
    assert rows["H1"][1:3] == ["up.value > baseline.value by at least 1", "supported"]
    assert rows["H3"][2:] == ["contradicted", "-3.000", "[-3.000, -3.000]"]
    assert "up: line and its closed form: within 0.0e+00\n" in done.out
    assert done.out.endswith("page: runs/toy/report.html\n")
    assert Path("runs/toy/report.html").is_file()
    assert done.err == ""


def test_modes_of_run(normjax: Call):
    write(Path(), TOY)
    small = ("run", "study.yaml", "--out", "here", "--seeds", "2")
    assert normjax(*small).code == 0
    done = normjax(*small)
    assert done.code == 2
    assert done.err == (
        "here holds a run already: --resume computes what is missing, --force starts "
        "anew, --out takes another folder\n"
    )
    assert normjax(*small, "--resume").code == 0
    Path("here/report.html").unlink()
    assert normjax("report", "here") == Done(0, "page: here/report.html\n", "")
    assert Path("here/report.html").is_file()
    assert normjax(*small, "--force", "--set", "settings.points=2").code == 0


def test_smoke_has_a_folder_of_its_own(normjax: Call):
    write(Path(), TOY + "smoke: {seeds.count: 2, arms: {}, hypotheses: []}\n")
    done = normjax("run", "study.yaml", "--smoke")
    assert done.code == 0
    assert done.out.endswith("page: runs/toy-smoke/report.html\n")


def test_a_required_hypothesis_that_is_not_supported_is_status_1(normjax: Call):
    wrong = "statement: up.value < baseline.value"
    write(Path(), TOY.replace(wrong, f"{wrong}, required: true"))
    done = normjax("run", "study.yaml", "--seeds", "4")
    assert done.code == 1
    assert Path("runs/toy/report.html").is_file()
    right = "at_least: 1.0"
    write(Path(), TOY.replace(right, f"{right}, required: true"))
    assert normjax("run", "study.yaml", "--seeds", "4", "--force").code == 0


def test_a_manipulation_that_fails_is_status_1_and_said(normjax: Call):
    script = TOY_SCRIPT.read_text(encoding="utf-8")
    broken = script.replace('"check.shift": settings.shift', '"check.shift": 0.5')
    assert broken != script
    write(Path(), broken, "mine.py")
    write(Path(), TOY.replace(str(TOY_SCRIPT), "mine.py"))
    done = normjax("run", "study.yaml", "--seeds", "2")
    assert done.code == 1
    assert (
        "up: manipulation check failed: the shift is what the arm says, predicted 3, "
        "measured 0.5\n" in done.out
    )


def test_diverged_seeds_are_said(normjax: Call):
    write(Path(), TOY)
    done = normjax("run", "study.yaml", "--set", "settings.poison=2")
    assert done.code == 0
    assert "baseline: 1 seeds diverged\n" in done.out


@pytest.mark.parametrize("module", ["polars", "ruamel.yaml", "jinja2", "mlxtend"])
def test_a_missing_extra_is_one_line_that_installs_it(tmp_path: Path, module: str):
    write(tmp_path, TRAINING)
    hide = f"import sys; sys.modules[{module!r}] = None"
    done = process(hide, "run", "study.yaml", folder=tmp_path)
    package = module.split(".")[0]
    line = f"{package} is missing: pip install 'normjax[study,data]'\n"
    assert done == Done(2, "", line)
