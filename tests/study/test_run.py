"""A study from its file to its verdicts: real data, tiny networks, few seeds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
from studies import quick_compile as quick_compile
from studies import refused, write

from normjax import study

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("quick_compile")]

TEXT = """\
study: tiny
question: Does the level carry the label?
experiment: training
settings:
  task: {train: 60}
  model: {widths: [4]}
  optimizer: {name: sgd, learning_rate: 0.05, momentum: 0.9}
  steps: 500
  record_every: 4
seeds: {count: 8, block: 3}
arms:
  layer_norm: {set: {model.norm: {preset: layer_norm}}}
  rms: {from: layer_norm, set: {model.norm.divide: rms}}
  side_route: {from: layer_norm, set: {model.side_route: mean}}
  shuffled: {from: side_route, set: {model.side_route_shuffled: true}}
outcomes: {primary: test_r2, diagnostics: [grad_norm, stabilizer_share]}
hypotheses:
  - {id: H1, statement: layer_norm.test_r2 < baseline.test_r2, required: true}
smoke: {settings.steps: 6}
"""
ARMS = ("baseline", "layer_norm", "rms", "side_route", "shuffled")


class Run(NamedTuple):
    folder: Path
    results: study.Results
    analysis: study.Analysis

    def values(self, arm: str) -> dict[str, dict[int, Any]]:
        """Scalars of an arm, by metric and seed."""
        table = self.results.table.filter(
            (pl.col("arm") == arm) & pl.col("coordinate").is_null()
        )
        found: dict[str, dict[int, Any]] = {}
        for row in table.iter_rows(named=True):
            found.setdefault(row["metric"], {})[row["seed"]] = row["value"]
        return found


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory, quick_compile) -> Run:
    del quick_compile
    folder = tmp_path_factory.mktemp("smoke")
    config = write(folder, TEXT)
    results, analysis = study.run(config, out=folder / "run", smoke=True)
    return Run(folder / "run", results, analysis)


def test_every_arm_ran_on_every_seed(smoke: Run):
    for arm in ARMS:
        found = smoke.results.values(arm, "test_r2")
        assert list(found) == [0, 1, 2, 3]
        assert all(math.isfinite(value) for value in found.values())
    assert smoke.results.values("baseline", "stabilizer_share") == {}
    assert len(smoke.results.values("rms", "stabilizer_share")) == 4


def test_leaves_and_data_are_identical_across_arms(smoke: Run):
    """In the table itself, bit for bit; only what an arm adds is new."""
    base = smoke.values("baseline")
    data = [name for name in base if name.startswith("check.data")]
    leaves = [name for name in base if name.startswith("check.init.")]
    assert data == ["check.data 60"]
    assert len(leaves) == 4
    for arm in ARMS[1:]:
        found = smoke.values(arm)
        for name in (*data, *leaves):
            assert found[name] == base[name], (arm, name)
    new = {k for k in smoke.values("side_route") if k.startswith("check.init.")}
    new -= {k for k in smoke.values("layer_norm") if k.startswith("check.init.")}
    assert {n.split()[0] for n in new} == {
        "check.init.side_route/kernel",
        "check.init.side_route/bias",
    }
    assert len(set(base["check.data 60"].values())) == 4
    assert len(set(base["check.init.head/kernel 4x1"].values())) == 4


def test_the_shuffled_route_differs_by_the_shuffle_alone(smoke: Run):
    plain, shuffled = smoke.values("side_route"), smoke.values("shuffled")
    for name in plain:
        if name.startswith("check.init") or name.startswith("check.norm"):
            assert plain[name] == shuffled[name]
    assert plain["test_r2"] != shuffled["test_r2"]
    assert all(abs(r) < 0.65 for r in shuffled["check.side_level"].values())
    assert all(abs(r - 1) < 1e-5 for r in plain["check.side_level"].values())


def test_manipulations_hold(smoke: Run):
    found = smoke.analysis.manipulations
    assert {m.arm for m in found} == set(ARMS[1:])
    assert all(m.ok for m in found), found
    assert len([m for m in found if m.name.startswith("same data")]) == 4


def test_the_run_directory_is_complete(smoke: Run):
    names = {p.name for p in smoke.folder.iterdir()}
    assert names == {
        "analysis.json",
        "blocks",
        "config.yaml",
        "plan.json",
        "provenance.json",
        "results.parquet",
    }
    assert len(list((smoke.folder / "blocks").iterdir())) == 2 * len(ARMS)
    for path in smoke.folder.rglob("*.json"):
        assert "NaN" not in path.read_text()
        json.loads(path.read_text(), parse_constant=pytest.fail)
    plan = json.loads((smoke.folder / "plan.json").read_text())
    assert plan["seeds"] == {"count": 4, "block": 4, "first": 0}
    assert plan["arms"]["rms"]["changes"] == [
        {"name": "model.norm.divide", "before": "std", "after": "rms"}
    ]
    assert plan["arms"]["baseline"]["settings"]["steps"] == 6
    assert (smoke.folder / "config.yaml").read_text() == TEXT


def test_the_provenance_repeats_the_run(smoke: Run):
    found = smoke.results.provenance
    assert found["command"].startswith("normjax run ")
    assert found["command"].endswith("study.yaml --smoke")
    assert len(found["data"]["auto_mpg"]) == 64
    assert found["packages"]["jax"]
    assert found["x64"] is False
    assert found["commit"] is None  # the config lies in no checkout
    assert {"started", "device", "backend", "python", "random_generator"} <= set(found)


def test_the_analysis_is_stored(smoke: Run):
    stored = json.loads((smoke.folder / "analysis.json").read_text())
    assert stored == json.loads(json.dumps(smoke.analysis.to_dict()))
    (verdict,) = stored["verdicts"]
    assert verdict["paired"]["seeds"] == 4
    assert [c["arm"] for c in stored["contrasts"]][:4] == list(ARMS[1:])


def test_a_finished_run_is_loaded(smoke: Run):
    loaded = study.load(smoke.folder)
    assert loaded.table.equals(smoke.results.table)
    again = study.analyze(loaded)
    assert again.verdicts == smoke.analysis.verdicts


def test_a_second_run_needs_a_word(smoke: Run):
    config = write(smoke.folder.parent, TEXT)
    with refused(
        f"{smoke.folder} holds a run already: --resume computes what is missing, "
        "--force starts anew, --out takes another folder"
    ):
        study.run(config, out=smoke.folder, smoke=True)
    resumed, _ = study.run(config, out=smoke.folder, smoke=True, mode="resume")
    assert resumed.table.equals(smoke.results.table)


def test_a_wrong_config_leaves_nothing_behind(tmp_path: Path):
    config = write(tmp_path, TEXT.replace("steps: 500", "steps: none"))
    message = r"study\.yaml:8:3: settings\.steps: expected a whole number, got 'none'\Z"
    with pytest.raises(study.ConfigError, match=message):
        study.run(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_names_of_the_default_directory(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = (
        "from normjax import study\nclass Settings(study.Settings): ...\n"
        "def measure(cell, key): return {'y': 1.0}\n"
    )
    write(tmp_path, script, "mine.py")
    write(tmp_path, "study: mine\nquestion: q?\nexperiment: mine.py\n")
    assert study.run("study.yaml")[0].folder == Path("runs/mine")
    assert study.run("study.yaml", smoke=True)[0].folder == Path("runs/mine-smoke")
