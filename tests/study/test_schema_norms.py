"""Norms in a config: a preset or a pattern, a place, and fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from studies import refused, write

import normjax as nj
from normjax.study.document import ConfigError
from normjax.study.norm_setting import NormSetting
from normjax.study.plan import make_plan
from normjax.study.validation import canonical, parse

pytestmark = pytest.mark.jax_defaults

HEAD = "study: s\nquestion: q?\nexperiment: training\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


NORMS = {
    "preset": (
        "{preset: layernorm}",
        "5:18: settings.model.norm.preset: there is no preset 'layernorm'; did you "
        "mean 'layer_norm'?",
    ),
    "number for a preset": (
        "{preset: 5}",
        "5:18: settings.model.norm.preset: expected text, got 5; put it in quotes",
    ),
    "bare preset": (
        "layer_norm",
        "5:11: settings.model.norm: expected a mapping of keys, got 'layer_norm'; "
        "write {preset: layer_norm}",
    ),
    "bare word": (
        "norm",
        "5:11: settings.model.norm: expected a mapping of keys, got 'norm'",
    ),
    "neither": (
        "{at: input}",
        "5:11: settings.model.norm.preset: give a preset or a pattern, and not both",
    ),
    "both": (
        "{preset: layer_norm, pattern: 'b [c]'}",
        "5:18: settings.model.norm.preset: give a preset or a pattern, and not both",
    ),
    "field": (
        "{preset: layer_norm, centre: false}",
        "5:38: settings.model.norm.centre: NormSpec has no field 'centre'; did you "
        "mean 'center'?",
    ),
    "field of a part": (
        "{preset: batch_norm, running: {dcay: 0.9}}",
        "5:38: settings.model.norm.running: Running has no field 'dcay'; did you mean "
        "'decay'?",
    ),
    "value of a field": (
        "{preset: layer_norm, divide: stdd}",
        "5:38: settings.model.norm.divide: divide is 'stdd', expected one of 'std', "
        "'rms', 'l2', 'none'; did you mean 'std'?",
    ),
    "text for epsilon": (
        "{preset: layer_norm, epsilon: small}",
        "5:38: settings.model.norm.epsilon: epsilon is 'small', expected a number",
    ),
    "negative epsilon": (
        "{preset: layer_norm, epsilon: -1e-3}",
        "5:38: settings.model.norm.epsilon: epsilon is -0.001, expected 0 or more",
    ),
    "place": (
        "{preset: layer_norm, at: middle}",
        "5:38: settings.model.norm.at: expected 'input' or 'hidden', got 'middle'",
    ),
    "pattern that is a list": (
        "{pattern: [b]}",
        "5:18: settings.model.norm.pattern: a pattern is a string, got ['b']; in YAML "
        "put it in quotes",
    ),
    "pattern without brackets": (
        "{pattern: b c}",
        "5:18: settings.model.norm.pattern: pattern 'b c' has no brackets: put them "
        "around the axes that are reduced together",
    ),
    "groups that do not divide": (
        "{preset: group_norm, groups: 3}",
        "5:11: settings.model.norm: pattern 'b [...] (g [c])': g=3 does not divide "
        "dimension 1 of size 4",
    ),
    "rank": (
        "{pattern: 'b h [c]'}",
        "5:11: settings.model.norm: pattern 'b h [c]' has 3 dimensions, the tensor has "
        "2: shape (300, 4)",
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_that_is_wrong(name: str):
    norm, message = NORMS[name]
    text = f"{HEAD}settings:\n  model: {{norm: {norm}}}\nseeds: {{count: 2}}\n"
    path = write(Path(), text, "c.yaml")
    with refused(f"c.yaml:{message}"):
        make_plan(path)


def test_a_pattern_shows_where_it_breaks():
    text = f"{HEAD}settings:\n  model: {{norm: {{pattern: 'b [c'}}}}\n"
    with refused(
        "c.yaml:5:18: settings.model.norm.pattern: '[' is never closed: add ']'\n"
        "  b [c\n    ^"
    ):
        make_plan(write(Path(), text, "c.yaml"))


def test_a_key_of_another_preset():
    text = "{preset: layer_norm, groups: 4}"
    text = f"{HEAD}settings:\n  model: {{norm: {text}}}\n"
    message = (
        r"\Ac\.yaml:5:38: settings\.model\.norm\.groups: NormSpec has no field "
        r"'groups'; expected one of pattern, sizes, .* precision\Z"
    )
    with pytest.raises(ConfigError, match=message):
        make_plan(write(Path(), text, "c.yaml"))


@pytest.mark.parametrize(
    ("data", "spec"),
    [
        ({"preset": "layer_norm"}, nj.layer_norm()),
        ({"preset": "layer_norm", "divide": "rms"}, nj.layer_norm(divide="rms")),
        ({"preset": "group_norm", "groups": 2}, nj.group_norm(groups=2)),
        ({"preset": "layer_norm", "axes": "h c"}, nj.layer_norm("h c")),
        ({"preset": "layer_norm", "affine": None}, nj.layer_norm(affine=None)),
        ({"preset": "layer_norm", "affine": "c"}, nj.layer_norm()),
        (
            {"preset": "layer_norm", "affine": {"bias": False}},
            nj.layer_norm(affine=nj.Affine("c", bias=False)),
        ),
        (
            {"preset": "batch_norm", "running": {"decay": 0.5}},
            nj.batch_norm(running=nj.Running(0.5)),
        ),
        (
            {"preset": "layer_norm", "running": {"decay": 0.5}},
            nj.layer_norm(running=nj.Running(0.5)),
        ),
        (
            {"pattern": "b (g [c])", "sizes": {"g": 2}, "epsilon": 1e-3},
            nj.NormSpec("b (g [c])", sizes={"g": 2}, epsilon=1e-3),
        ),
        (
            {"preset": "rms_norm", "detach": ["variance"]},
            nj.rms_norm(detach="variance"),
        ),
        (
            {"preset": "rms_norm", "precision": {"output": "float64"}},
            nj.rms_norm(precision=nj.Precision(output="float64")),
        ),
    ],
)
def test_a_norm_says_a_spec(data: dict[str, Any], spec: nj.NormSpec):
    setting = parse(NormSetting, {**data, "at": "hidden"})
    assert setting.spec == spec
    assert setting.at == "hidden"
    assert canonical(setting) == {"at": "hidden", **spec.to_dict()}


def test_settings_that_say_the_same_are_the_same():
    """A preset with its fields spelled out is the preset."""
    short = parse(NormSetting, {"preset": "rms_norm"})
    long = {"pattern": "... [c]", "center": False, "divide": "rms"}
    long |= {"affine": {"axes": "c", "bias": False}}
    assert canonical(short) == canonical(parse(NormSetting, long))
