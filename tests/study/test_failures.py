"""A block that fails is recorded, stops no other, and is computed when asked again."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Call
from commands import normjax as normjax
from studies import TOY, TOY_SCRIPT, write

from normjax import study
from normjax.study.plan import Plan, make_plan
from normjax.study.store import Store

pytestmark = pytest.mark.jax_defaults

# No statement is about the arm extra, so it is not traced before it runs.
FAILS = """
import pathlib
def measure(cell, key):
    if cell.settings.form == "extra" and pathlib.Path("broken").exists():
        raise RuntimeError("the disk is on fire\\n  and so is the house")
    return toy(cell, key)
"""
QUIET = TOY.replace(
    "  - {id: H2, statement: extra.value = baseline.value, within: 0.1}\n", ""
)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study with one failing arm; without the file ``broken`` nothing fails."""
    monkeypatch.chdir(tmp_path)
    script = TOY_SCRIPT.read_text(encoding="utf-8")
    write(tmp_path, script.replace("def measure", "def toy") + FAILS, "mine.py")
    write(tmp_path, "", "broken")
    return write(tmp_path, QUIET.replace(str(TOY_SCRIPT), "mine.py"))


def there(plan: Plan, folder: str = "run") -> dict[str, int]:
    """Times of the blocks that are there."""
    store = Store(Path(folder))
    return {
        block.id: (store.blocks / f"{block.id}.json").stat().st_mtime_ns
        for block in plan.blocks
        if store.has(block)
    }


def ids(plan: Plan, arm: str) -> set[str]:
    return {block.id for block in plan.blocks if block.arm == arm}


def test_the_others_are_computed_and_the_traceback_is_kept(broken: Path):
    plan = make_plan(broken)
    with pytest.raises(
        study.UnfinishedError, match=r"run: 2 of 8 blocks failed"
    ) as caught:
        study.run(broken, out="run")
    assert {block["id"] for block in caught.value.failed} == ids(plan, "extra")
    assert caught.value.missing == ()
    assert set(there(plan)) == {b.id for b in plan.blocks} - ids(plan, "extra")
    for name in ids(plan, "extra"):
        text = Path(f"run/blocks/{name}.failed").read_text(encoding="utf-8")
        first = "RuntimeError: the disk is on fire\n\n"
        assert text.startswith(f"{first}Traceback (most recent call last):\n")
        assert 'mine.py", line' in text
        assert "  and so is the house" in text


@pytest.mark.parametrize("mode", ["resume", "retry"])
def test_what_failed_is_computed_again_and_nothing_else(broken: Path, mode: str):
    plan = make_plan(broken)
    with pytest.raises(study.UnfinishedError, match="failed"):
        study.run(broken, out="run")
    before = there(plan)
    Path("broken").unlink()
    results, _ = study.run(broken, out="run", mode=mode)
    after = there(plan)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == ids(plan, "extra")
    assert not list(Path("run").rglob("*.failed"))
    assert results.table.equals(study.run(broken, out="whole")[0].table)


def test_retry_leaves_what_is_missing_to_others(broken: Path):
    plan = make_plan(broken)
    with pytest.raises(study.UnfinishedError, match="failed"):
        study.run(broken, out="run")
    lost = sorted(ids(plan, "up"))
    Path(f"run/blocks/{lost[0]}.json").unlink()
    Path("broken").unlink()
    with pytest.raises(
        study.UnfinishedError, match=r"\Arun: 1 of 8 blocks missing: up"
    ):
        study.run(broken, out="run", mode="retry")
    assert set(there(plan)) == {b.id for b in plan.blocks} - {lost[0]}


