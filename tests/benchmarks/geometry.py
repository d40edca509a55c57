"""The figure of README's geometry section: ``python -m benchmarks.geometry``.

Lines are the closed forms, points are jacfwd of a plain formula in float64.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

import normjax as nj
from normjax.report.figures import COLOURS, STYLE
from normjax.verify.oracles import reference

PATH = Path(__file__).parents[2] / "experiments" / "pages" / "geometry.png"
SPEC = nj.layer_norm(epsilon=1e-5)
N = 64
OFFSET, RADIAL, TANGENTIAL = COLOURS[6], COLOURS[1], COLOURS[0]


def inputs(decades: np.ndarray) -> np.ndarray:
    """One group of N numbers with mean 0 and spread 10^decade for each decade."""
    unit = np.random.default_rng(0).normal(size=N)
    unit = (unit - unit.mean()) / unit.std()
    return 10.0 ** decades[:, None] * unit


def measured(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Radial and tangential gain by autodiff of the plain formula."""
    plain = partial(reference, axes=(0,), epsilon=float(SPEC.epsilon))
    J = np.asarray(jax.vmap(jax.jacfwd(plain))(jnp.asarray(x)))
    radial = np.einsum("gi,gij,gj->g", x, J, x) / np.sum(x * x, 1)
    side = np.random.default_rng(1).normal(size=x.shape)
    side = side - side.mean(1, keepdims=True)
    along = np.sum(side * x, 1, keepdims=True) / np.sum(x * x, 1, keepdims=True)
    side = side - along * x
    tangential = np.einsum("gi,gij,gj->g", side, J, side) / np.sum(side * side, 1)
    return radial, tangential


def draw_gains(axes: Axes) -> None:
    """The three gains of a layer norm against the spread of its input."""
    fine, coarse = np.linspace(-6, 3, 200), np.arange(-5.5, 3, 1.0)
    with jax.enable_x64(True):
        found = jax.vmap(partial(nj.spectrum, SPEC))(jnp.asarray(inputs(fine)))
        points = measured(inputs(coarse))
    s = 10.0**fine
    axes.loglog(s, np.ravel(found.tangential), color=TANGENTIAL, lw=2)
    axes.loglog(s, np.ravel(found.radial), color=RADIAL, lw=2)
    for values, colour in zip(points, (RADIAL, TANGENTIAL), strict=True):
        axes.loglog(10.0**coarse, values, "o", ms=4, color=colour)
    axes.axhline(1e-17, color=OFFSET, lw=2)
    axes.axvline(1e-5**0.5, color="#999999", lw=1, ls=":")
    axes.set(
        ylim=(1e-18, 1e6), xlabel="standard deviation σ of the group", xticks=s[:0]
    )
    axes.set_xticks([1e-6, 1e-4, 1e-2, 1, 100])
    axes.set_yticks([1e-17, 1e-10, 1e-5, 1, 1e5], ["0", *_powers(-10, -5, 0, 5)])
    axes.minorticks_off()
    axes.set_ylabel("gain: change of the output for one of the input")
    text = partial(axes.text, fontsize=9)
    text(0.2, 20.0, "all other directions  1/s", color=TANGENTIAL)
    text(0.5, 2e-9, "louder or softer\n(radial)  ε/s³", color=RADIAL, ha="right")
    text(1e-6, 6e-17, "common offset: exactly 0", color=OFFSET)
    text(2e-3, 2.5e5, "σ = √ε", color="#777777", ha="right")
    text(4e-6, 1e-3, "small input:\nε divides,\nlinear map", color="#555555")
    text(30, 1e-5, "scale\nis lost", color="#555555")
    axes.set_title("What a layer norm lets through", loc="left", fontsize=11)


def draw_influence(axes: Axes, spec: nj.NormSpec, title: str, top: float):
    """Who moves whom in a batch whose last two examples are one and the same."""
    x = np.random.default_rng(3).normal(size=(8, 16))
    x[7] = x[6]
    x[3] *= 4
    with jax.enable_x64(True):
        found = np.asarray(nj.influence(spec, jnp.asarray(x)))
    image = axes.imshow(found, cmap="Blues", norm=LogNorm(0.05, top))
    axes.grid(visible=False)
    names = ["1", "2", "3", "4\nloud", "5", "6", "7", "8\n= 7"]
    axes.set_xticks(range(8), names)
    axes.set_yticks(range(8), [str(i) for i in range(1, 9)])
    axes.set_xlabel("input of example")
    axes.set_ylabel("moves output of example")
    axes.set_title(title, loc="left", fontsize=11)
    return image


def _powers(*exponents: int) -> list[str]:
    return [f"$10^{{{exponent}}}$" for exponent in exponents]


def draw() -> Figure:
    """Gains on the left, influence of a layer norm and of a batch norm."""
    with mpl.rc_context({**STYLE, "font.size": 9.5}):
        figure = Figure(figsize=(12, 4.2), layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
        draw_gains(left)
        alone = nj.layer_norm(affine=None)
        together = nj.batch_norm(affine=None)
        draw_influence(middle, alone, "Layer norm: each example moves itself", 8)
        image = draw_influence(right, together, "Batch norm: all move all", 8)
        bar = figure.colorbar(image, ax=[middle, right], shrink=0.85, pad=0.02)
        bar.set_label("influence ‖∂output/∂input‖ (white: 0)")
    return figure


def main() -> None:
    """Write the figure."""
    draw().savefig(PATH, dpi=110)
    print(PATH)


if __name__ == "__main__":
    main()
