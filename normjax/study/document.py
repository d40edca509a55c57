"""YAML files whose every value knows its line and column."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

Location = tuple[str | int, ...]


class ConfigError(ValueError):
    """A config that cannot be run: where, what was got, what is expected, the fix."""

    def __init__(self, message: str, where: str = ""):
        """Prefix the place, ``file:line:column``."""
        super().__init__(f"{where}: {message}" if where else message)


@dataclass(frozen=True)
class Document:
    """Plain data from a YAML 1.2 file, and where each part of it stands.

    Attributes:
        name: how errors name the file.
        data: dicts, lists, strings, numbers, booleans and None.
        places: line and column, from one, of every key path.
        origins: where a path that the file does not decide comes from: ``--set #1``.
    """

    name: str
    data: dict[str, Any]
    places: dict[Location, tuple[int, int]] = field(default_factory=dict)
    origins: dict[Location, str] = field(default_factory=dict)

    def where(self, location: Sequence[str | int]) -> str:
        """``file:line:column`` of a path, or of its nearest parent that is there."""
        path = tuple(location)
        while path and path not in self.places and path not in self.origins:
            path = path[:-1]
        if path in self.origins:
            return self.origins[path]
        line, column = self.places.get(path, (1, 1))
        return f"{self.name}:{line}:{column}"

    def override(self, dotted: str, value: Any, origin: str) -> Document:
        """The document with the value at a dotted path replaced, and its origin noted.

        Raises:
            KeyError: as ``put``.
        """
        data, path = put(self.data, dotted, value), tuple(dotted.split("."))
        places = {k: v for k, v in self.places.items() if k[: len(path)] != path}
        created = [path[:i] for i in range(1, len(path)) if path[:i] not in places]
        origins = {k: v for k, v in self.origins.items() if k[: len(path)] != path}
        origins |= dict.fromkeys([*created, path], origin)
        return Document(self.name, data, places, origins)

    def error(self, location: Sequence[str | int], message: str) -> ConfigError:
        """An error at a path, which it names."""
        dotted = ".".join(str(part) for part in location)
        return ConfigError(
            f"{dotted}: {message}" if dotted else message, self.where(location)
        )


def read_yaml(path: str | Path) -> Document:
    """Read a YAML file.

    YAML 1.2 reads ``1e-5`` as a number and ``off`` as text; a key that stands twice is
    an error.

    Args:
        path: the file.

    Returns:
        A ``Document``; its name is the path as given.

    Raises:
        ConfigError: if the file is missing, is not YAML, or is not a mapping.
    """
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{name}: there is no such file{_nearest(Path(path))}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from None
    try:
        tree = YAML(typ="rt").load(text)
    except YAMLError as error:
        raise _broken(error, name, text) from None
    if not isinstance(tree, CommentedMap):
        got = "a list" if isinstance(tree, CommentedSeq) else repr(tree)
        raise ConfigError(f"expected a mapping of keys, got {got}", f"{name}:1:1")
    places: dict[Location, tuple[int, int]] = {}
    return Document(name, _plain(tree, (), places), places)


def parse_value(text: str) -> Any:
    """A value as YAML reads it: for ``--set key=value``.

    Example:
        >>> parse_value("1e-3"), parse_value("off"), parse_value("[1, 2]")
        (0.001, 'off', [1, 2])
    """
    try:
        return _plain(YAML(typ="rt").load(text), (), {})
    except YAMLError as error:
        raise ConfigError(
            f"{text!r} is not valid YAML: {_problem(error, text)}"
        ) from None


def put(data: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """A copy of nested dicts with the value at a dotted path replaced.

    Parents that are not there are made.

    Raises:
        KeyError: with the path of a parent that is there and is no mapping.

    Example:
        >>> put({"a": {"b": 1}}, "a.c", 2)
        {'a': {'b': 1, 'c': 2}}
    """
    head, _, rest = dotted.partition(".")
    copy = dict(data)
    if not rest:
        copy[head] = value
        return copy
    inner = copy.get(head, {})
    if not isinstance(inner, Mapping):
        raise KeyError(head)
    try:
        copy[head] = put(dict(inner), rest, value)
    except KeyError as error:
        raise KeyError(f"{head}.{error.args[0]}") from None
    return copy


def _problem(error: YAMLError, line: str) -> str:
    """What the parser says, and the fix for a bare pattern or a tab."""
    text = str(getattr(error, "problem", None) or error).split("\n")[0]
    text = re.sub(r"\('(.*?)',\)", r"'\1'", text)  # the parser shows some as tuples
    if "[" in line:
        return f"{text}; put a pattern, or any text with brackets, in quotes"
    return f"{text}; indent with spaces" if "\t" in line else text


def _broken(error: YAMLError, name: str, text: str) -> ConfigError:
    where, line = name, ""
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        if mark is not None:
            where = f"{name}:{mark.line + 1}:{mark.column + 1}"
            line = [*text.split("\n"), ""][mark.line]
    return ConfigError(f"not valid YAML: {_problem(error, line)}", where)


def _nearest(path: Path) -> str:
    try:
        names = sorted(p.name for p in path.parent.glob("*.yaml"))
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, 1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _plain(node: Any, path: Location, places: dict[Location, tuple[int, int]]) -> Any:
    """Plain data, noting where each key and item stands."""
    if isinstance(node, CommentedMap):
        if not path:
            places[()] = (1, 1)
        plain = {}
        for key, value in node.items():
            if key in (node.lc.data or {}):  # merged keys have no place of their own
                line, column = node.lc.key(key)
                places[(*path, str(key))] = (line + 1, column + 1)
            plain[str(key)] = _plain(value, (*path, str(key)), places)
        return plain
    if isinstance(node, CommentedSeq):
        for index in range(len(node)):
            line, column = node.lc.item(index)
            places[(*path, index)] = (line + 1, column + 1)
        return [_plain(item, (*path, i), places) for i, item in enumerate(node)]
    if isinstance(node, ScalarBoolean):  # one that has an anchor
        return bool(node)
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node
