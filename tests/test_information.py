"""``recoverable`` against what an output and its derivative do under such a change."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from frames import Case

import normjax as nj
from normjax.layout import Layout

# Of what moves; a mean that is subtracted from offsets of 3 loses some u of it.
LOST, MOVED = 1e-11, 1e-3
# A floor of ε = 0 is the root itself.
CHOSEN = {
    (str(nj.recoverable(case.spec)), case.spec.divide, case.spec.detach): name
    for name, case in reversed(CASES.items())
    if case.given is None
    and case.mask is None
    and not case.spec.epsilon_placement.startswith("floor")
}
ALL = sorted(CHOSEN.values())


def call(case: Case, x, *, affine=None):
    """ε = 0, so that a scale is lost altogether; r and d not clipped."""
    free = {"epsilon": 0.0, "affine": affine, "r_max": 1e6, "d_max": 1e6}
    if case.spec.statistics != "renorm":
        free = {name: free[name] for name in ("epsilon", "affine")}
    passed = case.arguments(x.dtype)
    passed.pop("params", None)
    return nj.normalize(case.spec.replace(**free), x, **passed)


def varying(case: Case, row: nj.Survival) -> tuple[np.ndarray, np.ndarray]:
    """A change that varies along a row's axes alone; and its mean over every group."""
    layout = Layout.bind(case.spec.parsed, case.frame.shape, case.spec.sizes)
    axes = {i for name in row.axes for i in layout.named(name)}
    if row.each == "example":
        axes = set(layout.example_axes(case.spec.example))
    shape = [n if i in axes else 1 for i, n in enumerate(case.frame.view)]
    change = np.broadcast_to(case.rng(row.each).normal(size=shape), case.frame.view)
    common = change.mean(case.frame.axes, keepdims=True)
    common = np.broadcast_to(common, change.shape)
    return change.reshape(case.frame.shape), common.reshape(case.frame.shape)


def moved(case: Case, x, changes: np.ndarray) -> dict[str, np.ndarray]:
    """How far each change moves y, and ∂y/∂x it, against the size of what comes out."""
    levels, scales = jnp.asarray(changes), jnp.asarray(changes * np.asarray(x))

    @jax.jit
    def one(level, scale):
        y = call(case, x)
        size, slope = jnp.abs(y).max(), x.std()
        tangent = [jax.jvp(partial(call, case), (x,), (t,))[1] for t in (level, scale)]
        gaps = [
            (call(case, x + level) - y) / size,
            (call(case, x * jnp.exp(level)) - y) / size,
            tangent[0] * slope / jnp.abs(level).max(),
            tangent[1] * slope / jnp.abs(scale).max(),
        ]
        return [jnp.abs(gap).max() for gap in gaps]

    found = jax.lax.map(lambda pair: one(*pair), (levels, scales))
    return dict(zip(WORDS, map(np.asarray, found), strict=True))


WORDS = ("level", "scale", "level_gradient", "scale_gradient")


def faults(case: Case, rows: tuple[nj.Survival, ...]) -> list[str]:
    """Every wrong word; an empty ``...`` has nothing to change."""
    pairs = [varying(case, row) for row in rows]
    with jax.enable_x64(True):
        x = jnp.asarray(case.rng("x").normal(3.0, 1.0, case.frame.shape))
        found = moved(case, x, np.stack([c for pair in pairs for c in pair]))
    wrong = []
    for i, (row, (change, _)) in enumerate(zip(rows, pairs, strict=True)):
        for what in WORDS:
            whole, common = found[what][2 * i], found[what][2 * i + 1]
            right = {
                "lost": whole < LOST,
                "relative": whole > MOVED and common < LOST,
                "kept": common > MOVED,
                "partly": common > MOVED,
            }[getattr(row, what)]
            if not right and not (row.each == "..." and np.ptp(change) == 0):
                wrong.append(f"{row.each} {what}: {whole} {common}")
    return wrong


@pytest.mark.parametrize("name", ALL)
def test_what_is_recoverable_is_what_moves_the_output(name: str):
    case = CASES[name]
    assert not faults(case, nj.recoverable(case.spec))


@pytest.mark.parametrize("name", ["layer", "batch_space", "center"])
def test_each_wrong_word_is_noticed(name: str):
    """Swapped words of another layer, and the words of inference, are refused."""
    case = CASES[name]
    rows = nj.recoverable(case.spec)
    assert faults(case, nj.recoverable(case.spec, given=True))
    other = case.spec.replace(center=not case.spec.center)
    assert faults(case, nj.recoverable(other))
    assert [row.each for row in rows] == [row.each for row in nj.recoverable(other)]


def test_given_statistics_keep_everything():
    spec = nj.batch_norm()
    for row in nj.recoverable(spec, given=True):
        words = {getattr(row, what) for what in WORDS}
        assert words == {"kept"}


def test_rows_of_patterns():
    """An example of several axes, none, and a batch that is only partly reduced."""
    ghosts = {row.each: row for row in nj.recoverable(nj.ghost_batch_norm(ghosts=2))}
    assert ghosts["example"].axes == ("g", "b")
    assert (ghosts["example"].level, ghosts["g"].level) == ("relative", "lost")
    kernel = [row.each for row in nj.recoverable(nj.weight_standardization())]
    assert kernel == ["group", "h", "w", "i", "o"]
