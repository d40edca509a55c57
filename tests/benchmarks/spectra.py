"""Spectra in closed form against autodiff with a solver; growth with size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.timing import Spread, drawn, spread, times

import normjax as nj

SPEC = nj.layer_norm()


class Setting(NamedTuple):
    """Group size; how many inputs autodiff gets; how many fill a read pass."""

    n: int
    few: int
    many: int


SETTINGS = (
    Setting(64, 1024, 2**17),
    Setting(256, 256, 2**15),
    Setting(1024, 8, 2**13),
)
SMALL = (Setting(8, 2, 4),)


class Row(NamedTuple):
    """Of one group size: how often faster at equal input, passes, and bytes of x."""

    n: int
    inputs: int
    eigenvalues: Spread
    singular_values: Spread
    microseconds: float
    passes: Spread
    temporaries: float


def spectra(x: jax.Array) -> nj.Spectrum:
    return jax.vmap(partial(nj.spectrum, SPEC))(x)


def by_autodiff(solve: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda x: solve(jax.jacfwd(partial(nj.normalize, SPEC))(x)))(x)


def rows(settings: tuple[Setting, ...], rounds: int) -> Iterator[Row]:
    for n, few, many in settings:
        x = drawn((few, n))
        check_alike(x)
        solvers = {
            "eigenvalues": jnp.linalg.eigvalsh,
            "singular values": partial(jnp.linalg.svd, compute_uv=False),
        }
        programs = {
            name: partial(jax.jit(partial(by_autodiff, solve)), x)
            for name, solve in solvers.items()
        }
        found = times({"ours": partial(jax.jit(spectra), x), **programs}, rounds)
        wide = drawn((many, n))
        passes = {
            "ours": partial(jax.jit(spectra), wide),
            "read": partial(jax.jit(jnp.sum), wide),
        }
        each = times(passes, rounds)
        yield Row(
            n,
            few,
            spread(found["eigenvalues"] / found["ours"]),
            spread(found["singular values"] / found["ours"]),
            1e6 * float(np.median(each["ours"])) / many,
            spread(each["ours"] / each["read"]),
            temporaries(spectra, wide) / wide.nbytes,
        )


def check_alike(x: jax.Array) -> None:
    """Refuse to compare what does not agree to rounding in float32.

    Raises:
        ValueError: if a spectrum is not that of autodiff.
    """
    found = jax.jit(spectra)(x)
    values = [found.offset, found.radial, *[found.tangential] * (x.shape[1] - 2)]
    closed = np.sort(np.stack([np.asarray(v).reshape(len(x)) for v in values], 1), 1)
    matrices = np.asarray(jax.jit(partial(by_autodiff, jnp.asarray))(x), np.float64)
    right = np.linalg.eigvalsh((matrices + matrices.swapaxes(1, 2)) / 2)
    if not np.allclose(closed, right, atol=1e-5 * float(right.max())):
        raise ValueError(f"the spectra of {x.shape} are not those of autodiff")


def temporaries(function: Any, *arguments: jax.Array) -> int:
    """Bytes that the compiled program needs beside its arguments and results."""
    analysis = jax.jit(function).lower(*arguments).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def growth(sizes: list[int], rounds: int) -> dict[str, tuple[float, float]]:
    """Slope of log time against log n for 64 groups, and time per entry, last by first.

    Args:
        sizes: group sizes n.
        rounds: how often each is run.

    Returns:
        By program; a slope of 1 is linear growth.
    """
    programs = {
        "normalize": lambda x: nj.normalize(SPEC, x),
        "forward and backward": lambda x: jax.vjp(partial(nj.normalize, SPEC), x)[1](x),
        "spectrum": spectra,
    }
    found = {}
    for name, program in programs.items():
        runs = {str(n): partial(jax.jit(program), drawn((64, n))) for n in sizes}
        taken = [float(np.median(t)) for t in times(runs, rounds).values()]
        slope = np.polyfit(np.log(sizes), np.log(taken), 1)[0]
        last = taken[-1] / taken[0] / (sizes[-1] / sizes[0])
        found[name] = (float(slope), float(last))
    return found


HEADER = (
    "n",
    "inputs",
    "over eigvalsh(jacfwd)",
    "over svd(jacfwd)",
    "µs for each input",
    "read passes",
    "temporaries",
)


def cells(row: Row) -> list[str]:
    """The row as text, in the order of ``HEADER``."""

    def times_faster(found: Spread) -> str:
        return f"{found.middle:,.0f} ({found.low:,.0f} to {found.high:,.0f}) ×"

    return [
        str(row.n),
        str(row.inputs),
        times_faster(row.eigenvalues),
        times_faster(row.singular_values),
        f"{row.microseconds:.3f}",
        f"{row.passes.middle:.1f} ({row.passes.low:.1f} to {row.passes.high:.1f})",
        f"{row.temporaries:.3f} x",
    ]
