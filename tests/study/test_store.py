"""The run directory: whole blocks or none, open formats, and who may write where."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from studies import TOY, exact, refused, write

from normjax import study
from normjax.study import executors
from normjax.study.cells import Row
from normjax.study.plan import Plan, make_plan
from normjax.study.store import ROW, Store, load

pytestmark = pytest.mark.jax_defaults

NUMBERS = {"value": 1.5, "none": None, "nan": math.nan, "inf": math.inf}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plan() -> Plan:
    return make_plan(write(Path(), TOY))


def rows(seeds: tuple[int, ...], add: float = 0.0) -> list[Row]:
    found = [Row(s, name, None, v) for s in seeds for name, v in NUMBERS.items()]
    found += [Row(s, "curve", x, 2 * x + add) for s in seeds for x in (0.5, 1.0)]
    return found


def fill(store: Store, plan: Plan) -> None:
    for block in plan.blocks:
        store.write(block, rows(block.seeds), seconds=0.5)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_the_long_table(plan: Plan):
    store = Store(Path("run"))
    store.open(plan, {"started": "today"}, "new")
    fill(store, plan)
    results = store.finish(plan)
    table = pl.read_parquet("run/results.parquet")
    assert table.schema == pl.Schema(
        {
            "study": pl.String,
            "arm": pl.String,
            "role": pl.String,
            "block": pl.String,
            "seed": pl.Int64,
            "metric": pl.String,
            "coordinate": pl.Float64,
            "value": pl.Float64,
        }
    )
    assert table.equals(results.table)
    assert len(table) == 4 * 6 * (len(NUMBERS) + 2)
    assert set(table["arm"]) == set(plan.arms)
    again = table.filter(pl.col("arm") == "again")
    assert set(again["role"]) == {"negative_control"}
    assert sorted(set(again["seed"])) == list(range(6))
    assert set(table["block"]) == {block.id for block in plan.blocks}
    assert results.provenance == {"started": "today"}
    assert results.plan["hypotheses_hash"] == plan.hypotheses_hash


def test_no_value_is_null_and_what_is_not_finite_is_kept(plan: Plan):
    store = Store(Path("run"))
    store.open(plan, {}, "new")
    fill(store, plan)
    results = store.finish(plan)
    by_name = {
        name: results.table.filter(pl.col("metric") == name)["value"]
        for name in NUMBERS
    }
    assert by_name["none"].is_null().all()
    assert by_name["nan"].is_nan().all()
    assert by_name["inf"].is_infinite().all()
    assert results.values("up", "none") == {}
    assert results.values("up", "value") == dict.fromkeys(range(6), 1.5)
    assert [math.isnan(v) for v in results.values("up", "nan").values()] == [True] * 6
    assert results.values("up", "curve") == {}
    assert results.values("nobody", "value") == {}


def test_curves_are_sorted_by_coordinate_and_seed(plan: Plan):
    store = Store(Path("run"))
    store.open(plan, {}, "new")
    fill(store, plan)
    curve = store.finish(plan).curve("up", "curve")
    assert curve.columns == ["seed", "coordinate", "value"]
    assert curve["coordinate"].to_list() == [0.5] * 6 + [1.0] * 6
    assert curve["seed"].to_list() == [*range(6), *range(6)]
    assert curve["value"].to_list() == [1.0] * 6 + [2.0] * 6


def test_exact_rows_have_no_seed(folder: Path):
    plan = make_plan(write(folder, exact(folder), "c.yaml"))
    store = Store(Path("run"))
    store.open(plan, {}, "new")
    store.write(plan.blocks[0], [Row(None, "y", None, 2.0)])
    results = store.finish(plan)
    assert results.table["seed"].to_list() == [None]
    assert results.values("baseline", "y") == {}


def test_what_lies_in_a_run_directory(plan: Plan, folder: Path):
    store = Store(Path("run"))
    store.open(plan, {"started": "today"}, "new")
    assert (folder / "run/config.yaml").read_text() == TOY
    block = plan.blocks[0]
    assert not store.has(block)
    store.write(block, rows(block.seeds), seconds=0.5)
    assert store.has(block)
    assert json.loads((folder / f"run/blocks/{block.id}.json").read_text()) == {
        "arm": "baseline",
        "seeds": [0, 1, 2, 3],
        "seconds": 0.5,
    }
    frame = pl.read_parquet(f"run/blocks/{block.id}.parquet")
    assert frame.schema == pl.Schema(ROW)
    assert not list(folder.rglob("*.part"))


def test_json_has_no_nan(plan: Plan):
    store = Store(Path("run"))
    store.open(plan, {}, "new")
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"Out of range float values are not JSON"):
            store.write_json("bad.json", {"x": bad})
    assert not Path("run/bad.json").exists()


class CrashError(RuntimeError):
    """The power goes."""


def crash_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Stop before a file of this name is moved to its place."""
    replace = os.replace

    def fail(source: Any, target: Any) -> None:
        if str(target).endswith(name):
            raise CrashError(str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)


@pytest.mark.parametrize("suffix", [".parquet", ".json"])
def test_a_crash_leaves_no_half_block(plan: Plan, monkeypatch, suffix: str):
    """Between the table and its marker, and before the table."""
    store, block = Store(Path("run")), plan.blocks[1]
    store.open(plan, {}, "new")
    with monkeypatch.context() as patch:
        crash_at(patch, f"{block.id}{suffix}")
        with pytest.raises(CrashError, match=block.id):
            store.write(block, rows(block.seeds, add=9.0))
    assert not store.has(block)
    assert not Path(f"run/blocks/{block.id}{suffix}").exists()
    named = [f"{a}, seeds 0 to 3" for a in plan.arms] + ["baseline, seeds 4 to 5"]
    with refused(
        f"run: 8 of 8 blocks missing: {'; '.join(named)}; 3 more. --resume computes all"
    ):
        store.finish(plan)
    fill(store, plan)
    curve = store.finish(plan).curve(block.arm, "curve")
    assert curve["value"].to_list() == [1.0] * 6 + [2.0] * 6


