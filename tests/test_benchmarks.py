"""The benchmarks run in their smallest form, and the README shows what they print."""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import geometry, layers, spectra, speed
from benchmarks.libraries import Layer
from benchmarks.readme import README
from benchmarks.timing import spread, times

import normjax as nj

pytestmark = pytest.mark.jax_defaults


class Table(NamedTuple):
    header: tuple[str, ...]
    first: list[str]


def tables(text: str) -> list[Table]:
    """Every Markdown table: its header and first column."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        lines = [line.strip("| ").split(" | ") for line in block.strip().splitlines()]
        assert len({len(line) for line in lines}) == 1
        found.append(Table(tuple(lines[0]), [line[0] for line in lines[2:]]))
    return found


def test_the_smallest_form_prints_every_table():
    text = "\n\n".join(speed.sections(smoke=True))
    layer, spectrum = tables(text)
    assert layer == (layers.HEADER, [str(work) for work in layers.SMALL])
    assert spectrum == (spectra.HEADER, [str(setting.n) for setting in spectra.SMALL])
    assert "nan" not in text


def test_the_readme_shows_the_full_form():
    text = README.read_text(encoding="utf-8")
    layer, spectrum = tables(text.split(speed.BEGIN)[1].split(speed.END)[0])
    assert layer == (layers.HEADER, [str(work) for work in layers.WORKLOADS])
    assert spectrum == (
        spectra.HEADER,
        [str(setting.n) for setting in spectra.SETTINGS],
    )


def test_rounds_are_interleaved_and_quartiles_ordered():
    calls: list[str] = []
    programs = {name: lambda name=name: calls.append(name) for name in "ab"}
    found = times(programs, rounds=5)
    assert [sorted(calls[i : i + 2]) for i in range(0, 12, 2)] == [["a", "b"]] * 6
    assert {name: len(taken) for name, taken in found.items()} == {"a": 5, "b": 5}
    assert spread(np.arange(5.0)) == (1, 2, 3)


def test_a_layer_that_computes_something_else_is_not_compared():
    work = layers.Workload("layer", (4, 8))
    x = jax.random.normal(jax.random.key(0), work.shape)
    right = Layer(lambda _, x: jax.nn.standardize(x), None)
    layers.check_alike(work, {layers.OURS: right, "same": right}, x)
    rms = Layer(lambda _, x: x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)), None)
    with pytest.raises(ValueError, match=r"layer 4 × 8: rms computes another layer"):
        layers.check_alike(work, {layers.OURS: right, "rms": rms}, x)


def test_the_points_of_the_figure_lie_on_its_lines():
    """Autodiff of the plain formula, and the closed form, over nine decades."""
    x = geometry.inputs(np.arange(-5.5, 3, 1.0))
    with jax.enable_x64(True):
        found = jax.vmap(partial(nj.spectrum, geometry.SPEC))(jnp.asarray(x))
        radial, tangential = geometry.measured(x)
    np.testing.assert_allclose(np.ravel(found.tangential), tangential, rtol=1e-12)
    # Autodiff subtracts 1/s − (1 − ρ)/s: an absolute error of some u/s.
    gap = np.abs(np.ravel(found.radial) - radial) / tangential
    assert gap.max() <= 64 * 2.0**-53
    assert len(geometry.draw().axes) == 4
