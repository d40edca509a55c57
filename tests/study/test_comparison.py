"""Two runs side by side: every planted difference is found, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from studies import TOY, refused, write

from normjax import study

pytestmark = pytest.mark.jax_defaults


def run(folder: Path, name: str, text: str = TOY, **options) -> Path:
    study.run(write(folder, text), out=folder / name, **options)
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compared")


@pytest.fixture(scope="module")
def first(folder: Path) -> Path:
    return run(folder, "first")


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    """Another shift and noise in one arm, more seeds, another margin, one arm less."""
    text = TOY.replace("set: {noise: 1.5}", "set: {noise: 2.5}")
    text = text.replace(
        "  extra: {set: {form: extra}}\n", "  late: {set: {poison: 3}}\n"
    )
    text = text.replace("at_least: 1.0", "at_least: 2.0")
    text = text.replace("extra.value = baseline.value", "late.value = baseline.value")
    return run(folder, "other", text, seeds=8, overrides=["settings.points=2"])


def changed(run: Path, target: Path, file: str, change) -> Path:
    """A copy of a run with one of its JSON files changed."""
    shutil.copytree(run, target)
    path = target / file
    data = json.loads(path.read_text("utf-8"))
    change(data)
    path.write_text(json.dumps(data), "utf-8")
    return target


def test_a_run_equals_itself(first: Path):
    found = study.compare(first, first)
    assert (found.config, found.sources) == ((), ())
    assert found.same_hypotheses
    assert found.seeds == (6, 0, 0)
    assert found.hypotheses["H1"] == ("supported", "supported")
    assert {(one.arm, one.parent, one.metric) for one in found.effects} > {
        ("up", "baseline", "value"),
        ("again", "up", "loss"),
    }
    for one in found.effects:
        assert one.change is not None
        assert set(one.change.differences) == {0.0}
    assert found.only_first == found.only_second == ()


def test_every_declared_difference_is_named_once(first: Path, other: Path):
    found = study.compare(first, other)
    assert {(d.key, d.first, d.second) for d in found.config} == {
        ("seeds.count", 6, 8),
        ("settings.points", 3, 2),
        ("arms.again.settings.noise", 1.5, 2.5),
        ("arms.extra", "present", "absent"),
        ("arms.late", "absent", "present"),
        ("hypotheses.H1.at_least", 1.0, 2.0),
        (
            "hypotheses.H2.statement",
            "extra.value = baseline.value",
            "late.value = baseline.value",
        ),
    }
    assert not found.same_hypotheses
    assert list(found.hypotheses) == ["H3"]  # the others read differently
    assert found.seeds == (6, 0, 2)
    assert "extra − baseline, value" in found.only_first
    assert "late − baseline, value" in found.only_second


def test_the_difference_of_effects_is_paired_over_common_seeds(
    first: Path, other: Path
):
    """Against NumPy and SciPy, from the tables alone."""
    runs = study.load(first), study.load(other)
    effects = []
    for results in runs:
        after, before = (results.values(arm, "value") for arm in ("again", "up"))
        effects.append(np.array([after[s] - before[s] for s in range(6)]))
    expected = effects[1] - effects[0]
    low, high = stats.ttest_1samp(expected, 0.0).confidence_interval(0.95)
    compared = study.compare(first, other)
    (found,) = (
        one for one in compared.effects if (one.arm, one.metric) == ("again", "value")
    )
    assert found.change is not None
    np.testing.assert_allclose(found.change.differences, expected, rtol=1e-12)
    assert found.change.low == pytest.approx(low)
    assert found.change.high == pytest.approx(high)
    assert found.first.mean == pytest.approx(effects[0].mean())
    assert found.change.lost == (0, 0, 0)


def test_a_lost_seed_of_one_run_is_counted(first: Path, folder: Path):
    lost = run(folder, "lost", overrides=["settings.poison=2"])
    found = study.compare(first, lost)
    assert [d.key for d in found.config] == ["settings.poison"]
    (up,) = (o for o in found.effects if (o.arm, o.metric) == ("up", "value"))
    assert up.change is not None
    assert (up.change.seeds, up.change.lost) == (5, (0, 1, 0))


@pytest.mark.parametrize("key", ["random_generator", "data"])
def test_equal_seeds_that_drew_other_numbers_do_not_pair(
    first: Path, tmp_path: Path, key: str
):
    other = changed(
        first, tmp_path / "o", "provenance.json", lambda d: d.update({key: {"x": "y"}})
    )
    found = study.compare(first, other)
    assert not found.pairs
    assert {one.change for one in found.effects} == {None}
    assert key in {d.key.split(".")[0] for d in found.sources}


def test_versions_are_sources_and_times_are_not(first: Path, tmp_path: Path):
    def change(data):
        data["packages"]["jax"] = "0.0.1"
        data["started"], data["command"] = "then", "that"

    other = changed(first, tmp_path / "o", "provenance.json", change)
    ((found,), pairs) = (found := study.compare(first, other)).sources, found.pairs
    assert (found.key, found.second) == ("packages.jax", "0.0.1")
    assert pairs


def test_effects_at_the_best_setting_are_their_own(first: Path, tmp_path: Path):
    """Tuned studies judge a pair of arms twice."""

    def change(data):
        shared = data["contrasts"][0]
        shared["at"] = "shared"
        data["contrasts"].append({**shared, "at": "best"})

    other = changed(first, tmp_path / "o", "analysis.json", change)
    found = study.compare(other, other)
    assert [o.at for o in found.effects if o.at] == ["shared", "best"]
    found = study.compare(first, other)
    assert found.only_second == (
        "up − baseline, value at shared",
        "up − baseline, value at best",
    )


def test_only_judged_runs_are_compared(first: Path, tmp_path: Path):
    with refused(f"{tmp_path} holds no finished run: plan.json is missing"):
        study.compare(first, tmp_path)
    copy = shutil.copytree(first, tmp_path / "copy")
    (copy / "analysis.json").unlink()
    with refused(f"{copy} holds no finished run: analysis.json is missing"):
        study.compare(copy, first)
