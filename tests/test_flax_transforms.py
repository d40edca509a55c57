"""The drop-ins under every transform, in checkpoints and exported."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.errors import TraceContextError
from flax_layers import KEY, KINDS, OURS, THEIRS, draw, make, pure, slow

import normjax as nj

pytestmark = pytest.mark.jax_defaults

X = draw((8, 3))
# Means 1, 2, 3 and no variance: with momentum 0.9 they give 0.561 and 0.729 (N36).
STEPS = jnp.ones((3, 4, 1)) * jnp.array([1.0, 2.0, 3.0])[:, None, None]


@pytest.mark.parametrize("kind", slow(KINDS, "BatchNorm", "GroupNorm"))
def test_linen_and_nnx_agree_bit_for_bit(kind):
    arguments: Any = {"num_groups": 2} if kind == "GroupNorm" else {}
    x, numbers = draw((4, 5, 6)), []
    shared: Any = None
    for library in (nj.linen, nj.nnx):
        function, params, _ = pure(make(library, kind, 6, **arguments), x)
        shared = params if shared is None else shared
        numbers.append(jax.jit(function)(dict(shared), x))
    jax.tree.map(np.testing.assert_array_equal, *map(list, map(jax.tree.leaves,
                 numbers)))  # fmt: skip


class Block(nn.Module):
    """A Dense with a batch norm, as a user writes it."""

    library: Any = nj.linen

    @nn.compact
    def __call__(self, x, _=None):
        norm = self.library.BatchNorm(use_running_average=False, momentum=0.9)
        return norm(nn.Dense(3)(x)), None


@pytest.mark.parametrize("remat", [False, True])
def test_linen_updates_once_for_each_step_under_grad_jit_and_remat(remat):
    """N33: rematerialization runs the forward pass twice and must update once."""
    model = (nn.remat(Block) if remat else Block)()
    variables: Any = jax.jit(model.init)(KEY, X)

    @jax.jit
    def step(variables):
        def loss(params):
            held = {**variables, "params": params}
            (y, _), changed = model.apply(held, X, mutable=["batch_stats"])
            return jnp.sum(y**3), changed["batch_stats"]

        gradients, stats = jax.grad(loss, has_aux=True)(variables["params"])
        return gradients, {**variables, "batch_stats": stats}

    gradients, new = step(variables)
    kernel = variables["params"]["Dense_0"]["kernel"]
    mean = np.asarray(new["batch_stats"]["BatchNorm_0"]["mean"])
    np.testing.assert_allclose(mean, 0.1 * (X @ kernel).mean(0), rtol=1e-5, atol=1e-6)
    # A bias before batch norm has no effect, so its gradient vanishes.
    size = jnp.abs(gradients["Dense_0"]["kernel"]).max()
    assert jnp.abs(gradients["Dense_0"]["bias"]).max() < 1e-5 * size


def test_linen_scan_over_layers_stacks_their_statistics():
    stacked = nn.scan(
        nn.remat(Block), {"params": 0, "batch_stats": 0},
        split_rngs={"params": True}, length=4,
    )  # fmt: skip
    found = []
    for library in (nj.linen, nn):
        model = stacked(library)
        variables: Any = jax.jit(model.init)(KEY, X)
        shapes = jax.tree.map(jnp.shape, variables["batch_stats"])
        assert shapes == {"BatchNorm_0": {"mean": (4, 3), "var": (4, 3)}}

        def apply(variables, model=model):
            return model.apply(variables, X, mutable=["batch_stats"])

        found.append(jax.jit(apply)(variables))
    leaves = zip(*map(jax.tree.leaves, found), strict=True)
    for mine, theirs in leaves:  # four layers, each with the rounding of one-pass
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4)


def test_linen_scan_that_carries_statistics_initializes_outside_of_the_loop():
    """N36: a carry has its structure before the loop; nn.scan cannot make it."""

    class Step(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            norm = nj.linen.BatchNorm(use_running_average=False, momentum=0.9)
            return carry, norm(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, xs):
            if self.is_initializing():
                return Step(name="step")(None, xs[0])
            scanned = nn.scan(
                Step, variable_broadcast="params", variable_carry="batch_stats",
                split_rngs={"params": False},
            )  # fmt: skip
            return scanned(name="step")(None, xs)

    variables: Any = jax.jit(Model().init)(KEY, STEPS)
    changed: Any = Model().apply(variables, STEPS, mutable=["batch_stats"])[1]
    stats = changed["batch_stats"]["step"]["BatchNorm_0"]
    np.testing.assert_allclose(stats["mean"], [0.561], rtol=1e-6)
    np.testing.assert_allclose(stats["var"], [0.729], rtol=1e-6)


def test_linen_vmap_keeps_the_statistics_of_each_lane():
    lanes = nn.vmap(
        Block, {"params": None, "batch_stats": 0}, split_rngs={"params": False}
    )
    x = draw((2, 8, 3))
    variables: Any = jax.jit(lanes().init)(KEY, x)
    model: Any = lanes()
    (y, _), changed = model.apply(variables, x, mutable=["batch_stats"])
    for lane in range(2):
        own = jax.tree.map(lambda a, lane=lane: a[lane], variables["batch_stats"])
        held = {**variables, "batch_stats": own}
        single: Any = Block()
        (alone, _), state = single.apply(held, x[lane], mutable=["batch_stats"])
        np.testing.assert_allclose(y[lane], alone, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            changed["batch_stats"]["BatchNorm_0"]["var"][lane],
            state["batch_stats"]["BatchNorm_0"]["var"],
            rtol=1e-5,
        )


def test_linen_new_statistics_carry_their_gradient_as_in_flax():
    slopes = []
    for library in (nj.linen, nn):
        function, params, _ = pure(make(library, "BatchNorm"), X)
        loss = jax.jit(
            jax.grad(lambda x, f=function, p=params: f(p, x)[1]["var"].sum())
        )
        slopes.append(loss(X))
    np.testing.assert_allclose(*slopes, rtol=1e-4, atol=1e-6)
    assert np.abs(slopes[1]).max() > 1e-3


@pytest.mark.parametrize("missing", [("mean", "var"), ("var",)])
def test_linen_statistics_that_are_missing_are_named(missing):
    model = Block()
    variables: Any = jax.jit(model.init)(KEY, X)
    stats = dict(variables["batch_stats"]["BatchNorm_0"])
    kept = {name: value for name, value in stats.items() if name not in missing}
    held = {**variables, "batch_stats": {"BatchNorm_0": kept}}
    text = f"BatchNorm_0 misses {', '.join(missing)} in 'batch_stats': init makes mean,"
    for mutable in ([], ["batch_stats"]):
        with pytest.raises(ValueError, match=text):
            model.apply(held, X, mutable=mutable)


def test_linen_statistics_that_are_immutable_are_one_clear_message():
    variables: Any = jax.jit(Block().init)(KEY, X)
    text = "BatchNorm_0 updates its stored statistics, but 'batch_stats' is immutable"
    with pytest.raises(ValueError, match=text):
        Block().apply(variables, X)


@pytest.mark.parametrize("kind", slow(KINDS, "BatchNorm", "RMSNorm"))
def test_a_linen_checkpoint_loads_both_ways(kind):
    arguments: Any = {"num_groups": 2} if kind == "GroupNorm" else {}
    x = draw((4, 5, 6))
    layers = [make(library["linen"], kind, **arguments) for library in (OURS, THEIRS)]
    trees: Any = [jax.jit(layer.init)(KEY, x) for layer in layers]
    moved = jax.tree.map(lambda a: a + 1, trees[1])
    for source, target in ((moved, trees[0]), (moved, trees[1])):
        data = flax.serialization.to_bytes(source)
        loaded = flax.serialization.from_bytes(target, data)
        assert jax.tree.structure(loaded) == jax.tree.structure(target)
        jax.tree.map(np.testing.assert_array_equal, loaded, source)


@pytest.mark.parametrize("kind", slow(KINDS, "BatchNorm", "RMSNorm"))
def test_an_nnx_state_loads_both_ways(kind):
    arguments: Any = {"num_groups": 2} if kind == "GroupNorm" else {}
    mine, theirs = (
        make(library["nnx"], kind, 6, **arguments) for library in (OURS, THEIRS)
    )
    for source, target in ((theirs, mine), (mine, theirs)):
        state = jax.tree.map(lambda a: a + 1, nnx.state(source))
        nnx.update(target, state)
        nnx.update(source, state)
        found, expected = (nnx.to_pure_dict(nnx.state(m)) for m in (target, source))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def stored(framework: str, tmp_path) -> tuple[Any, Any, Any]:
    """A checkpointer, its path, and arrays of a batch norm after an update."""
    if framework == "linen":
        variables: Any = jax.jit(Block().init)(KEY, X)
        _, changed = Block().apply(variables, X, mutable=["batch_stats"])
        arrays: Any = {**variables, **changed}
    else:
        layer = nj.nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        layer(X)
        arrays = nnx.to_pure_dict(nnx.state(layer))
    return ocp.StandardCheckpointer(), tmp_path / "checkpoint", arrays


@pytest.mark.parametrize("framework", THEIRS)
@pytest.mark.filterwarnings("ignore::UserWarning:orbax")
def test_orbax_round_trip_and_what_it_misses(framework, tmp_path):
    checkpointer, path, arrays = stored(framework, tmp_path)
    with checkpointer:
        checkpointer.save(path, arrays)
        checkpointer.wait_until_finished()
        target = jax.tree.map(jnp.zeros_like, arrays)
        loaded = checkpointer.restore(path, target)
        jax.tree.map(np.testing.assert_array_equal, loaded, arrays)
        learned = {"params"} if framework == "linen" else {"scale", "bias"}
        other = tmp_path / "parameters"
        checkpointer.save(other, {k: v for k, v in arrays.items() if k in learned})
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError, match="mean"):
            checkpointer.restore(other, target)


def test_exported_inference_carries_the_stored_statistics():
    """N79: the graph holds the stored statistics, not the batch's own."""
    layer = nj.linen.BatchNorm()
    variables: Any = layer.init(KEY, X, use_running_average=True)
    stats = {"mean": jnp.arange(3.0), "var": jnp.full((3,), 4.0)}
    held = {**variables, "batch_stats": stats}
    graph = nj.nnx.BatchNorm(3, use_running_average=True, rngs=nnx.Rngs(0))
    nnx.update(graph, nnx.State({k: nnx.BatchStat(v) for k, v in stats.items()}))
    right = (X - jnp.arange(3.0)) / np.sqrt(4 + 1e-5)
    for infer in (lambda x: layer.apply(held, x, use_running_average=True), graph):
        exported = jax.export.export(jax.jit(lambda x, f=infer: f(x)))(X)
        np.testing.assert_allclose(exported.call(X), right, rtol=1e-6)
        pytest.importorskip("flatbuffers")
        again = jax.export.deserialize(exported.serialize())
        np.testing.assert_allclose(again.call(X), right, rtol=1e-6)


