"""Where the members degenerate: what the cards say there, measured."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.family import FAMILY, claims
from normjax.mixture import Mixture
from normjax.spec import PLACEMENT

SPECS: dict[str, nj.NormSpec] = {
    name: member.layer
    for name, member in FAMILY.items()
    if isinstance(member.layer, nj.NormSpec)
}
EPSILON = 1e-5
ROOT = float(np.sqrt(EPSILON))
X = np.array([1.5, -4.0, 0.3, 2.0])


def said(layer, text: str) -> bool:
    """Whether a line of the card starts with the text."""
    return any(line.startswith(text) for line in claims(layer).degenerate)


def on(spec: nj.NormSpec, shape: tuple[int, ...], **given):
    """x, y and the Jacobian; entries lie 2 apart or more, and none is near 0."""
    x = np.random.default_rng(5).permutation(2.0 * np.arange(np.prod(shape))) - 8.7
    x = x.reshape(shape)
    J = jax.jacfwd(lambda x: nj.normalize(spec, x, **given))(jnp.asarray(x))
    y = np.asarray(nj.normalize(spec, jnp.asarray(x), **given))
    return x, y, np.asarray(J).reshape(x.size, x.size)


# Shapes on which every group has one element, then two.
SMALL = {
    "batch_norm": [(1, 1, 1, 3), (2, 1, 1, 3)],
    "layer_norm": [(4, 1), (4, 2)],
    "adaptive_layer_norm": [(4, 3, 1), (4, 3, 2)],
    "instance_norm": [(4, 1, 1, 3), (4, 2, 1, 3)],
    "adaptive_instance_norm": [(4, 1, 1, 3), (4, 1, 2, 3)],
    "group_norm": [(4, 1, 1, 32), (4, 1, 1, 64)],
    "ghost_batch_norm": [(4, 1, 1, 3), (4, 1, 2, 3)],
    "weight_standardization": [(1, 1, 1, 3), (1, 2, 1, 3)],
}
STANDARD = [
    name
    for name, spec in SPECS.items()
    if spec.statistics == "input" and spec.center and spec.divide == "std"
]


def test_every_standard_member_is_measured():
    assert set(STANDARD) == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_one_two_and_equal_elements(name: str):
    spec = SPECS[name]
    one, two = SMALL[name]
    assert said(spec, "one element over ")
    _, y, J = on(spec, one)
    assert not y.any()
    assert not J.any()
    assert said(spec, "two elements over ")
    _, y, J = on(spec, two)
    np.testing.assert_allclose(np.abs(y), 1.0, atol=1e-4)
    assert np.abs(J).max() < 1e-3
    assert said(spec, "equal elements over ")
    constant = jnp.full(two, 3.1)
    assert not nj.normalize(spec, constant).any()
    slope = jax.jvp(lambda x: nj.normalize(spec, x), (constant,), (on(spec, two)[1],))[
        1
    ]
    np.testing.assert_allclose(slope, y / ROOT, rtol=1e-6)  # y has mean 0: P leaves it


@pytest.mark.parametrize("ddof", [1, 2, 3])
def test_degrees_of_freedom(ddof: int):
    spec = nj.layer_norm(ddof=ddof)
    if ddof == 1:
        assert "±1/√2 comes out" in str(claims(spec).degenerate)
        two = nj.normalize(spec, jnp.asarray(X[:2]))
        np.testing.assert_allclose(np.abs(two), np.sqrt(0.5), rtol=1e-5)
        assert not nj.normalize(spec, jnp.asarray(X[:1])).any()
        return
    assert said(spec, f"{ddof} elements or fewer over c: the variance counts as 0, (x")
    assert not said(spec, "two elements")
    few = X[:ddof]
    expected = (few - few.mean()) / ROOT
    np.testing.assert_allclose(
        nj.normalize(spec, jnp.asarray(few)), expected, rtol=1e-9
    )
    rms = nj.rms_norm(ddof=ddof)
    assert said(rms, f"{ddof} elements or fewer over c: the variance counts as 0, x/√ε")
    np.testing.assert_allclose(
        nj.normalize(rms, jnp.asarray(few)), few / ROOT, rtol=1e-12
    )


@pytest.mark.parametrize("placement", PLACEMENT)
def test_scale_only_has_nothing_to_divide_by(placement: str):
    """One element or equal ones: x/√ε, 316 times the input (x/ε outside)."""
    spec = nj.scale_only(epsilon_placement=placement)
    root = placement in ("inside_sqrt", "floor_var")
    word, size = ("√ε", ROOT) if root else ("ε", EPSILON)
    assert said(
        spec, f"one element, or equal ones, over c: the variance is 0, x/{word}"
    )
    for x in (X[:, None], np.full((2, 4), 2.5)):
        np.testing.assert_allclose(
            nj.normalize(spec, jnp.asarray(x)), x / size, rtol=1e-12
        )


@pytest.mark.parametrize("name", ["rms_norm", "l2_norm", "qk_norm"])
def test_only_the_sign_is_left(name: str):
    spec = SPECS[name]
    assert said(spec, "one element over ")
    x, y, J = on(spec, (5, 1))
    np.testing.assert_allclose(y, np.sign(x), atol=1e-4)
    assert 0 < np.abs(J).max() < 1e-3
    assert said(spec, "zeros over ")
    slope = jax.jacfwd(lambda x: nj.normalize(spec, x))(jnp.zeros(3))
    np.testing.assert_allclose(slope, np.eye(3) / ROOT, rtol=1e-9)


def test_center_only():
    _, y, J = on(nj.center_only(), (5, 1))
    assert said(nj.center_only(), "one element over c: 0 comes out, no gradient")
    assert not y.any()
    assert not J.any()


def test_renorm():
    """One element: the distance from the reference; two: ±r + d."""
    spec = nj.batch_renorm(r_max=2.0, d_max=1.0)
    mean, variance = np.array([0.5, -9.0]), np.array([4.0, 1.0])
    given = {"reference": nj.Statistics(*map(jnp.asarray, (mean, variance)))}
    assert said(spec, "one element over the other axes: d comes out")
    x, y, J = on(spec, (1, 2), **given)
    expected = np.clip((x - mean) / np.sqrt(variance + EPSILON), -1, 1)
    np.testing.assert_allclose(y, expected, rtol=1e-9)
    assert not J.any()
    assert said(spec, "two elements over the other axes: ±r + d comes out, almost no")
    x, y, J = on(spec, (2, 2), **given)
    s = np.sqrt(variance + EPSILON)
    r = np.clip(x.std(0) / s, 0.5, 2)
    d = np.clip((x.mean(0) - mean) / s, -1, 1)
    np.testing.assert_allclose(y, np.sign(x - x.mean(0)) * r + d, rtol=1e-4)
    assert np.abs(J).max() < 1e-3


def test_blend():
    """One element: only its distance from the reference's mean is left."""
    spec = SPECS["blended_batch_norm"]
    mean, variance = np.array([0.5, -9.0]), np.array([4.0, 1.0])
    given = {"reference": nj.Statistics(*map(jnp.asarray, (mean, variance)))}
    assert said(spec, "one element over the other axes: only its distance from the")
    x, y, _ = on(spec, (1, 2), **given)
    expected = 0.5 * (x - mean) / np.sqrt(0.5 * variance + EPSILON)
    np.testing.assert_allclose(y, expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["batch_norm", "ghost_batch_norm"])
