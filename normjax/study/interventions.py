"""What an arm claims to change, checked at run time against a prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.arguments import bind
from normjax.spec import NormSpec
from normjax.spectra import stabilizer_share

Values = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Manipulation:
    """One manipulation check of one arm.

    Attributes:
        arm: the arm.
        name: what was checked.
        predicted: as text.
        measured: as text, over all seeds.
        ok: whether it held in every seed.
    """

    arm: str
    name: str
    predicted: str
    measured: str
    ok: bool


_DIVISORS = {
    "inside_sqrt": lambda square, epsilon: jnp.sqrt(square + epsilon),
    "outside_sqrt": lambda square, epsilon: jnp.sqrt(square) + epsilon,
    "floor_var": lambda square, epsilon: jnp.sqrt(jnp.maximum(square, epsilon)),
    "floor_std": lambda square, epsilon: jnp.maximum(jnp.sqrt(square), epsilon),
}


def norm_checks(spec: NormSpec, x: Array, y: Array) -> dict[str, Array]:
    """Group means and sizes of a norm's output before any training step.

    The affine part is the identity then. Means are relative to the output's size.

    Args:
        spec: the layer.
        x: its input.
        y: its output.

    Returns:
        ``check.norm_mean`` (largest |mean| of a group), ``check.norm_std`` and
        ``check.norm_rms`` (means over groups of each, over what the input and the spec
        predict), ``check.norm_share`` (mean ρ).
    """
    layout = bind(spec, x.shape)
    axes = layout.reduced
    before, after = x.reshape(layout.view_shape), y.reshape(layout.view_shape)
    std, rms = before.std(axes), jnp.sqrt(jnp.mean(before**2, axes))
    kept = {"std": std, "rms": std if spec.center else rms}
    size = prod(layout.view_shape[axis] for axis in axes)
    if spec.divide != "none":
        square = std**2 if spec.divide == "std" else rms**2
        square *= size if spec.divide == "l2" else size / (size - spec.ddof)
        divisor = _DIVISORS[spec.epsilon_placement](square, spec.epsilon)
        kept = {name: value / divisor for name, value in kept.items()}
    size_after = jnp.sqrt(jnp.mean(after**2, axes))
    largest = jnp.max(jnp.abs(after.mean(axes)))
    return {
        "check.norm_mean": largest / jnp.sqrt(jnp.mean(after**2)),
        "check.norm_std": jnp.mean(after.std(axes) / kept["std"]),
        "check.norm_rms": jnp.mean(size_after / kept["rms"]),
        "check.norm_share": jnp.mean(stabilizer_share(spec, x)),
    }


def check_arm(
    arm: str,
    changes: Sequence[Mapping[str, Any]],
    values: Values,
    parent: Values,
    registry: Mapping[str, Callable[..., Iterable[tuple[str, str, np.ndarray, bool]]]],
) -> list[Manipulation]:
    """Check what an arm changes, and that it starts where its parent starts.

    Args:
        arm: its name.
        changes: of the resolved plan: name, before, after.
        values: the arm's ``check.*`` metrics over seeds.
        parent: those of the arm that it is from.
        registry: checks by the end of a property's name, whole parts of it.

    Returns:
        One ``Manipulation`` for each check.
    """
    found = _same_start(arm, values, parent)
    for change in changes:
        parts = str(change["name"]).split(".")
        ends = (".".join(parts[i:]) for i in range(len(parts)))
        checker = next((registry[end] for end in ends if end in registry), None)
        if checker is None:
            continue
        for name, predicted, measured, ok in checker(change["after"], values):
            found.append(Manipulation(arm, name, predicted, _range(measured), ok))
    return found


def _same_start(arm: str, values: Values, parent: Values) -> list[Manipulation]:
    """Equal data and equal initial values of every leaf that both arms have."""
    shared = [
        name
        for name in values
        if name in parent and name.startswith(("check.init.", "check.data"))
    ]
    if not shared:
        return []
    # A sum over the data is rounded as each program pleases; leaves are equal in bits.
    slack = {name: 1e-5 if name.startswith("check.data") else 0.0 for name in shared}
    same = [np.allclose(values[n], parent[n], slack[n], atol=0.0) for n in shared]
    text = f"{sum(same)} of {len(shared)} identical in every seed"
    name = "same data and initial values of shared leaves as its parent"
    return [Manipulation(arm, name, f"all {len(shared)}", text, all(same))]


def _centered(after: Any, values: Values):
    mean = values["check.norm_mean"]
    if after:
        yield "the norm's output has mean 0", "< 1e-4", mean, bool((mean < 1e-4).all())
    else:
        yield (
            "the norm's output keeps its mean",
            "> 0.05",
            mean,
            bool((mean > 0.05).all()),
        )


def _divided(after: Any, values: Values):
    word = "rms" if after in ("rms", "l2") else "std"
    size = values[f"check.norm_{word}"]
    label = f"{word} of the norm's output, over its prediction"
    yield label, "1", size, bool((np.abs(size - 1) < 0.01).all())


def _present(after: Any, values: Values):
    there = "check.norm_mean" in values
    yield "a norm is in the model", str(after), np.array([there]), there == after


def _side_route(after: Any, values: Values):
    there = any(name.startswith("check.init.side_route/kernel") for name in values)
    wanted = after != "none"
    yield (
        "the side route has its own Dense",
        str(wanted),
        np.array([there]),
        there == wanted,
    )
    if wanted:
        r = values["check.side_level"]
        yield (
            "its feature is the level: r = 1",
            "1",
            r,
            bool((np.abs(r - 1) < 1e-5).all()),
        )


def _shuffled(after: Any, values: Values):
    r = values["check.side_level"]
    if after:
        # Five standard errors of a correlation, and of their mean.
        bound = 5 / values["check.examples"] ** 0.5
        ok = bool(
            (np.abs(r) < bound).all() and (abs(r.mean()) < bound / len(r) ** 0.5).all()
        )
        predicted = f"|r| < {bound.max():.2g}, mean 0"
        yield "its feature is unrelated to the level", predicted, r, ok
    else:
        yield (
            "its feature is the level: r = 1",
            "1",
            r,
            bool((np.abs(r - 1) < 1e-5).all()),
        )


TRAINING = {
    "center": _centered,
    "divide": _divided,
    "norm.present": _present,
    "side_route": _side_route,
    "side_route_shuffled": _shuffled,
}


def _range(values: np.ndarray) -> str:
    if values.dtype == bool:
        return str(bool(values.all()))
    low, high = float(np.min(values)), float(np.max(values))
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
