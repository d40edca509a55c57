"""Who moves whom in a batch: against the formula, and what is planted is found."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

import normjax as nj
from normjax.analysis import cutting
from normjax.analysis.measures import LEVERAGE

pytestmark = pytest.mark.jax_defaults

EPSILON = 1e-3
SPEC = nj.batch_norm(epsilon=EPSILON)


def formula(batch: np.ndarray) -> np.ndarray:
    """‖∂yᵢ/∂xⱼ‖ of batch norm on (n, features): (δᵢⱼ − 1/n)/s − cᵢcⱼ/(n s³) each."""
    wide = batch.astype(np.float64)
    n, c = len(wide), wide - wide.mean(0)
    s = np.sqrt((c**2).mean(0) + EPSILON)
    block = (np.eye(n)[..., None] - 1 / n) / s - c[:, None] * c / (n * s**3)
    return np.sqrt((block**2).sum(-1))


def planted() -> np.ndarray:
    """Batches of 16 of 20 features: what each hides stands beside it."""
    x = np.random.default_rng(0).normal(2, 1, (69, 20)).astype(np.float32)
    x[5], x[3] = x[2], x[2]  # batch 0: three times the same
    x[20] = x[30] + 1e-2 * x[0]  # batch 1: nearly the same
    x[40] += 30  # batch 2: one example far from all others
    x[:, 7] = 4  # a dead channel everywhere
    x[50, 3] = np.nan  # batch 3: a channel that is not finite
    x[65] = x[64]  # the last batch has five examples
    return x


def columns(x, spec, batch_size: int):
    """The record, and the table of all examples."""
    parts: list[dict[str, np.ndarray]] = []

    def receive(name: str, table: dict[str, np.ndarray]) -> None:
        if name == "examples":
            parts.append(table)

    found = nj.analysis.analyze(x, spec, batch_size=batch_size, receive=receive)
    table = {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
    return found, table


@pytest.fixture(scope="module")
def whole():
    return columns(planted(), SPEC, 16)


def test_numbers_are_those_of_the_formula(whole):
    _, table = whole
    x = planted()
    for batch, first in enumerate(range(0, 69, 16)):
        rows = x[first : first + 16]
        use = np.isfinite(rows).all(0) & (rows.var(0) > EPSILON)
        assert use.sum() == (18 if batch == 3 else 19)
        right, here = formula(rows[:, use]), table["batch"] == batch
        others = right - np.diag(np.diag(right))
        bound = 200 * 2.0**-24  # some ten terms of up to 20 roundings
        for name, expected in (
            ("own", np.diag(right)),
            ("pull", others.max(1) / np.diag(right)),
            ("moves", np.sqrt((others**2).sum(0))),
            ("moved", np.sqrt((others**2).sum(1))),
            ("leverage", len(rows) * (others**2).sum(0) / (others**2).sum()),
        ):
            np.testing.assert_allclose(table[name][here], expected, rtol=bound)
        assert table["example"][here].tolist() == list(range(first, first + len(rows)))
        assert set(table["seen"][here]) == {use.sum()}
        nearest = table["companion"][here] - first
        strongest = others[np.arange(len(rows)), nearest]
        np.testing.assert_allclose(strongest, others.max(1), rtol=bound)


def test_likeness_is_the_cosine_of_standardized_examples(whole):
    _, table = whole
    rows = planted()[16:32].astype(np.float64)
    y = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + EPSILON)
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    cosine = y @ y.T - 2 * np.eye(16)
    here = table["batch"] == 1
    np.testing.assert_allclose(table["likeness"][here], cosine.max(1), atol=1e-5)
    assert table["nearest"][here].tolist() == (16 + cosine.argmax(1)).tolist()


def test_what_is_planted_is_found(whole):
    found, table = whole
    flags = {name: one.found for name, one in found.findings.items()}
    assert flags["repeated"].index.tolist() == [[3, 2], [5, 2]]
    assert flags["alike"].index.tolist() == [[20, 30], [30, 20]]
    # x̂² is n − 1, nearly: its own input moves it less than that of another one.
    assert sorted({i for i, _ in flags["pulled"].index.tolist()}) == [40]
    assert flags["not_finite_example"].index.tolist() == [[50]]
    assert flags["not_finite"].index.tolist() == [[3, 3]]
    assert flags["no_variance"].count == 4
    assert table["repeats"][[2, 3, 4, 5]].tolist() == [-1, 2, -1, 2]
    assert not table["gap"][[2, 3, 5]].any()
    assert found.strongest is not None
    assert (found.strongest.batch, found.strongest.first) == (2, 32)
    assert found.strongest.influence[8].argmax() != 8
    gap = found.distributions["gap"].histogram
    assert (gap.zero, gap.total, found.examples) == (3, 64, 64)


def test_the_last_batch_stands_apart(whole):
    found, table = whole
    rest = found.remainder
    assert rest is not None
    assert (rest.batch_size, rest.examples, rest.groups) == (5, 5, 20)
    assert rest.findings["repeated"].found.index.tolist() == [[65, 64]]
    assert rest.findings["no_variance"].found.index.tolist() == [[4, 7]]
    assert found.groups == 80
    assert table["example"].tolist() == list(range(69))
    even = nj.analysis.analyze(planted()[:64], SPEC, batch_size=16)
    assert even.remainder is None
    assert {**found.to_dict(), "remainder": None, "shape": []} == {
        **even.to_dict(),
        "shape": [],
    }


def test_batches_on_many_devices_are_those_on_one(monkeypatch):
    monkeypatch.setattr(cutting, "PIECE_BYTES", 1)
    spread = nj.analysis.analyze(planted(), SPEC, batch_size=16)
    alone = jax.local_devices()[:1]
    assert len(jax.local_devices()) >= 4
    monkeypatch.setattr(jax, "local_devices", lambda: alone)
    single = nj.analysis.analyze(planted(), SPEC, batch_size=16)
    assert spread.to_dict() == single.to_dict()
    assert spread.findings["repeated"].found.count == 2


def test_companions_are_those_of_the_same_ghost():
    """Two ghosts of four: what is equal across them is no companion."""
    x = np.random.default_rng(1).normal(size=(27, 20)).astype(np.float32)
    x[4], x[6] = x[0], x[5]
    found, table = columns(x, nj.ghost_batch_norm(ghosts=2), 8)
    assert found.findings["repeated"].found.index.tolist() == [[6, 5]]
    ghost = table["example"] % 8 // 4
    assert (table["companion"] % 8 // 4 == ghost).all()
    assert (table["nearest"] % 8 // 4 == ghost).all()
    assert found.remainder is None
    assert (found.left_out, found.examples) == (3, 24)


def test_few_numbers_and_single_examples():
    """Chance makes 8 numbers alike; one example has no companion."""
    x = np.random.default_rng(2).normal(size=(9, 8)).astype(np.float32)
    x[0] = 1.001 * x[1]
    found = nj.analysis.analyze(x, SPEC, batch_size=4)
    assert not found.judged_alike
    assert found.findings["alike"].found.count == 0
    rest = found.remainder
    assert rest is not None
    assert (rest.batch_size, rest.examples, rest.strongest) == (1, 0, None)
    assert rest.findings["no_variance"].found.count == 8
    dead = nj.analysis.analyze(np.ones((4, 8), np.float32), SPEC, batch_size=4)
    assert (dead.examples, dead.strongest) == (0, None)


def test_positions_of_an_image_share_statistics():
    """b h w c: groups by channel, examples by image."""
    x = np.random.default_rng(3).normal(size=(6, 3, 3, 4)).astype(np.float32)
    x[4] = x[1]
    found, table = columns(x, SPEC, 6)
    assert found.distributions["share"].axes == ("batch", "c")
    assert found.findings["repeated"].found.index.tolist() == [[4, 1]]
    run = jax.jit(partial(nj.influence, SPEC.replace(affine=None)))
    matrix = np.asarray(run(x))
    np.testing.assert_allclose(table["own"], np.diag(matrix), rtol=1e-5)


def test_an_example_that_moves_all_others():
    """x̂ᵢx̂ⱼ of the formula: eight standard deviations, on either side of the mean."""
    x = np.random.default_rng(4).normal(size=(128, 20)).astype(np.float32)
    x[17] = 8 * (-1) ** np.arange(20)
    found, table = columns(x, SPEC, 128)
    right = formula(x) ** 2
    np.fill_diagonal(right, 0)
    share = 128 * right.sum(0) / right.sum()
    np.testing.assert_allclose(table["leverage"], share, rtol=200 * 2.0**-24)
    assert found.findings["dominant"].found.index.tolist() == [[17]]
    assert share[17] > LEVERAGE > np.delete(share, 17).max()
