"""A template filled in, and how numbers and changes read on a page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jinja2


def render(name: str, **values: Any) -> str:
    """A template of this package as a page that needs no other file.

    Args:
        name: ``page.html`` or ``activations.html``.
        values: what it speaks of.

    Returns:
        HTML; what users wrote is quoted.
    """
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "number": number,
        "change": change,
        "p": p_value,
        "interval": interval,
    }
    files = resources.files("normjax.report")
    style = files.joinpath("style.css").read_text("utf-8")
    template = environment.from_string(files.joinpath(name).read_text("utf-8"))
    return template.render(style=style, **values)


def number(value: float | None, digits: int = 3) -> str:
    """A number for readers: three significant digits, a real minus sign."""
    if value is None:
        return "–"
    text = f"{value:.{digits}g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}·10{_raised(int(exponent))}"
    return text.replace("-", "−")


def interval(paired: Mapping[str, Any]) -> str:
    """A mean with its 95 % interval, all to two digits of the interval's width."""
    mean, low, high = (paired[name] for name in ("mean", "low", "high"))
    if low is None:
        return "no interval"
    width = high - low
    decimals = 3 if width == 0 else max(0, 1 - math.floor(math.log10(width)))
    if decimals > 6:
        return f"{number(mean)} [{number(low)}, {number(high)}]"
    text = f"{mean:.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"
    return text.replace("-", "−")


def p_value(value: float) -> str:
    """A p value: two digits, and a bound below 0.0001."""
    return "< 0.0001" if value < 1e-4 else f"{value:.2g}"


def change(item: Mapping[str, Any]) -> str:
    """One property of an arm as text."""
    return f"{item['name']}: {_value(item['before'])} → {_value(item['after'])}"


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return re.sub(r"[{}'\"]", "", str(value))


def _raised(exponent: int) -> str:
    digits = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return str(exponent).translate(digits)
