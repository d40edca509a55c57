"""The bracket notation: ``"b [h w] c"`` names axes and marks the reduced ones.

Five constructs: a name, one ``...`` for any number of axes, ``[ ]`` around axes that
are reduced together, ``( )`` around names that share one tensor dimension, and spaces.
The axes outside the brackets are *mapped*: one reduction group per index. So one string
fixes the statistics' shape and the block structure of every Jacobian.

    "... [c]"          layer norm          "[...] c"          batch norm
    "b [...] c"        instance norm       "b [...] (g [c])"  group norm
    "(g [b]) [...] c"  ghost batch norm    "[h w i] o"        weight standardization
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

ELLIPSIS = "..."
_TOKEN = re.compile(r"\.\.\.|[A-Za-z_][A-Za-z0-9_]*|\s+|.", re.DOTALL)
_CLOSER = {"[": "]", "(": ")"}


class PatternError(ValueError):
    """A pattern that cannot be read; ``text`` and ``position`` say where.

    Example:
        >>> try:
        ...     Pattern.parse("b [h [w] c")
        ... except PatternError as error:
        ...     print(error)
        brackets do not nest: close the first one before this
          b [h [w] c
               ^
    """

    def __init__(self, message: str, text: str, position: int):
        """Keep the parts, so that a caller can point into its own file."""
        self.message, self.text, self.position = message, text, position
        line = re.sub(r"\s", " ", text)
        super().__init__(f"{message}\n  {line}\n  {' ' * position}^")


@dataclass(frozen=True)
class Axis:
    """One named axis, or ``...``, with what the brackets say about it."""

    name: str
    reduced: bool


@dataclass(frozen=True)
class Bracket:
    """Axes that are reduced together: ``[h w]``."""

    items: tuple[str, ...]

    def __str__(self) -> str:
        """Print as written."""
        return f"[{' '.join(self.items)}]"


@dataclass(frozen=True)
class Parenthesis:
    """Names that share one tensor dimension, the first one outermost: ``(g [c])``."""

    items: tuple[str | Bracket, ...]

    def __str__(self) -> str:
        """Print as written."""
        return f"({' '.join(map(str, self.items))})"


@dataclass(frozen=True)
class Dimension:
    """One dimension of the tensor (``...`` stands for any number of them)."""

    parts: tuple[Axis, ...]
    composite: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts."""
        return tuple(axis.name for axis in self.parts)

    @property
    def name(self) -> str:
        """The axis name, or the parenthesis without its brackets: ``"(g c)"``."""
        names = " ".join(self.names)
        return f"({names})" if self.composite else names


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern; ``str`` prints it back exactly, up to spaces.

    Example:
        >>> pattern = Pattern.parse("b [h  w] (g [c])")
        >>> str(pattern), [d.name for d in pattern.dimensions]
        ('b [h w] (g [c])', ['b', 'h', 'w', '(g c)'])
    """

    items: tuple[str | Bracket | Parenthesis, ...]

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read a pattern.

        Raises:
            PatternError: on a duplicate name, nesting, an unclosed or empty bracket, a
                second ``...``, or a character that is none of the five constructs.
            TypeError: if ``text`` is not a string (YAML reads an unquoted ``[b]`` as a
                list).
        """
        if not isinstance(text, str):
            raise TypeError(
                f"a pattern is a string, got {text!r}; in YAML put it in quotes"
            )
        return _parse(text)

    @classmethod
    def from_axes(cls, ndim: int, reduction_axes: int | Sequence[int]) -> Pattern:
        """Write integer reduction axes as a pattern; axes are named x0, x1, ...

        Raises:
            ValueError: if an axis is out of range or named twice.

        Example:
            >>> str(Pattern.from_axes(4, (1, -2)))
            'x0 [x1 x2] x3'
        """
        axes = [reduction_axes] if isinstance(reduction_axes, int) else reduction_axes
        for axis in axes:
            if not -ndim <= axis < ndim:
                raise ValueError(
                    f"reduction axis {axis} is out of range for {ndim} dimensions; "
                    f"choose from {-ndim} to {ndim - 1}"
                )
        reduced = {axis % ndim for axis in axes}
        if len(reduced) != len(axes):
            raise ValueError(
                f"reduction axes {tuple(axes)} name one axis twice: give each one once"
            )
        items: list[str | Bracket | Parenthesis] = []
        for axis in range(ndim):
            name = f"x{axis}"
            if axis not in reduced:
                items.append(name)
            elif items and isinstance(items[-1], Bracket):
                items[-1] = Bracket((*items[-1].items, name))
            else:
                items.append(Bracket((name,)))
        return cls(tuple(items))

    def __str__(self) -> str:
        """Print the pattern with single spaces."""
        return " ".join(map(str, self.items))

    @cached_property
    def dimensions(self) -> tuple[Dimension, ...]:
        """The tensor's dimensions from left to right."""
        found: list[Dimension] = []
        for item in self.items:
            axes = tuple(_axes(item))
            if isinstance(item, Parenthesis):
                found.append(Dimension(axes, composite=True))
            else:
                found.extend(Dimension((axis,), composite=False) for axis in axes)
        return tuple(found)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Every axis from left to right, those inside parentheses one by one."""
        return tuple(axis for dim in self.dimensions for axis in dim.parts)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that ``affine`` and ``example`` may use, parentheses included."""
        composite = [dim.name for dim in self.dimensions if dim.composite]
        return tuple(axis.name for axis in self.axes) + tuple(composite)

    def example(self, name: str | None) -> Dimension | None:
        """The dimension that indexes examples; ``"auto"`` is the first one.

        A pattern of one bracketed dimension has none: there the last axis is the first.
        """
        if name != "auto":
            found = [d for d in self.dimensions if name in (d.name, *d.names)]
            return found[0] if found else None
        first = self.dimensions[0]
        alone = len(self.dimensions) == 1 and first.name != ELLIPSIS
        return None if alone and any(part.reduced for part in first.parts) else first

    @property
    def reduced(self) -> tuple[str, ...]:
        """Names of the reduced axes."""
        return tuple(axis.name for axis in self.axes if axis.reduced)

    @property
    def mapped(self) -> tuple[str, ...]:
        """Names of the other axes: one reduction group for each of their indices."""
        return tuple(axis.name for axis in self.axes if not axis.reduced)


def dimensions(names: str) -> tuple[Dimension, ...]:
    """What a text of names speaks of; an empty one speaks of nothing.

    Example:
        >>> [dimension.name for dimension in dimensions("b (g c)")], dimensions("")
        (['b', '(g c)'], ())
    """
    return Pattern.parse(names).dimensions if names != "" else ()


def _axes(item: str | Bracket | Parenthesis):
    """Yield the axes of one item."""
    if isinstance(item, str):
        yield Axis(item, reduced=False)
    elif isinstance(item, Bracket):
        yield from (Axis(name, reduced=True) for name in item.items)
    else:
        for part in item.items:
            yield from _axes(part)


@lru_cache(maxsize=1024)
def _parse(text: str) -> Pattern:
    """Parse with a stack of open brackets; every error knows its column."""
    stack: list[tuple[str, int, list]] = [("", 0, [])]
    seen: set[str] = set()
    for match in _TOKEN.finditer(text):
        token, position = match.group(), match.start()
        at = text, position
        opener, _, items = stack[-1]
        if token.isspace():
            continue
        if token in _CLOSER:
            _check_opening(token, [entry[0] for entry in stack], text, position)
            stack.append((token, position, []))
        elif token in _CLOSER.values():
            if _CLOSER.get(opener) != token:
                hint = f"close '{opener}' first" if opener else "nothing is open"
                raise PatternError(f"unexpected '{token}': {hint}", *at)
            if not items:
                raise PatternError(f"empty '{opener}{token}': put names inside", *at)
            stack.pop()
            closed = Bracket if opener == "[" else Parenthesis
            stack[-1][2].append(closed(tuple(items)))
        elif token == ELLIPSIS or (token.isascii() and token.isidentifier()):
            if token in seen:
                raise PatternError(
                    f"'{token}' stands here twice: give each axis its own name", *at
                )
            beside = text[position - 1 : position] + text[match.end() : match.end() + 1]
            if token == ELLIPSIS and any(c.isalnum() or c == "_" for c in beside):
                raise PatternError(
                    "'...' has no name: put a space before it, and no name on it", *at
                )
            if token == ELLIPSIS and "(" in [entry[0] for entry in stack]:
                raise PatternError(
                    "'...' cannot share a dimension: name the axes of '( )'", *at
                )
            seen.add(token)
            items.append(token)
        else:
            raise PatternError(
                f"unexpected {token!r}: a pattern has names, '...', '[ ]' and '( )'",
                *at,
            )
    opener, position, items = stack[-1]
    if opener:
        raise PatternError(
            f"'{opener}' is never closed: add '{_CLOSER[opener]}'", text, position
        )
    if not items:
        raise PatternError(
            "empty pattern: name the axes, for instance '... [c]'", text, 0
        )
    return Pattern(tuple(items))


def _check_opening(token: str, opened: list[str], text: str, position: int) -> None:
    """Refuse nesting: a bracket may stand inside a parenthesis, and that is all."""
    kind = {"[": "brackets", "(": "parentheses"}[token]
    if token in opened:
        raise PatternError(
            f"{kind} do not nest: close the first one before this", text, position
        )
    if token == "(" and "[" in opened:
        raise PatternError(
            "a parenthesis cannot stand inside brackets: write the brackets inside it",
            text,
            position,
        )
