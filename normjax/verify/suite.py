"""Everything that can be checked about one spec, on inputs that would hurt."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from normjax import functional, running
from normjax.arguments import bind
from normjax.spec import NormSpec
from normjax.verify.checks import DENSE, check_jacobian, neutral
from normjax.verify.laws import check_laws, example_shape
from normjax.verify.tolerance import Check

DTYPES = ("float64", "float32", "bfloat16")


def check_spec(spec: NormSpec, *, seed: int = 0) -> tuple[Check, ...]:
    """Jacobian checks on five kinds of input, and the laws, in three dtypes.

    The inputs: normal with mean 0.7, the same with an offset of 100 standard
    deviations, with a scale at which ε dominates, constant groups, and a mask; where
    statistics are stored, inference with those after one update too.

    Args:
        spec: any layer; the affine part is left out, a blend is measured against a
            reference of mean 0 and variance 1.
        seed: of the inputs.

    Returns:
        One ``Check`` for each comparison.

    Example:
        >>> import normjax as nj
        >>> all(check.ok for check in nj.verify.check_spec(nj.rms_norm()))
        True
    """
    shape = example_shape(spec)
    if np.prod(shape) > DENSE:  # many groups of a named number
        shape = example_shape(spec, start=1)
    random = np.random.default_rng(seed)
    normal = random.normal(0.7, 1.5, shape)
    small = float(np.sqrt(float(spec.epsilon))) * 0.3
    inputs = {
        "normal": normal,
        "offset 150": normal + 150,
        f"scale {small:.1g}": normal * small,
        "constant": np.full(shape, 3.1),
    }
    mask = jnp.asarray(_valid(spec, random.random(shape) < 0.7))
    found: list[Check] = []
    for dtype in DTYPES:
        with jax.enable_x64(True):
            blend = neutral(spec, bind(spec, shape), dtype)
            for name, values in inputs.items():
                x = jnp.asarray(values, dtype)
                found += _named(check_jacobian(spec, x, blend_with=blend), name)
            x = jnp.asarray(normal, dtype)
            masked = check_jacobian(spec, x, mask=mask, blend_with=blend)
            found += _named(masked, "masked")
            if spec.running is not None:
                state = running.init(spec, shape)
                state = running.update(spec, state, functional.moments(spec, x))
                stored = running.read(spec, state)
                found += _named(check_jacobian(spec, x, moments=stored), "stored")
        found += check_laws(spec, dtype=dtype, seed=seed)
    return tuple(found)


def _valid(spec: NormSpec, mask: np.ndarray) -> np.ndarray:
    """A mask with a valid entry in each group: the references divide by its count."""
    layout = bind(spec, mask.shape)
    view = mask.reshape(layout.view_shape)
    view[tuple(0 if i in layout.reduced else slice(None) for i in range(view.ndim))] = 1
    return view.reshape(mask.shape)


def _named(checks: tuple[Check, ...], name: str) -> list[Check]:
    return [replace(check, subject=f"{name}, {check.subject}") for check in checks]