def test_the_command_says_what_failed_and_stops_when_told(broken: Path, normjax: Call):
    folder, plan = broken.parent, make_plan(broken)
    done = normjax("run", str(broken))
    assert done.code == 1
    (named,) = [b for b in plan.blocks if b.arm == "extra" and b.seeds[0] == 0]
    assert done.out.startswith("runs/toy: 2 of 8 blocks failed: extra, seeds 0 to 3: ")
    assert (
        f"RuntimeError: the disk is on fire (runs/toy/blocks/{named.id}.failed); "
        in done.out
    )
    assert done.out.endswith(
        ". --retry-failed computes those that failed, --resume computes all\n"
    )
    assert done.out.count("\n") == 1
    assert not (folder / "runs/toy/report.html").exists()
    assert normjax("report", "runs/toy").code == 2
    done = normjax("run", str(broken), "--out", "fast", "--fail-fast")
    assert done.code == 1
    assert "1 of 8 blocks failed: extra, seeds 0 to 3" in done.out
    assert "1 of 8 blocks missing: extra, seeds 4 to 5" in done.out
    (folder / "broken").unlink()
    done = normjax("run", str(broken), "--retry-failed")
    assert done.code == 0
    assert (folder / "runs/toy/report.html").exists()


def test_max_failures_counts(broken: Path):
    with pytest.raises(study.UnfinishedError, match="failed") as caught:
        study.run(broken, out="one", max_failures=1)
    assert (len(caught.value.failed), len(caught.value.missing)) == (1, 1)
    with pytest.raises(study.UnfinishedError, match="failed") as caught:
        study.run(broken, out="two", max_failures=2)
    assert (len(caught.value.failed), len(caught.value.missing)) == (2, 0)


def test_read_only_judges_and_writes_nothing(normjax: Call):
    write(Path(), TOY)
    assert normjax("run", "study.yaml", "--read-only").err == (
        "runs/toy holds no run\n"
    )
    told = normjax("run", "study.yaml")
    before = {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")}
    done = normjax("run", "study.yaml", "--read-only")
    assert done.code == 0
    assert told.out.startswith(done.out)
    assert {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")} == before
    done = normjax("run", "study.yaml", "--read-only", "--set", "settings.points=2")
    assert done.code == 2
    assert done.err.startswith("runs/toy: 8 of 8 blocks missing: baseline, seeds 0 to")


def test_an_interrupted_run_goes_on(normjax: Call, monkeypatch: pytest.MonkeyPatch):
    write(Path(), TOY)
    plan, stored = make_plan("study.yaml"), []
    write_block = Store.write

    def interrupt(self: Store, block, rows, **facts) -> None:
        if len(stored) == 3:
            raise KeyboardInterrupt
        stored.append(block.id)
        write_block(self, block, rows, **facts)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", interrupt)
        done = normjax("run", "study.yaml")
    assert done.code == 130
    assert done.out == "interrupted: --resume computes the rest\n"
    before = there(plan, "runs/toy")
    assert sorted(before) == sorted(stored)
    assert normjax("run", "study.yaml", "--resume").code == 0
    after = there(plan, "runs/toy")
    assert {name: after[name] for name in before} == before
    assert len(after) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume", "--force"], "--resume and --force exclude each other\n"),
        (
            ["--retry-failed", "--read-only"],
            "--retry-failed and --read-only exclude each other\n",
        ),
        (
            ["--fail-fast", "--max-failures", "3"],
            "--fail-fast is --max-failures 1: give one of them\n",
        ),
        *(
            (
                ["--shard", text],
                f"--shard: got {text!r}, expected I/N with I from 1 to N: 2/3\n",
            )
            for text in ("0/3", "4/3", "2", "a/b", "1/")
        ),
        (
            ["--shard", "1/2", "--force"],
            "--force would remove what the other shards computed; remove runs/toy "
            "before they start, or take another --out\n",
        ),
    ],
)
def test_options_that_make_no_sense(normjax: Call, options: list[str], message: str):
    write(Path(), TOY)
    done = normjax("run", "study.yaml", *options)
    assert (done.code, done.err) == (2, message)
    assert not Path("runs").exists()
