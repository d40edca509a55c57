"""Numbers of one machine, that another backend or version is checked against."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax import functional
from normjax.arguments import bind
from normjax.presets import PRESETS
from normjax.spec import NormSpec
from normjax.verify.checks import Case, neutral
from normjax.verify.laws import example_shape
from normjax.verify.suite import DTYPES
from normjax.verify.tolerance import Check, normwise, rounding_tolerance

RESULTS = ("y", "jvp", "vjp")
FORMAT = 1


def save(
    path: str | Path, specs: Sequence[NormSpec] | None = None, *, seed: int = 0
) -> int:
    """Write inputs and results of layers in three dtypes, for ``against``.

    Every layer is evaluated on a normal input and on one with an offset of 100 standard
    deviations: y, J t for a tangent t, and Jᵀ t̄ for a cotangent t̄.

    Args:
        path: of the ``.npz`` file.
        specs: the layers; every preset if None.
        seed: of the inputs.

    Returns:
        How many results were written.

    Example:
        >>> import normjax as nj, tempfile, pathlib
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "here.npz"
        >>> nj.verify.save(file, [nj.rms_norm()])
        18
        >>> all(check.ok for check in nj.verify.against(file))
        True
    """
    specs = [preset() for preset in PRESETS.values()] if specs is None else specs
    arrays: dict[str, Any] = {}
    for index, spec in enumerate(specs):
        random, shape = np.random.default_rng((seed, index)), example_shape(spec)
        normal, t, bar = random.normal(0.7, 1.5, (3, *shape))
        for dtype in DTYPES:
            for name, values in (("normal", normal), ("offset 150", normal + 150)):
                inputs = [_rounded(a, dtype) for a in (values, t, bar)]
                found = _evaluate(spec, dtype, *inputs)
                key = f"{index}/{dtype}/{name}"
                arrays |= {f"{key}/{n}": a for n, a in found.items()}
                arrays |= {
                    f"{key}/{n}": a
                    for n, a in zip(("x", "t", "bar"), inputs, strict=True)
                }
    about = {
        "format": FORMAT,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "specs": [spec.to_dict() for spec in specs],
    }
    with Path(path).open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)
    return sum(key.rpartition("/")[2] in RESULTS for key in arrays)


def against(path: str | Path) -> tuple[Check, ...]:
    """Evaluate the layers of a stored file on its inputs, here, and compare.

    Args:
        path: a file of ``save``.

    Returns:
        One ``Check`` for each result, normwise for each group: both sides err by
        ``rounding_tolerance``.

    Raises:
        ValueError: if the file is none of ``save``.
    """
    arrays, about = _load(Path(path))
    specs = [NormSpec.from_dict(declared) for declared in about["specs"]]
    found: list[Check] = []
    for key in (name[: -len("/y")] for name in arrays if name.endswith("/y")):
        index, dtype, name = key.split("/")
        inputs = [arrays[f"{key}/{n}"] for n in ("x", "t", "bar")]
        here = _evaluate(specs[int(index)], dtype, *inputs)
        stored = {n: arrays[f"{key}/{n}"] for n in RESULTS}
        origin = f"jax {about['jax']}, {about['device']}"
        found += _compare(specs[int(index)], dtype, inputs, here, stored, name, origin)
    return tuple(found)


def _load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    try:
        with np.load(path) as file:
            arrays = dict(file)
        about = json.loads(str(arrays.pop("about")))
        version = about["format"]
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{path} is no file of 'normjax verify --save': write one with it"
        ) from None
    if version != FORMAT:
        raise ValueError(
            f"{path} has format {version}, expected {FORMAT}: save it again"
        )
    return arrays, about


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers of a dtype, kept in float64."""
    return values.astype(jnp.dtype(dtype)).astype(np.float64)


def _evaluate(spec: NormSpec, dtype: str, x, t, bar) -> dict[str, np.ndarray]:
    """y, J t and Jᵀ t̄ on the default device, as float64."""
    with jax.enable_x64(True):
        x, t, bar = (jnp.asarray(a, dtype) for a in (x, t, bar))
        other = neutral(spec, bind(spec, x.shape), dtype)

        def run(x):
            return functional.normalize(spec, x, reference=other)

        @jax.jit
        def everything(x, t, bar):
            y, pull = jax.vjp(run, x)
            return y, jax.jvp(run, (x,), (t,))[1], pull(bar.astype(y.dtype))[0]

        found = everything(x, t, bar)
    return {
        name: np.asarray(a).astype(np.float64)
        for name, a in zip(RESULTS, found, strict=True)
    }


def _compare(
    spec: NormSpec, dtype: str, inputs, here, stored, name: str, origin: str
) -> list[Check]:
    x, *directions = inputs
    with jax.enable_x64(True):
        narrow = jnp.asarray(x, dtype)
        other = neutral(spec, bind(spec, x.shape), dtype)
        case = Case.of(spec, narrow, None, None, other)
    n = case.layout.group_size
    limit = 2 * rounding_tolerance(case.accumulate, n, case.kappa, output=dtype)
    spread = case.rows(case.spread).max(1)
    # J t may nearly vanish; its terms are of the size |t|/s.
    size = [np.linalg.norm(case.rows(d), axis=1) / spread for d in directions]
    least = dict(zip(RESULTS, (np.zeros_like(spread), *size), strict=True))
    found = []
    for result in RESULTS:
        rows = case.rows(here[result]), case.rows(stored[result])
        error = normwise(*rows, least[result])
        found.append(
            Check(
                name=f"{result} = stored",
                subject=f"{spec.pattern}, {spec.divide}, {dtype}, {name}",
                measured=f"{error:.1e}",
                predicted="0",
                error=error,
                tolerance=min(0.5, limit),
                reason=f"rounding in {case.accumulate} here and on {origin}",
            )
        )
    return found
