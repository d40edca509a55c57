"""``normjax report``, ``compare`` and ``results``."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Call, Done, table
from commands import normjax as normjax
from studies import TOY, exact, write
from studies import quick_compile as quick_compile

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("quick_compile")]


def test_two_runs_are_compared(normjax: Call):
    write(Path(), TOY)
    assert normjax("run", "study.yaml", "--out", "a").code == 0
    changes = ("--set", "settings.shift=1.0", "--seeds", "4")
    # H3 and H1 speak of the difference from the baseline, which is now 2.
    assert normjax("run", "study.yaml", "--out", "b", *changes).code == 0
    done = normjax("compare", "a", "b")
    assert (done.code, done.err) == (0, "")
    rows = table(done.out)
    assert ["config", "first", "second"] in rows
    assert ["settings.shift", "0.0", "1.0"] in rows
    assert ["seeds.count", "6", "4"] in rows
    assert ["data, versions, device: the same"] in rows
    assert ["H1", "supported", "supported"] in rows
    assert ["seeds: 4 in both, 2 only in the first, 0 only in the second"] in rows
    (up,) = (row for row in rows if row[0] == "up − baseline")
    assert up[1:3] == ["3 [3, 3]", "2 [2, 2]"]
    assert up[3:] == ["−1 [−1, −1]", "better → better"]
    assert ["--all shows diagnostics too: loss"] in rows
    every = table(normjax("compare", "a", "b", "--all").out)
    assert [row[0] for row in every if row[1:3] == ["first", "second"]] == [
        "config", "hypothesis", "value", "loss",
    ]  # fmt: skip


def test_runs_without_seeds_are_compared(normjax: Call):
    write(Path(), exact(Path()))
    assert normjax("run", "study.yaml", "--out", "a").code == 0
    assert normjax("compare", "a", "a") == Done(
        0,
        "config: the same\n"
        "data, versions, device: the same\n"
        "hypotheses and outcomes: the same\n"
        "seeds: none, both are exact\n",
        "",
    )
    assert table(normjax("results", "a").out)[1] == ["baseline", "y", "1"]


def test_results_are_printed_and_written(normjax: Call):
    write(Path(), TOY)
    run = ("run", "study.yaml", "--out", "a", "--set", "settings.poison=2")
    assert normjax(*run).code == 0
    rows = table(normjax("results", "a").out)
    assert rows[0] == ["arm", "metric", "mean, 95 % interval", "seeds", "lost"]
    assert [row[0] for row in rows[1:]].count("extra") == 3
    assert {tuple(row[3:]) for row in rows[1:]} == {("5", "1")}
    done = normjax("results", "a", "--out", "all.csv")
    lines = Path("all.csv").read_text("utf-8").splitlines()
    assert lines[0] == "study,arm,role,block,seed,metric,coordinate,value"
    assert done == Done(0, f"{len(lines) - 1} rows: all.csv\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "gone"], "gone holds no finished run: plan.json is missing"),
        (["results", "gone"], "gone holds no finished run: plan.json is missing"),
        (["compare", "gone", "x"], "gone holds no finished run: plan.json is missing"),
    ],
)
def test_what_is_no_run(normjax: Call, arguments: list[str], message: str):
    assert normjax(*arguments) == Done(2, "", f"{message}\n")


def test_a_table_of_an_unknown_kind(normjax: Call):
    write(Path(), exact(Path()))
    assert normjax("run", "study.yaml", "--out", "a").code == 0
    done = normjax("results", "a", "--out", "x.txt")
    assert done == Done(2, "", "x.txt ends in .txt, expected .csv or .parquet\n")