def test_a_batch_of_one_is_instance_norm(name: str):
    spec = SPECS[name]
    assert said(spec, "one example in ")
    examples = 4 if "ghost" in name else 1
    x, y, _ = on(spec, (examples, 5, 5, 3))
    np.testing.assert_allclose(
        y, nj.normalize(nj.instance_norm(), jnp.asarray(x)), rtol=1e-9
    )


@pytest.mark.parametrize("name", ["batch_norm", "batch_renorm", "blended_batch_norm"])
def test_before_any_update(name: str):
    """Inference passes x on, but for ε; so does renorm's training, within its clips."""
    spec = SPECS[name]
    x = jnp.asarray(np.random.default_rng(5).normal(0.3, 1.2, (8, 2)))
    stored = nj.running.read(spec, nj.running.init(spec, x.shape, jnp.float64))
    assert said(spec, "inference before any update: mean 0 and variance 1 are used")
    y = nj.normalize(spec, x, moments=stored)
    np.testing.assert_allclose(y, x / np.sqrt(1 + EPSILON), rtol=1e-9)
    reference = "training before any update: mean 0 and variance 1 are the reference"
    assert said(spec, reference) == (name != "batch_norm")
    if name == "batch_renorm":
        y = nj.normalize(spec, x, reference=stored)
        np.testing.assert_allclose(y, x / np.sqrt(1 + EPSILON), rtol=1e-4)


def test_a_member_of_a_mixture_with_groups_of_one():
    """Its mean is x and its variance 0, so it only scales what the others give."""
    mixture = Mixture((nj.instance_norm(), nj.layer_norm(), nj.batch_norm()))
    assert said(mixture, "one element in the groups of 'b [...] c': its mean is x and")
    x = jnp.asarray(np.random.default_rng(5).normal(0.3, 1.2, (8, 1, 1, 6)))
    logits = jnp.array([0.4, -0.3, 0.1])
    params = {"mean_logits": logits, "variance_logits": 2 * logits}
    y = nj.mixture.normalize(mixture, x, params)
    others = Mixture(mixture.specs[1:])
    rest = {name: value[1:] for name, value in params.items()}
    z = nj.mixture.normalize(others, x, rest)
    p, q = (np.asarray(jax.nn.softmax(v))[0] for v in params.values())
    np.testing.assert_allclose(y, z * (1 - p) / np.sqrt(1 - q), rtol=1e-4)
    assert said(mixture, "'[...] c', one example in a batch: its own positions")
    assert said(mixture, "'[...] c', inference before any update: mean 0 and variance")


def test_dynamic_tanh():
    params = nj.init_dynamic_tanh(3, alpha=1.0)
    assert said(nj.dynamic_tanh, "|alpha · x| above 10: ±1 comes out, no gradient")
    x = jnp.array([-10.0, 10.0, 60.0], jnp.float32)
    assert nj.dynamic_tanh(x, params).tolist() == [-1.0, 1.0, 1.0]
    slope = jax.jacfwd(lambda x: nj.dynamic_tanh(x, params))(x)
    assert not np.asarray(slope).any()
    assert said(nj.dynamic_tanh, "|alpha · x| far below 1: the layer is linear")
    small = jnp.array([1e-4, 2e-4, -1e-4], jnp.float32)
    np.testing.assert_allclose(nj.dynamic_tanh(small, params), small, rtol=1e-6)
