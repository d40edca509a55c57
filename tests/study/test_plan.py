"""What is decided before the first cell runs: overrides, blocks, statements, hashes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from studies import EXACT, TOY, TRAINING, exact, refused, write

from normjax.study.plan import digest, make_plan, resolved

pytestmark = pytest.mark.jax_defaults

ARM = "arms:\n  a: {set: {steps: 5}}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(text: str, **options):
    return make_plan(write(Path(), text, "c.yaml"), **options)


def test_blocks_are_arms_on_consecutive_seeds():
    text = TRAINING.replace("{count: 2}", "{count: 5, block: 2, first: 7}") + ARM
    blocks = plan(text).blocks
    assert [(b.arm, b.seeds) for b in blocks] == [
        ("baseline", (7, 8)),
        ("a", (7, 8)),
        ("baseline", (9, 10)),
        ("a", (9, 10)),
        ("baseline", (11,)),
        ("a", (11,)),
    ]
    assert len({b.id for b in blocks}) == 6


def test_a_block_is_known_by_what_it_computes(folder: Path):
    def ids(text: str, **options) -> list[str]:
        return [block.id for block in plan(text, **options).blocks]

    before = ids(TRAINING + ARM)
    assert ids(TRAINING + ARM.replace("a:", "renamed:")) == before
    assert ids(TRAINING.replace("q?", "other?") + ARM) == before
    changed = ids(TRAINING + ARM, overrides=["settings.record_every=3"])
    assert not set(changed) & set(before)
    arm_only = ids(TRAINING + ARM.replace("5", "6"))
    assert arm_only[0] == before[0]
    assert arm_only[1] != before[1]
    more = ids(TRAINING.replace("2}", "4, block: 2}") + ARM)
    assert more[:2] == before
    script = ids(exact(folder))
    assert ids(exact(folder, EXACT + "# edited\n")) != script


def test_an_exact_study_has_one_block_for_each_arm(folder: Path):
    decided = plan(exact(folder) + "arms:\n  a: {set: {x: 2.0}}\n")
    assert [(b.arm, b.seeds) for b in decided.blocks] == [("baseline", ()), ("a", ())]


def test_overrides_change_the_baseline_for_all_arms():
    decided = plan(
        TRAINING + "arms:\n  a: {set: {batch_size: 20}}\n",
        overrides=["settings.steps=9", "settings.optimizer.name=adam", "seeds.block=1"],
    )
    for arm in decided.arms.values():
        assert arm.cell.settings.steps == 9
        assert arm.cell.settings.optimizer.name == "adam"
    assert decided.arms["a"].cell.settings.batch_size == 20
    assert [b.seeds for b in decided.blocks][::2] == [(0,), (1,)]


def test_seeds_replace_the_count_and_nothing_else():
    text = TRAINING.replace("{count: 2}", "{count: 2, block: 3, first: 4}")
    decided = plan(text, seeds=5)
    assert [b.seeds for b in decided.blocks] == [(4, 5, 6), (7, 8)]


def test_smoke_is_small_and_the_command_line_wins():
    text = TRAINING.replace("{count: 2}", "{count: 32, first: 3}")
    text += "smoke: {settings.steps: 2, question: small?}\n"
    decided = plan(text, smoke=True)
    assert [b.seeds for b in decided.blocks] == [(3, 4, 5, 6)]
    assert decided.arms["baseline"].cell.settings.steps == 2
    assert decided.study.question == "small?"
    decided = plan(text, smoke=True, overrides=["settings.steps=3"], seeds=2)
    assert decided.arms["baseline"].cell.settings.steps == 3
    assert [b.seeds for b in decided.blocks] == [(3, 4)]
    assert len(plan(text).blocks) == 2


def test_smoke_has_no_more_seeds_than_the_study():
    assert plan(TRAINING, smoke=True).blocks[0].seeds == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["settings.stepz=4"],
            "--set #1: settings.stepz: there is no such key; did you mean 'steps'?",
        ),
        (
            ["settings.steps=5", "settings.steps=four"],
            "--set #2: settings.steps: expected a whole number, got 'four'",
        ),
        (
            ["settings.model={widths: [a]}"],
            "--set #1: settings.model.widths.0: expected a whole number, got 'a'",
        ),
        (
            ["settings.model.norm.preset=layernorm"],
            "--set #1: settings.model.norm.preset: there is no preset 'layernorm'; did "
            "you mean 'layer_norm'?",
        ),
        (
            ["settings.model.norm.divide=rms"],
            "--set #1: settings.model.norm.preset: give a preset or a pattern, and not "
            "both",
        ),
        (
            ["setings.steps=4"],
            "--set #1: setings: there is no such key; did you mean 'settings'?",
        ),
        (["settings.steps"], "--set #1: got 'settings.steps', expected KEY=VALUE"),
        (["=4"], "--set #1: got '=4', expected KEY=VALUE"),
        (
            ["settings.steps.a=1"],
            "--set #1: settings.steps.a: settings.steps is no mapping",
        ),
        (
            ["settings.steps='1"],
            '--set #1: "\'1" is not valid YAML: found unexpected end of stream',
        ),
        (
            ["arms.a.set=1"],
            "--set #1: arms.a.set: arms are not settable; --set changes the baseline "
            "for all arms",
        ),
        (["study=1"], "--set #1: study: expected text, got 1; put it in quotes"),
        (
            ["seeds.count=1"],
            "--set #1: seeds.count: expected 2 or more, got 1",
        ),
        (
            ["outcomes.primary=tst_r2"],
            "--set #1: outcomes.primary: there is no metric 'tst_r2'; did you mean "
            "'test_r2'?",
        ),
    ],
)
def test_wrong_overrides_are_cited_by_their_number(options: list[str], message: str):
    with refused(message):
        plan(TRAINING + ARM, overrides=options)


def test_an_override_that_takes_an_arms_change_away_is_an_error_of_the_arm():
    with refused("c.yaml:7:7: arms.a.set: changes nothing of 'baseline'"):
        plan(TRAINING + ARM, overrides=["settings.steps=5"])


def test_wrong_seeds_of_the_command_line(folder: Path):
    with refused("--seeds: seeds.count: expected 2 or more, got 1"):
        plan(TRAINING, seeds=1)
    with refused("--seeds: the study declares no seeds; leave it out"):
        plan(exact(folder), seeds=4)


@pytest.mark.parametrize(
    ("smoke", "message"),
    [
        ("[a]", "6:1: smoke: expected a mapping of keys, got ['a']"),
        (
            "{settings.stepz: 3}",
            "6:9: settings.stepz: there is no such key; did you mean 'steps'?",
        ),
        (
            "{settings.steps.a: 3}",
            "6:9: smoke.settings.steps.a: settings.steps is no mapping, so "
            "settings.steps.a cannot be set",
        ),
        ("{seeds.count: 1}", "6:9: seeds.count: expected 2 or more, got 1"),
    ],
)
def test_wrong_smoke_is_cited_where_it_stands(smoke: str, message: str):
    with refused(f"c.yaml:{message}"):
        plan(f"{TRAINING}smoke: {smoke}\n", smoke=True)


JUDGED = "outcomes: {primary: test_r2}\n"
STATEMENTS = {
    "primary": (
        "outcomes: {primary: test_r}\n",
        "8:12: outcomes.primary: there is no metric 'test_r'; did you mean 'test_r2'?",
    ),
    "primary that is a curve": (
        "outcomes: {primary: curve.test_r2}\n",
        "8:12: outcomes.primary: 'curve.test_r2' is a curve, expected one number per "
        "seed",
    ),
    "diagnostic": (
        "outcomes: {primary: test_r2, diagnostics: [level_r2, gradnorm]}\n",
        "8:54: outcomes.diagnostics.1: there is no metric 'gradnorm'; did you mean "
        "'grad_norm'?",
    ),
    "metric like none": (
        "outcomes: {primary: zzz}\n",
        "8:12: outcomes.primary: there is no metric 'zzz'; expected one of "
        "diverged_at, grad_norm, level_r2, stabilizer_share, test_loss, test_r2, "
        "train_loss, weight_norm",
    ),
    "arm of a hypothesis": (
        "hypotheses:\n  - {id: H1, statement: aa.test_r2 < baseline.test_r2}\n",
        "9:14: hypotheses.0.statement: there is no arm 'aa'; did you mean 'a'?",
    ),
    "right arm of a hypothesis": (
        "hypotheses:\n  - {id: H1, statement: a.test_r2 < basline.test_r2}\n",
        "9:14: hypotheses.0.statement: there is no arm 'basline'; did you mean "
        "'baseline'?",
    ),
    "metric of a hypothesis": (
        "hypotheses:\n  - {id: H1, statement: a.test_r2 < a.tst_r2}\n",
        "9:14: hypotheses.0.statement: there is no metric 'tst_r2'; did you mean "
        "'test_r2'?",
    ),
    "metric without a value": (
        "hypotheses:\n  - {id: H1, statement: a.stabilizer_share < a.test_r2}\n",
        "9:14: hypotheses.0.statement: 'stabilizer_share' has no value in arm 'a'",
    ),
    "twice": (
        f"{JUDGED}hypotheses:\n  - {{id: H1, statement: a.test_r2 < a.level_r2}}\n"
        "  - {id: H1, statement: a.test_r2 > a.level_r2}\n",
        "11:6: hypotheses.1.id: 'H1' stands here twice",
    ),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_about_what_is_not_there(name: str):
    text, message = STATEMENTS[name]
    with refused(f"c.yaml:{message}"):
        plan(TRAINING + ARM + text)


def test_nothing_is_judged_without_seeds(folder: Path):
    with refused("c.yaml:1:1: seeds: is missing: training is random; add seeds: "
                 "{count: 10}"):  # fmt: skip
        plan(TRAINING.replace("seeds: {count: 2}\n", ""))
    text = " are judged over seeds, and there are none: add seeds: {count: 10}"
    with refused(f"c.yaml:4:1: outcomes:{text}"):
        plan(exact(folder) + "outcomes: {primary: y}\n")
    statement = "baseline.y > baseline.y"
    with refused(f"c.yaml:4:1: hypotheses:{text}"):
        plan(exact(folder) + f"hypotheses:\n  - {{id: H1, statement: {statement}}}\n")


def test_a_diagnostic_may_have_no_value_in_an_arm():
    text = "outcomes: {primary: test_r2, diagnostics: [stabilizer_share]}\n"
    assert plan(TRAINING + text).study.outcomes is not None


def test_hypotheses_are_hashed_with_their_outcomes():
    before = plan(TOY).hypotheses_hash
    assert plan(TOY).hypotheses_hash == before
    assert plan(TOY.replace("q?", "r?"), seeds=9).hypotheses_hash == before
    for old, new in [
        ("at_least: 1.0", "at_least: 0.9"),
        ("up.value <", "up.value >"),
        ("equivalent_within: 0.2", "equivalent_within: 0.3"),
        ("id: H1", "id: H4"),
    ]:
        assert old in TOY
        assert plan(TOY.replace(old, new)).hypotheses_hash != before


def test_digests_do_not_depend_on_the_order_of_keys():
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": (1, 2), "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
    assert len(digest({})) == 64


def test_the_resolved_plan_is_json_and_says_everything():
    decided = plan(TOY)
    found = json.loads(json.dumps(resolved(decided), allow_nan=False))
    assert list(found["arms"]) == ["baseline", "up", "again", "extra"]
    again = found["arms"]["again"]
    assert again["from"] == "up"
    assert again["role"] == "negative_control"
    assert again["changes"] == [{"name": "noise", "before": 1.0, "after": 1.5}]
    assert again["settings"]["shift"] == 3.0
    assert found["hypotheses"][0]["sides"] == [
        ["up", "value"],
        ">",
        ["baseline", "value"],
    ]
    assert found["hypotheses_hash"] == decided.hypotheses_hash
    assert found["seeds"] == {"count": 6, "block": 4, "first": 0}
    assert found["labels"]["value"] == "value of the toy"
    assert [b["seeds"] for b in found["blocks"]][::4] == [[0, 1, 2, 3], [4, 5]]
