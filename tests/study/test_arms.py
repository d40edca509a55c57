"""An arm is one property away from the arm that it is from, on resolved settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from studies import refused, write

from normjax.study.arms import Change, differences
from normjax.study.document import ConfigError
from normjax.study.plan import make_plan, resolved
from normjax.study.training import Settings
from normjax.study.validation import parse

pytestmark = pytest.mark.jax_defaults

SWAP = "model.norm.center, model.norm.divide, model.norm.affine.bias"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(arms: str, norm: str = "null", more: str = "task: {train: 40}"):
    """Plan a training study with a norm in its baseline; arms begin at line 5."""
    text = (
        "study: s\nquestion: q?\nexperiment: training\n"
        f"settings: {{{more}, steps: 4, model: {{norm: {norm}}}}}\n"
        f"{arms}\nseeds: {{count: 2}}\n"
    )
    return make_plan(write(Path(), text, "c.yaml"))


def changes(arm: str, norm: str = "null", before: str = "") -> list[tuple]:
    """What one arm changes."""
    decided = plan(f"arms:\n{before}  it: {arm}", norm)
    return [(c.name, c.before, c.after) for c in decided.arms["it"].changes]


LAYER, BATCH = "{preset: layer_norm}", "{preset: batch_norm}"
ONE = {
    "a setting": ("null", "steps: 5", ("steps", 4, 5)),
    "a list": ("null", "model.widths: [8, 8]", ("model.widths", [32], [8, 8])),
    "a whole norm": (
        "null",
        "model.norm: {preset: batch_norm, at: hidden, epsilon: 1e-3}",
        ("model.norm.present", False, True),
    ),
    "no norm": (LAYER, "model.norm: null", ("model.norm.present", True, False)),
    "place": (LAYER, "model.norm.at: hidden", ("model.norm.at", "input", "hidden")),
    "center": (LAYER, "model.norm.center: false", ("model.norm.center", True, False)),
    "divide": (LAYER, "model.norm.divide: rms", ("model.norm.divide", "std", "rms")),
    "epsilon": (LAYER, "model.norm.epsilon: 0.1", ("model.norm.epsilon", 1e-5, 0.1)),
    "decay": (
        BATCH,
        "model.norm.running.decay: 0.5",
        ("model.norm.running.decay", 0.99, 0.5),
    ),
    "no running": (
        BATCH,
        "model.norm.running: null",
        ("model.norm.running.present", True, False),
    ),
    "running, whole": (
        LAYER,
        "model.norm.running: {decay: 0.5, ddof: 1}",
        ("model.norm.running.present", False, True),
    ),
    "no affine": (
        LAYER,
        "model.norm.affine: null",
        ("model.norm.affine.present", True, False),
    ),
    "bias": (
        LAYER,
        "model.norm.affine.bias: false",
        ("model.norm.affine.bias", True, False),
    ),
    "precision": (
        LAYER,
        "model.norm.precision: {accumulate: float64}",
        ("model.norm.precision.accumulate", "float32", "float64"),
    ),
    "groups": (
        "{preset: group_norm, groups: 2, affine: null}",
        "model.norm: {preset: group_norm, groups: 4, affine: null}",
        ("model.norm.sizes.g", 2, 4),
    ),
    "a part of the optimizer": (
        "null",
        "optimizer.momentum: 0.9",
        ("optimizer.momentum", 0.0, 0.9),
    ),
}


@pytest.mark.parametrize("name", ONE)
def test_one_property(name: str):
    norm, key, (path, before, after) = ONE[name]
    assert changes(f"{{set: {{{key}}}}}", norm) == [(path, before, after)]


TWO = {
    "two settings": (
        "null",
        "steps: 5, record_every: 2",
        "changes 2 properties of 'baseline': steps, record_every",
    ),
    "two fields of a norm": (
        LAYER,
        "model.norm.center: false, model.norm.divide: rms",
        "changes 2 properties of 'baseline': model.norm.center, model.norm.divide",
    ),
    "a swap of presets": (
        LAYER,
        "model.norm: {preset: rms_norm}",
        f"changes 3 properties of 'baseline': {SWAP}",
    ),
    "batch norm in place of layer norm": (
        LAYER,
        "model.norm.preset: batch_norm",
        "changes 2 properties of 'baseline': model.norm.pattern, "
        "model.norm.running.present",
    ),
    "a place and a field": (
        LAYER,
        "model.norm: {preset: layer_norm, at: hidden, epsilon: 1}",
        "changes 2 properties of 'baseline': model.norm.at, model.norm.epsilon",
    ),
    "a norm and a setting": (
        "null",
        "model.norm: {preset: layer_norm}, steps: 5",
        "changes 2 properties of 'baseline': model.norm.present, steps",
    ),
}


@pytest.mark.parametrize("name", TWO)
def test_two_properties_are_refused_with_both_names(name: str):
    norm, keys, message = TWO[name]
    with refused(
        f"c.yaml:6:8: arms.it.set: {message}; change one, say decompose: true to have "
        "them told apart, or confounded: true"
    ):
        plan(f"arms:\n  it: {{set: {{{keys}}}}}", norm)


def test_confounded_on_purpose_is_recorded_with_every_name():
    arms = "arms:\n  it: {set: {model.norm: {preset: rms_norm}}, confounded: true}"
    decided = plan(arms, LAYER)
    arm = decided.arms["it"]
    assert arm.confounded
    assert ", ".join(change.name for change in arm.changes) == SWAP
    written = resolved(decided)["arms"]["it"]
    assert written["confounded"] is True
    assert written["changes"][1] == {
        "name": "model.norm.divide",
        "before": "std",
        "after": "rms",
    }


SAME = {
    "the same value": ("null", "steps: 4"),
    "nothing": ("null", ""),
    "a default": (LAYER, "model.norm.epsilon: 1e-5"),
    "the preset spelled out": (LAYER, "model.norm: {pattern: '... [c]', affine: c}"),
    "other names": (LAYER, "model.norm: {pattern: 'b [f]', affine: f}"),
    "one group": (
        LAYER,
        "model.norm: {preset: group_norm, groups: 1, affine: '(g c)'}",
    ),
    "a whole number for a real one": ("null", "optimizer.momentum: 0"),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_meaning_is_no_change(name: str):
    norm, keys = SAME[name]
    with refused("c.yaml:6:8: arms.it.set: changes nothing of 'baseline'"):
        plan(f"arms:\n  it: {{set: {{{keys}}}}}", norm)


def test_confounded_is_no_licence_to_change_nothing():
    with refused("c.yaml:6:26: arms.it.set: changes nothing of 'baseline'"):
        plan("arms:\n  it: {confounded: true, set: {steps: 4}}")


def test_an_arm_builds_on_the_arm_it_is_from_in_any_order():
    arms = (
        "arms:\n  last: {from: middle, set: {model.norm.divide: rms}}\n"
        "  middle: {from: first, set: {model.norm.epsilon: 1}}\n"
        "  first: {set: {model.norm: {preset: layer_norm}}}"
    )
    found = plan(arms).arms
    assert list(found) == ["baseline", "last", "middle", "first"]
    spec = found["last"].cell.settings.model.norm.spec
    assert (spec.divide, spec.epsilon) == ("rms", 1)
    assert [c.name for c in found["last"].changes] == ["model.norm.divide"]
    assert found["last"].parent == "middle"
    assert found["baseline"].parent is None
    assert found["baseline"].cell.settings.model.norm is None


WRONG = {
    "reserved name": (
        "baseline: {set: {steps: 5}}",
        "6:3: arms.baseline: is the reserved name of the settings without changes",
    ),
    "unknown parent": (
        "it: {from: basline, set: {steps: 5}}",
        "6:8: arms.it.from: there is no arm 'basline'; did you mean 'baseline'?",
    ),
    "itself": (
        "it: {from: it, set: {steps: 5}}",
        "6:8: arms.it.from: a circle of it: none is from baseline",
    ),
    "circle": (
        "it: {from: b, set: {steps: 5}}\n  b: {from: it, set: {steps: 6}}",
        "6:8: arms.it.from: a circle of it, b: none is from baseline",
    ),
    "through null": (
        "it: {set: {model.norm.divide: rms}}",
        "6:14: arms.it.set.model.norm.divide: model.norm is null in 'baseline'; start "
        "from an arm that has it",
    ),
    "through null of a spec": (
        "a: {set: {model.norm: {preset: layer_norm}}}\n"
        "  it: {from: a, set: {model.norm.running.decay: 0.5}}",
        "7:23: arms.it.set.model.norm.running.decay: model.norm.running is null in "
        "'a'; start from an arm that has it",
    ),
    "through a number": (
        "it: {set: {steps.more: 5}}",
        "6:14: arms.it.set.steps.more: steps is no mapping in 'baseline': set it whole",
    ),
    "unknown key": (
        "it: {set: {model.wdths: [8]}}",
        "6:14: arms.it.set.model.wdths: there is no such key; did you mean 'widths'?",
    ),
    "unknown key in a value": (
        "it:\n    set:\n      model.norm:\n        preset: layer_norm\n"
        "        centre: false",
        "10:9: arms.it.set.model.norm.centre: NormSpec has no field 'centre'; did you "
        "mean 'center'?",
    ),
    "value": (
        "it: {set: {steps: five}}",
        "6:14: arms.it.set.steps: expected a whole number, got 'five'",
    ),
    "preset": (
        "it: {set: {model.norm: {preset: layernorm}}}",
        "6:27: arms.it.set.model.norm.preset: there is no preset 'layernorm'; did you "
        "mean 'layer_norm'?",
    ),
    "place": (
        "it: {set: {model.norm: {preset: layer_norm, at: head}}}",
        "6:47: arms.it.set.model.norm.at: expected 'input' or 'hidden', got 'head'",
    ),
    "shape": (
        "it: {set: {model.norm: {preset: group_norm, groups: 3}}}",
        "6:14: arms.it.set.model.norm: pattern 'b [...] (g [c])': g=3 does not divide "
        "dimension 1 of size 4",
    ),
    "two keys that do not fit": (
        "it: {set: {model.side_route_shuffled: true}}",
        "6:14: arms.it.set.model.side_route_shuffled: there is no side route to "
        "shuffle: set side_route: mean",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_arm_that_is_wrong(name: str):
    arm, message = WRONG[name]
    with refused(f"c.yaml:{message}"):
        plan(f"arms:\n  {arm}")


def test_an_error_that_no_key_of_the_arm_names_says_its_path():
    """The field that two keys break together is named, at the first key."""
    with refused(
        "c.yaml:6:14: arms.it.set.task.train: batch_size: expected at most "
        "task.train, 20, got 30"
    ):
        plan("arms:\n  it: {set: {task.train: 20}}", more="task: {}, batch_size: 30")


def test_differences_are_empty_for_equal_settings_and_symmetric_in_their_names():
    norms = [{"preset": "layer_norm"}, {"preset": "batch_norm", "at": "hidden"}]
    first, second = (parse(Settings, {"model": {"norm": norm}}) for norm in norms)
    shapes = {"model.norm": (8, 4)}
    assert differences(first, first, shapes, shapes) == ()
    there = differences(first, second, shapes, shapes)
    back = differences(second, first, shapes, shapes)
    assert [c.name for c in there] == [
        "model.norm.at",
        "model.norm.pattern",
        "model.norm.running.present",
    ]
    assert back == tuple(Change(c.name, c.after, c.before) for c in there)


def test_a_norm_without_a_known_shape_is_compared_by_its_words():
    first = parse(Settings, {"model": {"norm": {"pattern": "b [c]"}}})
    second = parse(Settings, {"model": {"norm": {"pattern": "a [d]"}}})
    shape = {"model.norm": (8, 4)}
    assert differences(first, second, shape, shape) == ()
    names = [c.name for c in differences(first, second, {}, {})]
    assert names == ["model.norm.pattern"]


def test_arms_need_a_valid_baseline():
    with pytest.raises(ConfigError, match=r"\Ac\.yaml:4:19: settings\.task\.train: "):
        plan("arms:\n  it: {set: {steps: 5}}", more="task: {train: 1}")