def test_resume_computes_what_a_crash_left_out_and_nothing_else(monkeypatch, folder):
    config = write(folder, TOY)
    whole, _ = study.run(config, out="whole")
    blocks = make_plan(config).blocks
    with monkeypatch.context() as patch:
        crash_at(patch, f"{blocks[4].id}.json")
        with pytest.raises(CrashError, match=blocks[4].id):
            study.run(config, out="run")
    done = {name for name in content(Path("run")) if name.endswith(".json")}
    done -= {"plan.json", "provenance.json"}
    before = {name: content(Path("run"))[name] for name in done}
    computed = []
    write_block = Store.write
    monkeypatch.setattr(
        Store,
        "write",
        lambda self, block, *a, **k: (computed.append(block.id),
                                      write_block(self, block, *a, **k)),
    )  # fmt: skip
    resumed, analysis = study.run(config, out="run", mode="resume")
    assert set(computed) == {b.id for b in blocks} - {Path(name).stem for name in done}
    assert blocks[4].id in computed
    assert 0 < len(computed) < len(blocks)
    for name, text in before.items():
        assert content(Path("run"))[name] == text
    assert resumed.table.equals(whole.table)
    assert analysis.verdicts[0].verdict == "supported"
    computed.clear()
    study.run(config, out="run", mode="resume")
    assert computed == []


def test_resume_adds_seeds_to_what_is_there(folder: Path):
    text = TOY.replace("count: 6, block: 4", "count: 4, block: 2")
    config = write(folder, text)
    study.run(config, out="run")
    before = {k: v for k, v in content(Path("run")).items() if k.endswith(".parquet")}
    results, _ = study.run(config, out="run", mode="resume", seeds=6)
    after = content(Path("run"))
    blocks = [name for name in before if name.startswith("blocks/")]
    assert len(blocks) == 8
    assert all(after[name] == before[name] for name in blocks)
    assert list(results.values("up", "value")) == list(range(6))


def test_arms_of_one_form_share_a_program(folder: Path):
    """The arms up and again differ from the baseline in marked numbers alone."""
    plan = make_plan(write(folder, TOY.replace("block: 4", "block: 2")))
    store = Store(Path("run"))
    store.open(plan, {}, "new")
    seen: list[str] = []

    def report(block) -> None:
        seen.append(block.arm)

    assert executors.local(plan, store, plan.blocks, report) == plan.programs == 2
    assert sorted(seen) == sorted(3 * list(plan.arms))
    assert seen[-3:] == ["extra"] * 3
    assert executors.local(plan, store, [], report) == 0


def test_modes(plan: Plan, folder: Path):
    store = Store(folder / "run")
    store.open(plan, {"n": 1}, "new")
    fill(store, plan)
    with refused(
        f"{folder / 'run'} holds a run already: --resume computes what is missing, "
        "--force starts anew, --out takes another folder"
    ):
        store.open(plan, {"n": 2}, "new")
    store.open(plan, {"n": 3}, "resume")
    assert all(store.has(block) for block in plan.blocks)
    assert json.loads((folder / "run/provenance.json").read_text()) == {"n": 3}
    store.open(plan, {"n": 4}, "force")
    assert not any(store.has(block) for block in plan.blocks)
    assert list((folder / "run/blocks").iterdir()) == []


@pytest.mark.parametrize("mode", ["new", "resume", "force"])
def test_a_foreign_directory_is_left_alone(plan: Plan, folder: Path, mode: str):
    (folder / "home").mkdir()
    write(folder / "home", "precious", "thesis.txt")
    text = "is not empty and holds no run; choose another --out"
    with refused(f"{folder / 'home'} {text}"):
        Store(folder / "home").open(plan, {}, mode)
    assert content(folder / "home") == {"thesis.txt": b"precious"}
    with refused(f"{folder / 'home/thesis.txt'} is a file; choose another --out"):
        Store(folder / "home/thesis.txt").open(plan, {}, mode)


@pytest.mark.parametrize("mode", ["new", "resume", "force"])
def test_an_empty_directory_is_welcome(plan: Plan, folder: Path, mode: str):
    (folder / "run").mkdir()
    Store(folder / "run").open(plan, {}, mode)
    assert (folder / "run/plan.json").exists()


def test_hypotheses_cannot_be_changed_once_the_first_cell_ran(folder: Path):
    config = write(folder, TOY)
    study.run(config, out="run")
    before = content(folder / "run")
    write(folder, TOY.replace("up.value < baseline", "up.value > baseline"))
    with refused(
        "run: hypotheses or outcomes are not those that were declared before its first "
        "cell ran; --force starts anew"
    ):
        study.run(config, out="run", mode="resume")
    assert content(folder / "run") == before


@pytest.mark.parametrize("name", ["plan.json", "provenance.json"])
def test_only_a_finished_run_is_loaded(plan: Plan, folder: Path, name: str):
    store = Store(Path("run"))
    store.open(plan, {}, "new")
    fill(store, plan)
    store.finish(plan)
    assert load("run").plan["study"] == "toy"
    (folder / "run" / name).unlink()
    with refused(f"run holds no finished run: {name} is missing"):
        load("run")
    with refused("nowhere holds no finished run: plan.json is missing"):
        load("nowhere")
