"""Several processes fill one run directory, and none knows of the others."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from commands import Call
from commands import normjax as normjax
from studies import TOY, write

from normjax import study
from normjax.study.plan import Plan, make_plan
from normjax.study.store import Store

pytestmark = pytest.mark.jax_defaults


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    return make_plan(write(tmp_path, TOY))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11])
def test_parts_are_disjoint_equal_and_in_the_order_of_programs(plan: Plan, count: int):
    numbers = plan.shards(count)
    assert set(numbers) == {block.id for block in plan.blocks}
    sizes = [list(numbers.values()).count(n) for n in range(1, count + 1)]
    assert sum(sizes) == 8
    assert max(sizes) - min(sizes) <= 1
    ordered = plan.by_form(plan.blocks)
    assert all(numbers[a.id] <= numbers[b.id] for a, b in pairwise(ordered))
    forms = [plan.forms[block.arm] for block in ordered]
    assert sum(a != b for a, b in pairwise(forms)) == plan.programs - 1


@pytest.mark.usefixtures("plan")
def test_three_shards_in_any_order_are_one_run():
    whole, judged = study.run("study.yaml", out="whole")
    for number, others in ((3, r"shard [12]"), (1, r"shard 2")):
        with pytest.raises(study.UnfinishedError, match=others) as caught:
            study.run("study.yaml", out="run", shard=(number, 3))
        assert caught.value.failed == ()
        parts = {block["shard"] for block in caught.value.missing}
        assert parts == ({1, 2} if number == 3 else {2})
    results, analysis = study.run("study.yaml", out="run", shard=(2, 3))
    assert results.table.equals(whole.table)
    assert analysis == judged
    assert not list(Path("run").rglob("*.part"))


@pytest.mark.usefixtures("plan")
def test_a_shard_leaves_the_plan_as_it_is():
    with pytest.raises(study.UnfinishedError, match="missing"):
        study.run("study.yaml", out="run", shard=(1, 2))
    before = Path("run/plan.json").read_bytes()
    shards = [block["shard"] for block in json.loads(before)["blocks"]]
    assert sorted(shards) == [1] * 4 + [2] * 4
    study.run("study.yaml", out="run", shard=(2, 2))
    assert Path("run/plan.json").read_bytes() == before


@pytest.mark.usefixtures("plan")
def test_a_shard_of_another_run_is_refused():
    with pytest.raises(study.UnfinishedError, match="missing"):
        study.run("study.yaml", out="run", shard=(1, 2))
    message = (
        r"\Arun holds a run of another plan, or of another number of shards: --out "
    )
    with pytest.raises(study.ConfigError, match=message):
        study.run("study.yaml", out="run", shard=(2, 3))
    with pytest.raises(study.ConfigError, match=message):
        study.run("study.yaml", out="run", shard=(2, 2), seeds=5)


def test_two_that_open_at_once_do_not_collide(plan: Plan, monkeypatch):
    """The second one opens while the first has written a draft, and nothing else."""
    first, second, calls = Store(Path("run")), Store(Path("run")), []
    replace = __import__("os").replace

    def meanwhile(source, target) -> None:
        if not calls:
            calls.append(target)
            second.open(plan, {}, "new", shards=2)
        replace(source, target)

    monkeypatch.setattr("os.replace", meanwhile)
    first.open(plan, {}, "new", shards=2)
    assert calls == [Path("run/plan.json")]
    assert not list(Path("run").rglob("*.part"))


def test_the_command_and_the_report(normjax: Call):
    write(Path(), TOY)
    done = normjax("run", "study.yaml", "--shard", "2/2")
    assert done.code == 0
    named = "; ".join(
        f"{arm}, seeds {seeds} (shard 1)"
        for seeds, arms in (("0 to 3", ("baseline", "up", "again")),
                            ("4 to 5", ("baseline",)))
        for arm in arms
    )  # fmt: skip
    text = f"runs/toy: 4 of 8 blocks missing: {named}. --resume computes all\n"
    assert done.out == text
    assert normjax("report", "runs/toy") == (2, "", text)
    assert normjax("results", "runs/toy") == (2, "", text)
    done = normjax("run", "study.yaml", "--shard", "1/2")
    assert done.code == 0
    assert done.out.endswith("page: runs/toy/report.html\n")
    assert normjax("report", "runs/toy").code == 0
