"""YAML 1.2 with a place for every value, and errors that name it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from studies import refused, write

from normjax.study.document import ConfigError, Document, parse_value, put, read_yaml

pytestmark = pytest.mark.jax_defaults

TEXT = """\
study: a
settings:
  epsilon: 1e-5
  flag: off
  widths: [8, 16]
  model: {norm: {preset: layer_norm}, at: input}
arms:
  - {id: H1}
  - {id: H2}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str) -> Document:
    write(Path(), text, "c.yaml")
    return read_yaml("c.yaml")


def test_values_are_plain_and_read_as_yaml_1_2():
    data = read(TEXT).data
    settings = data["settings"]
    assert settings["epsilon"] == 1e-5
    assert type(settings["epsilon"]) is float
    assert settings["flag"] == "off"
    assert settings["widths"] == [8, 16]
    assert type(settings["widths"]) is list
    assert type(settings["model"]["norm"]) is dict
    assert type(data["arms"][0]["id"]) is str


def test_anchors_merges_and_number_keys_are_plain_data():
    text = "a: &t true\nb: *t\nbase: &m {x: 1}\nmore: {<<: *m, y: 2}\n3: {z: null}\n"
    assert read(text).data == {
        "a": True,
        "b": True,
        "base": {"x": 1},
        "more": {"x": 1, "y": 2},
        "3": {"z": None},
    }
    assert read(text).data["b"] is True


@pytest.mark.parametrize(
    ("location", "place"),
    [
        ((), "1:1"),
        (("study",), "1:1"),
        (("settings", "epsilon"), "3:3"),
        (("settings", "widths"), "5:3"),
        (("settings", "widths", 1), "5:15"),
        (("settings", "model", "norm"), "6:11"),
        (("settings", "model", "norm", "preset"), "6:18"),
        (("arms", 1), "9:5"),
        (("arms", 1, "id"), "9:6"),
        (("settings", "model", "norm", "gone", "deeper"), "6:11"),
        (("nowhere",), "1:1"),
    ],
)
def test_where_every_key_and_item_stands(location, place: str):
    assert read(TEXT).where(location) == f"c.yaml:{place}"


def test_a_key_of_a_merged_mapping_stands_where_it_is_merged():
    text = "base: &m {x: 1}\nmore:\n  <<: *m\n  y: 2\n"
    assert read(text).where(("more", "x")) == "c.yaml:2:1"
    assert read(text).where(("more", "y")) == "c.yaml:4:3"


def test_an_error_names_the_path_and_its_place():
    error = read(TEXT).error(("settings", "widths", 1), "is too wide")
    assert str(error) == "c.yaml:5:15: settings.widths.1: is too wide"
    assert isinstance(error, ValueError)
    assert str(read(TEXT).error((), "is wrong")) == "c.yaml:1:1: is wrong"
    assert str(ConfigError("no place")) == "no place"


