"""Field cases of modes: train, eval, frozen; a batch of one value or of none.

The kind: {train, eval} × {statistics present, absent} × {update on, off}, functional,
linen and nnx: every cell is defined or an error. Of the same theme elsewhere: numbers
of the averages in test_field_running.py, transforms in test_field_transforms.py.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit
from flax import nnx, serialization
from kinds import ONE_EACH, bound
from small import refuse

import normjax as nj
from normjax import running

pytestmark = pytest.mark.jax_defaults

KEY = jax.random.key(0)
SPEC = nj.batch_norm(epsilon=1e-3, running=nj.Running(decay=0.9))
X = jnp.array([[1.0], [3.0]])
OWN = np.array([[-1.0], [1.0]]) / np.sqrt(1 + 1e-3)
STORED = np.array([[0.9995], [2.9985]])  # x/√(1 + 1e-3)
normalize = jit(nj.normalize)
Stats = dict[str, Any]


def apply(layer: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> Any:
    return layer.apply(variables, *args, **kwargs)


@pytest.mark.parametrize(
    ("stored", "present", "updates"), [*product([False, True], repeat=3)]
)
def test_n30_functional_modes(stored: bool, present: bool, updates: bool):
    """N30: which statistics normalize, and whether they are updated, are two acts."""
    spec = SPEC if present else SPEC.replace(running=None)
    if not present:
        with refuse("stores no statistics: give it running=Running(decay=...)"):
            running.init(spec, X.shape)
        with refuse("state is a NoneType, expected State (nj.running.init)"):
            running.read(SPEC, cast("Any", None))
        np.testing.assert_allclose(normalize(spec, X), OWN, rtol=bound(1))
        return
    state = running.init(spec, X.shape)
    given = running.read(spec, state) if stored else None
    y = normalize(spec, X, moments=given)
    np.testing.assert_allclose(y, STORED if stored else OWN, rtol=5e-5)
    if updates:  # also of a layer that normalizes with what is stored
        new = running.update(spec, state, nj.moments(spec, X))
        np.testing.assert_allclose(new.mean, [0.2], rtol=bound(10))
        assert new.count.tolist() == [1]
    assert (state.mean.tolist(), state.count.tolist()) == ([0.0], [0])


ABSENT = "misses mean, var, count in 'batch_stats': init makes mean, var, count"
IMMUTABLE = "updates its stored statistics, but 'batch_stats' is immutable"
# (eval, statistics present, mutable): the mean afterwards, or the error.
LINEN: dict[tuple[bool, bool, bool], float | str] = {
    (False, True, True): 0.2,
    (False, True, False): IMMUTABLE,
    (False, False, True): ABSENT,
    (False, False, False): ABSENT,
    (True, True, True): 0.0,
    (True, True, False): 0.0,
    (True, False, True): ABSENT,
    (True, False, False): ABSENT,
}


@pytest.mark.parametrize(("cell", "right"), LINEN.items())
def test_n30_linen_modes(cell: tuple[bool, bool, bool], right: float | str):
    """N30: a frozen layer reads what is stored and never moves it."""
    stored, present, mutable = cell
    layer = nj.linen.Norm(SPEC, use_running_average=stored)
    variables: Any = layer.init(KEY, X)
    if not present:
        variables = {"params": variables["params"]}
    call = partial(apply, layer, variables, X)
    if isinstance(right, str):
        with pytest.raises(ValueError, match=right):
            call(mutable=["batch_stats"]) if mutable else call()
        return
    y, changed = call(mutable=["batch_stats"]) if mutable else (call(), {})
    np.testing.assert_allclose(y, STORED if stored else OWN, rtol=5e-5)
    if changed:
        np.testing.assert_allclose(changed["batch_stats"]["mean"], [right], rtol=1e-5)
        assert changed["batch_stats"]["count"].tolist() == [int(not stored)]


@pytest.mark.parametrize("stored", [False, True])
def test_n30_nnx_modes(stored: bool):
    """N30: eval() freezes, train() updates; what a spec does not store has no mode."""
    layer = nj.nnx.Norm(SPEC, X.shape)
    layer.eval() if stored else layer.train()
    for _ in range(2):
        y = layer(X)
        np.testing.assert_allclose(y, STORED if stored else OWN, rtol=5e-5)
    mean = 0.0 if stored else 0.38
    np.testing.assert_allclose(layer.mean.get_value(), [mean], rtol=bound(10))
    assert layer.count.get_value().tolist() == [0 if stored else 2]
    bare = nj.nnx.Norm(SPEC.replace(running=None), X.shape)
    y = bare(X, use_running_average=stored)
    np.testing.assert_allclose(y, OWN, rtol=bound(1))


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize(("stored", "update"), [*product([False, True], repeat=2)])
def test_n30_updating_is_a_switch_of_its_own(kind: str, stored: bool, update: bool):
    """N30, N86: own or stored statistics, with and without an update of these.

    Without one nothing needs to be mutable; a spec that stores nothing has none.
    """
    mode = {"use_running_average": stored, "update": update}
    bare = SPEC.replace(running=None)
    if kind == "nnx":
        layer = nj.nnx.Norm(SPEC, X.shape)
        y, mean = layer(X, **mode), layer.mean.get_value()
        if update:
            with refuse("update=True, but NormSpec('[...] c'"):
                nj.nnx.Norm(bare, X.shape)(X, **mode)
    else:
        layer = nj.linen.Norm(SPEC)
        variables = layer.init(KEY, X, use_running_average=stored)
        if update:
            y, changed = apply(layer, variables, X, mutable=["batch_stats"], **mode)
            mean = changed["batch_stats"]["mean"]
            with pytest.raises(ValueError, match=IMMUTABLE):
                apply(layer, variables, X, **mode)
            with refuse("update=True, but NormSpec('[...] c'"):
                nj.linen.Norm(bare).init(KEY, X, **mode)
        else:
            y, mean = apply(layer, variables, X, **mode), np.zeros(1)
    np.testing.assert_allclose(y, STORED if stored else OWN, rtol=5e-5)
    np.testing.assert_allclose(mean, [0.2 if update else 0.0], rtol=bound(10))


def test_n30_freezing_the_affine_part_is_another_switch():
    """N30: no gradient for scale and bias does not stop the update, and vice versa."""
    layer = nj.linen.Norm(SPEC, use_running_average=False)
    variables: Any = layer.init(KEY, X)

    def loss(x):  # parameters are constants here
        y, changed = apply(layer, variables, x, mutable=["batch_stats"])
        return jnp.sum(y**3), changed["batch_stats"]

    changed = jit(jax.grad(loss, has_aux=True))(X)[1]
    np.testing.assert_allclose(changed["mean"], [0.2], rtol=bound(10))
    frozen = nj.linen.Norm(SPEC, use_running_average=True)
    slope = jit(
        jax.grad(lambda p: jnp.sum(apply(frozen, {**variables, "params": p}, X) ** 3))
    )(variables["params"])
    assert slope["scale"].any()
    assert slope["bias"].any()


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_n26_one_value_in_training(kind: str):
    """N26: an error; or the bias, and the state as it was (ddof 1) or moved (0)."""
    x = jnp.array([[3.0]])

    def train(spec) -> tuple[Any, list]:
        if kind == "nnx":
            layer = nj.nnx.Norm(spec, (4, 1))
            y = layer(x)
            return y, [v.get_value() for v in (layer.mean, layer.var, layer.count)]
        layer = nj.linen.Norm(spec, use_running_average=False)
        variables = layer.init(KEY, jnp.zeros((4, 1)))
        y, found = apply(layer, variables, x, mutable=["batch_stats"])
        return y, [found["batch_stats"][name] for name in ("mean", "var", "count")]

    for ddof, right in ((0, [0.03, 0.99, 1]), (1, [0, 1, 0])):
        y, found = train(nj.batch_norm(running=nj.Running(ddof=ddof)))
        assert y.tolist() == [[0.0]]
        np.testing.assert_allclose(np.ravel(found), right, rtol=bound(100))
    with refuse("has groups of one element and the spec says single='error'"):
        train(nj.batch_norm(single="error"))


def test_n26_flax_updates_with_one_value():
    """N26: the control: Flax puts out 0 and stores (0.03, 0.99), without a choice."""
    layer = nn.BatchNorm(use_running_average=False)
    x = jnp.array([[3.0]])
    y, changed = apply(layer, layer.init(KEY, x), x, mutable=["batch_stats"])
    assert y.tolist() == [[0.0]]
    found = changed["batch_stats"]
    np.testing.assert_allclose([found["mean"][0], found["var"][0]], [0.03, 0.99])


@pytest.mark.parametrize("name", ONE_EACH)
def test_n28_empty_batch(name: str):
    """N28: no examples: nothing comes out, no gradient, and nothing is stored.

    Weight standardization has no examples: there a kernel without outputs.
    """
    case = ONE_EACH[name]
    shape = list(case.frame.shape)
    shape[-1 if case.spec.example is None else 0] = 0
    spec, x = case.spec, jnp.zeros(shape)

    @jit
    def backward(x, params):
        y, pull = jax.vjp(partial(nj.normalize, spec), x, params)
        return y, *pull(y)

    y, slope, params_bar = backward(x, nj.init(spec, x.shape))
    assert y.shape == slope.shape == x.shape
    assert not any(leaf.any() for leaf in jax.tree.leaves(params_bar))
    if spec.running is None:
        return
    layer = nj.nnx.Norm(spec, case.frame.shape)
    nnx.jit(lambda layer, x: layer(x))(layer, x)
    found = [v.get_value() for v in (layer.mean, layer.var, layer.count)]
    assert np.array_equal(found, [[0.0] * 2, [1.0] * 2, [0] * 2])


def test_n28_a_masked_out_batch_is_empty():
    """N28: all examples masked: the same, whatever they hold."""
    for hidden in (0.0, np.nan, np.inf):
        layer = nj.nnx.Norm(SPEC, (4, 1))
        layer(jnp.full((4, 1), hidden), mask=jnp.zeros(4, bool))
        found = [v.get_value() for v in (layer.mean, layer.var, layer.count)]
        assert np.ravel(found).tolist() == [0.0, 1.0, 0.0]


def test_n28_flax_stores_nan():
    """N28: the control: Flax's statistics after an empty batch."""
    layer = nn.BatchNorm(use_running_average=False)
    variables = layer.init(KEY, jnp.zeros((2, 2)))
    _, changed = apply(layer, variables, jnp.zeros((0, 2)), mutable=["batch_stats"])
    assert np.isnan(changed["batch_stats"]["mean"]).all()
    assert np.isnan(changed["batch_stats"]["var"]).all()