def test_nnx_remat_scan_and_grad_update_once():
    found = []
    for library in (nj.nnx, nnx):
        layer = library.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))

        @nnx.jit
        def step(layer):
            def loss(layer):
                return jnp.sum(nnx.remat(lambda layer, x: layer(x))(layer, X) ** 3)

            return nnx.grad(loss)(layer)

        step(layer)
        np.testing.assert_allclose(layer.mean.get_value(), 0.1 * X.mean(0), rtol=1e-5)
        carried = library.BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0))
        scan = nnx.scan(
            lambda layer, x: (layer, layer(x)), in_axes=(nnx.Carry, 0),
            out_axes=(nnx.Carry, 0),
        )  # fmt: skip
        scan(carried, STEPS)
        found.append((carried.mean.get_value(), carried.var.get_value()))
    np.testing.assert_allclose(found[0], [[0.561], [0.729]], rtol=1e-6)
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_nnx_scan_over_layers_stacks_their_statistics():
    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=0)
    def stack(rngs):
        return nj.nnx.BatchNorm(3, momentum=0.9, rngs=rngs)

    layers = stack(nnx.Rngs(0))
    through = nnx.scan(
        lambda x, layer: layer(2 * x + 1), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
    )
    through(X, layers)
    assert layers.mean.get_value().shape == (4, 3)
    # From the second layer on the input is standardized, then doubled and shifted.
    np.testing.assert_allclose(layers.mean.get_value()[1:], 0.1, rtol=1e-5)
    np.testing.assert_allclose(layers.var.get_value()[1:], 0.9 + 0.1 * 4, rtol=1e-4)


