"""From what a user typed to a target."""

from __future__ import annotations

import ast
import difflib
import inspect
import os
import sys
import warnings
from importlib import import_module
from typing import Any

from flax import nnx

from normjax.auditing.adapters.haiku import transformed
from normjax.auditing.adapters.libraries import LIBRARIES, adapt, library_of
from normjax.auditing.target import Target, TargetError, said

# The package that installs a module, where the two are called differently.
PACKAGES = {"haiku": "dm-haiku"}


def resolve_target(
    text: str,
    shape: tuple[int, ...],
    dtype: Any = "float32",
    train: bool = False,
    *,
    seed: int | None = 0,
) -> Target:
    """The target that a user typed: ``MODULE:NAME`` or ``MODULE:NAME(ARGUMENTS)``.

    A class is made, a function without required arguments is called for what it makes,
    any other function is itself the target. Arguments are Python literals. A module of
    the current folder is found too.

    Args:
        text: like ``torch.nn:BatchNorm1d(16)``.
        shape: of x, with the batch.
        dtype: of x.
        train: whether plain calls are as in training.
        seed: as for ``adapt``.

    Returns:
        The target.

    Raises:
        TargetError: if there is no such module or name, the arguments do not fit, or
            the layer refuses the shape.

    Example:
        >>> resolve_target("flax.linen:GroupNorm(num_groups=4)", (2, 5, 8)).resizable
        (0, 1)
    """
    path, colon, call = text.partition(":")
    if not colon or not path.replace(".", "").isidentifier():
        raise TargetError(
            f"target is {text!r}, expected MODULE:NAME or MODULE:NAME(ARGUMENTS), like "
            "flax.linen:LayerNorm or torch.nn:BatchNorm1d(16)"
        )
    name, args, kwargs = _parsed(text, call)
    found = _found(text, path, name)
    layer = _built(text, found, args, kwargs)
    try:
        return adapt(layer, shape, dtype, train=train, seed=seed, name=name)
    except TargetError as error:
        raise TargetError(f"{text}: {error}") from error


def _parsed(text: str, call: str) -> tuple[str, list[Any] | None, dict[str, Any]]:
    """The dotted name, and the arguments if there are parentheses."""
    try:
        node = ast.parse(call.strip(), mode="eval").body
        args, kwargs = None, {}
        if isinstance(node, ast.Call):
            args = [_literal(each) for each in node.args]
            kwargs = {str(word.arg): _literal(word.value) for word in node.keywords}
            node = node.func
        name = ast.unparse(node)
        if not name.replace(".", "").isidentifier():
            raise ValueError(f"{name!r} is no name")
    except (SyntaxError, ValueError) as error:
        raise TargetError(
            f"{text}: {said(error)}; expected NAME or NAME(ARGUMENTS) with Python "
            "literals, like GroupNorm(num_groups=4)"
        ) from None
    return name, args, kwargs


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)} is no literal") from None


def _found(text: str, path: str, name: str) -> Any:
    """The object of that name in that module."""
    top = path.split(".")[0]
    if top == "keras" and top not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "jax")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(path)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if missing == top and top in {name.split(".")[0] for name in LIBRARIES}:
            package = PACKAGES.get(top, top)
            raise TargetError(
                f"{text}: {top} is not installed: pip install {package}"
            ) from None
        where = "" if missing in (path, top) else f" (imported by {path})"
        raise TargetError(
            f"{text}: there is no module {missing!r}{where}, neither installed nor in "
            "the current folder"
        ) from None
    except Exception as error:
        raise TargetError(
            f"{text}: importing {path} raised {type(error).__name__}: {said(error)}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TargetError(f"{text}: {path} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def _built(text: str, found: Any, args: list[Any] | None, kwargs: dict[str, Any]):
    """What is audited: the class made, the factory called, or the function itself."""
    if args is None and not isinstance(found, type) and not _is_factory(found):
        return found
    args = args or []
    if isinstance(found, type) and issubclass(found, nnx.Module):
        kwargs = {"rngs": nnx.Rngs(0), **kwargs}
    try:
        if isinstance(found, type) and library_of(found) == "haiku":
            inspect.signature(found).bind(*args, **kwargs)
            return transformed(found, *args, **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return found(*args, **kwargs)
    except Exception as error:
        raise TargetError(
            f"{text}: {type(error).__name__}: {said(error)}; the arguments stand in "
            "parentheses behind the name"
        ) from error


def _is_factory(found: Any) -> bool:
    """Whether it can be called without arguments, and is a function."""
    if not inspect.isroutine(found):
        return False
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError):
        return False
    return True