BROKEN = {
    "empty": ("", "c.yaml:1:1: expected a mapping of keys, got None"),
    "list": ("- a\n", "c.yaml:1:1: expected a mapping of keys, got a list"),
    "text": ("a\n", "c.yaml:1:1: expected a mapping of keys, got 'a'"),
    "twice": (
        "a:\n  steps: 4\n  steps: 5\n",
        'c.yaml:3:3: not valid YAML: found duplicate key "steps" with value "5" '
        '(original value: "4")',
    ),
    "twice at the top": (
        "a: 1\nb: 2\na: 3\n",
        'c.yaml:3:1: not valid YAML: found duplicate key "a" with value "3" (original '
        'value: "1")',
    ),
    "pattern in braces": (
        "norm: {pattern: [b h w] c, at: input}\n",
        "c.yaml:1:25: not valid YAML: expected ',' or '}', but got '<scalar>'; put a "
        "pattern, or any text with brackets, in quotes",
    ),
    "pattern after dots": (
        "norm: {pattern: ... [c]}\n",
        "c.yaml:1:21: not valid YAML: expected ',' or '}', but got '['; put a pattern, "
        "or any text with brackets, in quotes",
    ),
    "pattern in a block": (
        "norm:\n  pattern: [b] c\n",
        "c.yaml:2:16: not valid YAML: expected <block end>, but found '<scalar>'; put "
        "a pattern, or any text with brackets, in quotes",
    ),
    "tab": (
        "a:\n\tb: 1\n",
        "c.yaml:2:1: not valid YAML: found character '\\t' that cannot start any "
        "token; indent with spaces",
    ),
    "control character": (
        "a: \x00\n",
        "c.yaml: not valid YAML: unacceptable character #x0000: special characters "
        "are not allowed",
    ),
    "unknown anchor": (
        "a: *b\n",
        "c.yaml:1:4: not valid YAML: found undefined alias 'b'",
    ),
    "open quote": (
        "a: 'b\n",
        "c.yaml:2:1: not valid YAML: found unexpected end of stream",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_text_that_is_no_config(name: str):
    text, message = BROKEN[name]
    with refused(message):
        read(text)


def test_files_that_cannot_be_read(folder: Path):
    with refused("level.yaml: there is no such file"):
        read_yaml("level.yaml")
    write(folder, "a: 1", "level_side.yaml")
    text = "lvel_side.yaml: there is no such file; did you mean level_side.yaml?"
    with refused(text):
        read_yaml("lvel_side.yaml")
    with refused("gone/level.yaml: there is no such file"):
        read_yaml("gone/level.yaml")
    (folder / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"\Afolder\.yaml: cannot be read: .*direct"):
        read_yaml("folder.yaml")
    (folder / "bytes.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"\Abytes\.yaml: cannot be read: .*utf-8"):
        read_yaml("bytes.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("1e-3", 1e-3),
        ("true", True),
        ("off", "off"),
        ("null", None),
        ("", None),
        ("[1, 2]", [1, 2]),
        ("{preset: rms_norm}", {"preset": "rms_norm"}),
        ("'[b] c'", "[b] c"),
    ],
)
def test_values_of_the_command_line_are_yaml(text: str, value):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("'1", "found unexpected end of stream"),
        (
            "[b] c",
            "expected '<document start>', but found '<scalar>'; put a pattern, or any "
            "text with brackets, in quotes",
        ),
        ("\x00", "unacceptable character #x0000: special characters are not allowed"),
    ],
)
def test_values_that_are_no_yaml(text: str, problem: str):
    with refused(f"{text!r} is not valid YAML: {problem}"):
        parse_value(text)


def test_put_replaces_on_a_copy_and_makes_parents():
    data = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert put(data, "a.c.d", 4) == {"a": {"b": 1, "c": {"d": 4}}, "e": 3}
    assert put(data, "a.x.y", 4)["a"] == {"b": 1, "c": {"d": 2}, "x": {"y": 4}}
    assert put(data, "e", {"f": 1})["e"] == {"f": 1}
    assert data == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


@pytest.mark.parametrize(("path", "parent"), [("e.f", "e"), ("a.b.c", "a.b")])
def test_put_goes_through_mappings_only(path: str, parent: str):
    with pytest.raises(KeyError, match=rf"\A'{re.escape(parent)}'\Z"):
        put({"a": {"b": None}, "e": [3]}, path, 1)


def test_an_override_carries_its_origin():
    changed = read(TEXT).override("settings.model", {"at": 5}, "--set #1")
    assert changed.data["settings"]["model"] == {"at": 5}
    for path in (("model",), ("model", "at"), ("model", "norm", "preset")):
        assert changed.where(("settings", *path)) == "--set #1"
    assert changed.where(("settings", "epsilon")) == "c.yaml:3:3"
    assert read(TEXT).data["settings"]["model"]["at"] == "input"


def test_a_parent_that_an_override_makes_has_its_origin():
    changed = read("a: {b: 1}\n").override("a.c.d", 1, "--set #1")
    assert changed.where(("a", "c")) == "--set #1"
    assert changed.where(("a", "c", "other")) == "--set #1"
    assert changed.where(("a", "b")) == "c.yaml:1:5"


def test_a_later_override_wins():
    first = read("a: {b: 1}\n").override("a.b", 2, "--set #1")
    second = first.override("a", {"b": 3}, "--set #2")
    assert second.where(("a", "b")) == "--set #2"
    assert second.data == {"a": {"b": 3}}
