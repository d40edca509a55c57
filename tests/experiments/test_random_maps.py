"""Studies of random maps: what they measure and predict, against NumPy."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from normjax import study
from normjax.study.cells import stream

pytestmark = pytest.mark.jax_defaults

ROOT = Path(__file__).parent.parent.parent
KEY = 7


def script(name: str, old: str = "", new: str = "") -> Any:
    """The module, with one piece of its text changed."""
    text = (ROOT / f"experiments/{name}.py").read_text(encoding="utf-8")
    assert not old or text.count(old) == 1
    module = types.ModuleType(name)
    code = text.replace(old, new) if old else text
    sys.modules[name] = module  # pydantic looks annotations up there
    exec(compile(code, name, "exec", dont_inherit=True), module.__dict__)
    return module


def measured(module: Any, **settings: Any) -> dict[str, Any]:
    cell = study.Cell("a", module.Settings(**settings))
    return module.measure(cell, jax.random.key(KEY))


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    key = stream(jax.random.key(KEY), name)
    return np.asarray(jax.random.normal(key, shape), np.float64)


@pytest.mark.parametrize(("size", "ddof"), [(2, 0), (2, 1), (8, 0), (64, 0)])
def test_ghosts_have_the_variances_of_their_examples(size: int, ddof: int):
    found = measured(script("ghost_moments"), size=size, ddof=ddof, features=96)
    x = drawn("batch", (64, 96))
    expected = x.reshape(-1, size, 96).var(1, ddof=ddof).mean()
    np.testing.assert_allclose(found["variance"], expected, rtol=1e-5)
    for side in ("merged", "merged_predicted"):
        np.testing.assert_allclose(found[side], x.var(0).mean(), rtol=1e-5)


@pytest.mark.parametrize(("size", "ddof"), [(2, 0), (2, 1), (8, 0)])
def test_the_expected_variance_of_a_group(size: int, ddof: int):
    """Against 200,000 groups: five standard errors."""
    v = np.random.default_rng(0).normal(size=(200_000, size)).var(1, ddof=ddof)
    slack = 5 * v.std() / len(v) ** 0.5
    right = measured(script("ghost_moments"), size=size, ddof=ddof, features=8)
    assert right["variance_predicted"] == pytest.approx(v.mean(), abs=slack)
    wrong = script("ghost_moments", "(n - 1) / (n - settings.ddof)", "1.0 * n / n")
    planted = measured(wrong, size=size, ddof=ddof, features=8)["variance_predicted"]
    assert (abs(planted - v.mean()) > slack) == (ddof == 0)


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_dropout_shifts_the_variance_as_predicted(keep: float):
    """Against a million numbers of NumPy's own generator: within 2 %."""
    rng = np.random.default_rng(1)
    x = np.maximum(rng.normal(size=1_000_000), 0)
    dropped = np.where(rng.random(x.shape) < keep, x / keep, 0)
    ratio = dropped.var() / x.var()
    found = measured(script("dropout_shift"), keep=keep)
    assert found["ratio_predicted"] == pytest.approx(ratio, rel=0.02)
    assert found["eval_std_predicted"] == pytest.approx(ratio**-0.5, rel=0.02)
    wrong = script("dropout_shift", "square / keep", "square")
    planted = measured(wrong, keep=keep)["ratio_predicted"]
    assert planted != pytest.approx(ratio, rel=0.02)


def test_dropout_is_measured_on_the_batches_that_were_drawn():
    found = measured(script("dropout_shift"), batch=64, features=8)
    train, test = (np.maximum(drawn(name, (64, 8)), 0) for name in ("train", "test"))
    key = stream(jax.random.key(KEY), "dropout")
    kept = np.asarray(jax.random.uniform(key, (64, 8))) < 0.5
    seen = np.where(kept, 2 * train, 0)
    ratio = seen.var(0).mean() / test.var(0).mean()
    np.testing.assert_allclose(found["ratio"], ratio, rtol=1e-5)
    size = np.sqrt(np.mean(test.var(0) / (seen.var(0) + 1e-5)))
    np.testing.assert_allclose(found["eval_std"], size, rtol=1e-5)


def norm(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "none"])
def test_the_stream_is_that_of_numpy(placement: str):
    found = measured(
        script("residual_growth"), placement=placement, depth=3, width=16, examples=4
    )
    h, power = norm(drawn("input", (4, 16))), []
    for key in jax.random.split(stream(jax.random.key(KEY), "blocks"), 3):
        first, second = jax.random.split(key)
        into = np.asarray(jax.random.normal(first, (16, 64)), np.float64) / 4
        back = np.asarray(jax.random.normal(second, (64, 16)), np.float64)
        before = norm(h) if placement in ("pre", "sandwich") else h
        branch = np.maximum(before @ into, 0) @ back * (2 / 64) ** 0.5
        branch = norm(branch) if placement == "sandwich" else branch
        h = norm(h + branch) if placement == "post" else h + branch
        power.append(np.mean(h**2))
    np.testing.assert_allclose(found["curve.power"].values, power, rtol=1e-4)
    np.testing.assert_allclose(found["last"], power[-1], rtol=1e-4)
    slope = np.polyfit([1, 2, 3], power, 1)[0]
    assert found["growth"] == pytest.approx(slope, rel=1e-3, abs=1e-5)
    doublings = np.polyfit([1, 2, 3], np.log2(power), 1)[0]
    assert found["doublings"] == pytest.approx(doublings, rel=1e-3, abs=1e-5)