def test_n42_instance_norm_with_tracked_statistics():
    """N42: it must be declared; then eval reads (0, 1), otherwise it is ±1."""
    x = jnp.array([[[1.0], [3.0]]])
    assert nj.instance_norm().running is None
    plain = nj.linen.Norm(nj.instance_norm())
    y = plain.apply(plain.init(KEY, x), x)
    np.testing.assert_allclose(np.ravel(y), [-1, 1], rtol=1e-5)
    tracked = nj.linen.Norm(
        nj.instance_norm(running=nj.Running()), use_running_average=True
    )
    y = tracked.apply(tracked.init(KEY, x), x)
    np.testing.assert_allclose(np.ravel(y), [1, 3], rtol=1e-5)


def test_n80_a_checkpoint_without_statistics_is_refused():
    """N80: statistics and the number of updates are saved; what is missing is named."""
    layer = nj.linen.Norm(SPEC, use_running_average=False)
    variables: Any = layer.init(KEY, X)
    _, changed = apply(layer, variables, X, mutable=["batch_stats"])
    saved = serialization.to_state_dict(changed["batch_stats"])
    assert sorted(saved) == ["count", "mean", "var"]
    fresh = variables["batch_stats"]
    loaded = serialization.from_state_dict(fresh, saved)
    jax.tree.map(np.testing.assert_array_equal, loaded, changed["batch_stats"])
    for name in saved:
        part = {other: value for other, value in saved.items() if other != name}
        with pytest.raises(ValueError, match=name):
            serialization.from_state_dict(fresh, part)
        frozen = nj.linen.Norm(SPEC, use_running_average=True)
        tree = {"params": variables["params"], "batch_stats": part}
        with refuse(f"misses {name} in 'batch_stats'"):
            apply(frozen, tree, X)
    nnx_layer = nj.nnx.Norm(SPEC, X.shape)
    assert set(nnx.to_pure_dict(nnx.state(nnx_layer, nnx.BatchStat))) == set(saved)