def test_nnx_never_leaks_a_tracer():
    """N37: an update that has no place is refused, and the layer stays as it was."""
    layer = nj.nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    lanes = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))
    with pytest.raises(ValueError, match="output was batched"):
        lanes(layer, draw((2, 8, 3)))
    with pytest.raises(TraceContextError, match="different trace level"):
        jax.jit(lambda x: layer(x))(X)
    assert layer.mean.get_value().tolist() == [0, 0, 0]
    layer.eval()  # what changes nothing may be closed over
    expected = X / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(jax.jit(lambda x: layer(x))(X), expected, rtol=1e-6)


def test_nnx_split_merge_and_eval_shape():
    shapes = nnx.eval_shape(lambda: nj.nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    assert shapes.mean.get_value() == jax.ShapeDtypeStruct((3,), jnp.float32)
    layer = nj.nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))
    graph, params, stats = nnx.split(layer, nnx.Param, nnx.BatchStat)
    assert set(params) == {"scale", "bias"}
    assert set(stats) == {"mean", "var"}
    merged = nnx.merge(graph, params, nnx.clone(stats))
    merged(X)
    np.testing.assert_allclose(merged.mean.get_value(), 0.1 * X.mean(0), rtol=1e-5)
    with pytest.raises(ValueError, match="expected 4 leaves, but got 2"):
        nnx.merge(graph, params)


@pytest.mark.skipif(not hasattr(nnx, "view"), reason="a newer Flax has nnx.view")
def test_nnx_view_sets_the_mode():
    layer = nj.nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    frozen = nnx.view(layer, use_running_average=True)
    np.testing.assert_allclose(frozen(X), X / np.sqrt(1 + 1e-5), rtol=1e-6)


def test_nnx_calls_another_promote_dtype_as_flax_does():
    seen = []

    def promote(arrays, *, dtype=None):
        seen.append([dtype, *(None if a is None else a.shape for a in arrays)])
        return tuple(None if a is None else a.astype(jnp.float16) for a in arrays)

    for library in (nj.nnx, nnx):
        for kind in ("BatchNorm", "RMSNorm"):
            layer = make(library, kind, 3, promote_dtype=promote)
            assert layer(X).dtype == jnp.float16
    assert seen[:2] == seen[2:]
