"""Decompositions, factorials, grids and tuning: from the config to the numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from studies import TOY_SCRIPT, exact, refused, write

from normjax import study
from normjax.study.design_results import choose
from normjax.study.plan import make_plan

pytestmark = pytest.mark.jax_defaults

HEAD = f"""\
study: d
question: q?
experiment: {TOY_SCRIPT}
settings: {{shift: 0.0}}
seeds: {{count: 6, block: 6}}
outcomes: {{primary: value}}
"""
SWAP = "{set: {shift: 1.0, noise: 1.5, points: 4}, decompose: true}"
FULL = f"""{HEAD}\
arms:
  up: {{set: {{shift: 3.0}}}}
  swap: {SWAP}
factorial: {{loud: {{noise: 2.0}}, high: {{shift: 2.0}}}}
grid: {{noise: [0.5, 1.0, 1e-3]}}
tune: {{key: points, values: [3, 5], select: loss}}
hypotheses:
  - {{id: H1, statement: swap+shift.value > baseline.value}}
  - {{id: H2, statement: noise=1e-3.value = baseline.value, within: 9}}
"""
NORM = """\
study: d
question: q?
experiment: training
settings: {task: {train: 40}, model: {norm: {preset: batch_norm}}, steps: 4}
seeds: {count: 2}
outcomes: {primary: test_r2}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(text: str):
    return make_plan(write(Path(), text, "c.yaml"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("designs")
    return study.run(write(folder, FULL), out=folder / "run")


def test_every_subset_is_an_arm_one_property_from_another():
    decided = plan(HEAD + f"arms:\n  swap: {SWAP}\n")
    names = ["shift", "noise", "shift+noise", "points", "shift+points", "noise+points"]
    made = {n: a for n, a in decided.arms.items() if a.role == "decomposition"}
    assert list(made) == [f"swap+{name}" for name in names]
    assert all(len(arm.changes) == 1 for arm in made.values())
    (about,) = decided.designs["decompositions"]
    assert about["lattice"] == ["baseline", *made, "swap"]
    for mask, name in enumerate(about["lattice"]):
        found = decided.arms[name].cell.settings
        for i, (key, before, after) in enumerate(
            [("shift", 0.0, 1.0), ("noise", 1.0, 1.5), ("points", 3, 4)]
        ):
            assert getattr(found, key) == (after if mask >> i & 1 else before)


def test_a_swap_of_presets_is_taken_apart():
    swap = "arms: {it: {set: {model.norm: {preset: rms_norm}}, decompose: true}}\n"
    decided = plan(NORM + swap)
    (about,) = decided.designs["decompositions"]
    assert about["players"] == ["pattern", "center", "divide", "affine.bias", "running"]
    assert len(decided.arms) == 2**5
    spec = decided.arms["it+center+divide"].cell.settings.model.norm.spec
    assert (spec.center, spec.divide, spec.pattern) == (False, "rms", "[...] c")
    assert spec.running is not None


def test_a_pattern_takes_its_sizes_and_names_along():
    swap = "{set: {model.norm: {preset: group_norm, groups: 2}}, decompose: true}"
    decided = plan(NORM + f"arms:\n  it: {swap}\n")
    spec = decided.arms["it+pattern"].cell.settings.model.norm.spec
    assert (spec.sizes, spec.affine.axes) == ((("g", 2),), "(g c)")


def test_a_group_is_one_player():
    groups = SWAP.replace("true", "[[shift, points], noise]")
    decided = plan(HEAD + f"arms:\n  swap: {groups}\n")
    (about,) = decided.designs["decompositions"]
    assert about["players"] == ["shift&points", "noise"]
    assert list(decided.arms)[2:] == ["swap+shift&points", "swap+noise"]
    assert decided.arms["swap+shift&points"].confounded


PAIRED = """\
from pydantic import model_validator
from normjax import study
from normjax.study.schema import problem
class Settings(study.Settings):
    a: int = 0
    b: int = 0
    c: int = 0
    @model_validator(mode="after")
    def together(self):
        if self.a != self.b:
            raise problem("a", "goes with b")
        return self
def measure(cell, key):
    return {"y": 1.0 * cell.settings.a}
"""


def test_combinations_that_cannot_be_built_are_refused_with_the_grouping(
    tmp_path: Path,
):
    text = exact(tmp_path, PAIRED)
    text += "seeds: {count: 2}\noutcomes: {primary: y}\narms:\n"
    arm = "  it: {set: {a: 1, b: 1, c: 1}, decompose: true}\n"
    with refused(
        "c.yaml:7:33: arms.it.decompose: of a, b, c, a cannot be changed without the "
        "others: a: goes with b; group what belongs together: decompose: [[a, b], c]"
    ):
        plan(text + arm)
    decided = plan(text + arm.replace("true", "[[a, b], c]"))
    assert list(decided.arms) == ["baseline", "it", "it+a&b", "it+c"]


TUNE = "tune: {key: points, values: [3, 5], select: "
REFUSED = {
    "one property": (
        "arms: {a: {set: {shift: 1.0}, decompose: true}}\n",
        "7:31: arms.a.decompose: needs an arm that changes several properties: it "
        "changes shift",
    ),
    "six properties": (
        "arms: {a: {set: {shift: 1.0, noise: 2.0, form: extra, poison: 0, points: 4, "
        "wrong: true}, decompose: true}}\n",
        "7:91: arms.a.decompose: 6 properties make 64 arms, expected at most 5 "
        "properties: group some of shift, noise, form, poison, points, wrong",
    ),
    "a group that names another property": (
        f"arms:\n  a: {SWAP.replace('true', '[shift, noise, form]')}\n",
        "8:49: arms.a.decompose: names shift, noise, form, expected each of shift, "
        "noise, points once",
    ),
    "one factor": (
        "factorial: {a: {shift: 1.0}}\n",
        "7:1: factorial: expected 2 to 5 factors, got 1",
    ),
    "a factor of two properties": (
        "factorial: {a: {shift: 1.0, noise: 2.0}, b: {points: 4}}\n",
        "7:13: factorial.a: expected a factor to change one property, it changes "
        "shift, noise",
    ),
    "a factor of none": (
        "factorial: {a: {shift: 0.0}, b: {points: 4}}\n",
        "7:13: factorial.a: expected a factor to change one property, it changes "
        "nothing",
    ),
    "a factor with the name of an arm": (
        "arms: {a: {set: {shift: 1.0}}}\n"
        "factorial: {a: {noise: 2.0}, b: {points: 4}}\n",
        "8:13: factorial.a: makes an arm 'a', which is there",
    ),
    "a wrong value in a factorial": (
        "factorial: {a: {shift: x}, b: {points: 4}}\n",
        "7:13: factorial.a: a: shift: expected a number, got 'x'",
    ),
    "a wrong value in a grid": (
        "grid: {noise: [1.0, x]}\n",
        "7:8: grid.noise: noise=x: noise: expected a number, got 'x'",
    ),
    "a mapping in a grid": (
        "grid: {noise: [{a: 1}]}\n",
        "7:8: grid.noise: got {'a': 1}, expected a number, a word, null, a list or a "
        "preset",
    ),
    "a path through a number": (
        "grid: {shift.a: [1]}\n",
        "7:8: grid.shift.a: shift.a: shift is no mapping in 'baseline': set it whole",
    ),
    "one value to tune": (
        "tune: {key: points, values: [3], select: loss}\n",
        "7:21: tune.values: expected 2 or more items, got [3]",
    ),
    "a choice by what is judged": (
        TUNE + "value}\n",
        "7:37: tune.select: 'value' is what is judged: choose by another metric "
        "(train_loss)",
    ),
    "a choice by what is not there": (
        TUNE + "lss}\n",
        "7:37: tune.select: there is no metric 'lss'; did you mean 'loss'?",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_design_is_refused(name: str):
    text, message = REFUSED[name]
    with refused(f"c.yaml:{message}"):
        plan(HEAD + text)


def test_a_design_needs_an_outcome_and_seeds():
    text = "factorial: {a: {shift: 1.0}, b: {points: 4}}\n"
    bare = HEAD.replace("outcomes: {primary: value}\n", "")
    with refused(
        "c.yaml:6:1: factorial: are judged on an outcome: add outcomes: {primary: a "
        "metric}"
    ):
        plan(bare + text)


def test_a_grid_takes_the_baseline_for_its_own_value():
    decided = plan(
        HEAD + "grid: {noise: [0.5, 1.0], shift: [0.0, 2]}\n".replace("2]", "2.0]")
    )
    assert [p["arm"] for p in decided.designs["grid"]["points"]] == [
        "noise=0.5,shift=0",
        "noise=0.5,shift=2",
        "baseline",
        "noise=1,shift=2",
    ]
    parents = {n: a.parent for n, a in decided.arms.items() if a.parent}
    assert parents["noise=0.5,shift=2"] == "noise=0.5,shift=0"
    assert not any(arm.confounded for arm in decided.arms.values())


def test_shares_sum_to_the_difference_of_every_seed(ran: Any):
    results, analysis = ran
    (found,) = analysis.designed.decompositions
    total = np.array(found.total.differences)
    shares = np.array([s.shapley.differences for s in found.shares])
    # Six arms of float32 numbers near 3, read as float64: rounding of the sums only.
    np.testing.assert_allclose(shares.sum(0), total, atol=1e-14)
    ends = [results.values(a, "value") for a in ("baseline", "swap")]
    expected = [ends[1][s] - ends[0][s] for s in ends[0]]
    np.testing.assert_allclose(total, expected, rtol=0, atol=0)
    by_name = {s.label: s.shapley.mean for s in found.shares}
    noise = np.mean(list(results.values("baseline", "value").values()))
    # value = shift + noise·z in float32: its rounding at 3 is 2.4e-7.
    assert by_name == pytest.approx(
        {"shift": 1.0, "noise": 0.5 * noise, "points": 0.0}, abs=1e-6
    )
    assert [t.label for t in found.interactions] == [
        "shift × noise",
        "shift × points",
        "noise × points",
    ]


def test_a_factorial_has_every_effect_and_holms_p(ran: Any):
    terms = ran[1].designed.factorial
    assert [t.label for t in terms] == ["loud", "high", "loud × high"]
    assert terms[1].paired.mean == pytest.approx(2, abs=1e-6)
    assert terms[2].paired.mean == pytest.approx(0, abs=1e-6)
    assert terms[1].p < 1e-6 < terms[0].p


def test_doses_stand_against_the_baseline(ran: Any):
    results, analysis = ran
    doses = analysis.designed.doses
    assert [d.arm for d in doses] == ["noise=0.5", "baseline", "noise=1e-3"]
    assert [d.change is None for d in doses] == [False, True, False]
    base = np.mean(list(results.values("baseline", "value").values()))
    assert doses[0].mean.mean == pytest.approx(base / 2, abs=1e-6)


def test_generated_arms_are_in_no_contrast_and_hypotheses_may_name_them(ran: Any):
    results, analysis = ran
    assert {c.arm for c in analysis.contrasts} == {"up", "swap"}
    assert [c.at for c in analysis.contrasts] == [
        None,
        None,
        *["shared"] * 2,
        *["best"] * 2,
    ]
    assert [v.verdict for v in analysis.verdicts] == ["supported", "supported"]
    stored = json.loads((results.folder / "analysis.json").read_text("utf-8"))
    assert len(stored["designed"]["factorial"]) == 3


TUNED = {"key": "k", "values": [1, 2], "select": "l", "better": "lower"}


def metric(table: Mapping[str, Sequence[float]]):
    return lambda arm, _: dict(enumerate(table[arm]))


def test_tuning_chooses_for_the_baseline_and_for_each_arm():
    arms = {"baseline": ["b1", "b2"], "a": ["a1", "a2"]}
    about = {
        "key": "k",
        "values": [1, 2],
        "select": "l",
        "better": "lower",
        "arms": arms,
    }
    table = {"b1": [1, 2], "b2": [2, 3], "a1": [5, 5], "a2": [4, 4]}
    found = choose(about, metric(table))
    assert [(r.shared, r.best) for r in found.rows] == [("b1", "b1"), ("a1", "a2")]
    found = choose({**about, "better": "higher"}, metric(table))
    assert [(r.shared, r.best) for r in found.rows] == [("b2", "b2"), ("a2", "a1")]
    assert found.rows[0].scores == (1.5, 2.5)


def test_a_value_at_which_a_seed_diverged_is_not_chosen():
    arms = {"baseline": ["b1", "b2"]}
    about = {
        "key": "k",
        "values": [1, 2],
        "select": "l",
        "better": "lower",
        "arms": arms,
    }
    found = choose(about, metric({"b1": [0.0, np.nan], "b2": [9.0, 9.0]}))
    assert found.rows[0].best == "b2"
    assert found.rows[0].scores == (None, 9.0)
    lost = choose(about, metric({"b1": [np.nan] * 2, "b2": [np.nan] * 2}))
    assert lost.rows[0].scores == (None, None)


def test_a_diverged_seed_scores_what_the_study_says(tmp_path: Path):
    text = HEAD + "arms: {bad: {set: {poison: 2}}}\n"
    _, plain = study.run(write(tmp_path, text), out=tmp_path / "plain")
    assert plain.contrasts[0].paired.lost == (0, 1, 0)
    text = text.replace("primary: value", "primary: value, diverged: -100")
    results, declared = study.run(write(tmp_path, text), out=tmp_path / "declared")
    (found,) = declared.contrasts
    assert (found.paired.seeds, sum(found.paired.lost)) == (6, 0)
    value = results.values("baseline", "value")[2]
    assert min(found.paired.differences) == pytest.approx(-100 - value)
    assert found.complete is not None
    assert found.complete.seeds == 5
    assert declared.diverged == {"baseline": 0, "bad": 1}
