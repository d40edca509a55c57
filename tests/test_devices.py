"""Statistics across devices: one layer on 8 devices is the layer on one."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import FACTOR, wide
from jax.sharding import NamedSharding, PartitionSpec
from meshes import DEVICES, SPLIT, WHOLE, U, close, draw, named, needs_devices
from meshes import mesh as mesh

import normjax as nj

pytestmark = [pytest.mark.jax_defaults, needs_devices]
SPECS = {
    "batch": nj.batch_norm(),
    "ddof": nj.batch_norm(ddof=1, epsilon_placement="outside_sqrt"),
    "rms": nj.batch_norm(divide="rms", center=False, affine=None),
    "centred rms": nj.batch_norm(divide="rms"),
    "l2": nj.batch_norm(divide="l2", center=False),
    "scale only": nj.batch_norm(center=False),
    "centre only": nj.batch_norm(divide="none"),
    "detached": nj.batch_norm(detach="mean"),
    "two_pass": nj.batch_norm(precision=nj.Precision(algorithm="two_pass")),
    "rescaled": nj.batch_norm(precision=nj.Precision(rescale=True)),
    "folded": nj.batch_norm(precision=nj.Precision(apply="folded")),
}
each = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def sharded(mesh, spec: nj.NormSpec, **passed: Any):
    """The layer under ``jax.shard_map``; what is passed is split as x is."""

    def run(params, x, passed):
        return nj.normalize(named(spec), x, params, **passed)

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(WHOLE, SPLIT, SPLIT), out_specs=SPLIT
    )
    return jax.jit(lambda params, x: mapped(params, x, passed))


def lanes(spec: nj.NormSpec, params, x, **passed: Any):
    """The layer under ``jax.vmap`` with an axis name."""

    def split(array):
        return array.reshape(DEVICES, -1, *array.shape[1:])

    def run(x, passed):
        return nj.normalize(named(spec), x, params, **passed)

    y = jax.vmap(run, axis_name="i")(split(x), jax.tree.map(split, passed))
    return y.reshape(x.shape)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@each
def test_value_and_gradients(mesh, spec: nj.NormSpec, offset: float):
    x, bar = draw(offset=offset), draw(seed=1)
    params = nj.init(spec, x.shape)

    def loss(run, params, x):
        return jnp.sum(run(params, x) * bar)

    runs = {
        "one": lambda p, x: nj.normalize(spec, x, p),
        "shard_map": sharded(mesh, spec),
        "vmap": partial(lanes, spec),
    }
    found = {
        name: (
            run(params, x),
            jax.grad(partial(loss, run), argnums=(0, 1))(params, x),
            jax.jvp(partial(run, params), (x,), (bar,))[1],
        )
        for name, run in runs.items()
    }
    for name in ("shard_map", "vmap"):
        close(found[name], found["one"], n=64, kappa=offset)


def uneven(kind: str) -> jax.Array:
    """Rows that are valid: each shard has another number, or one has none."""
    rows = np.random.default_rng(2).random((64, 1)) < 0.6
    if kind == "empty":
        rows[8:16] = False
    if kind == "one shard":
        rows[8:] = False
    if kind == "none":
        rows[:] = False
    return jnp.asarray(rows)


@pytest.mark.parametrize("kind", ["uneven", "empty", "one shard", "none"])
@pytest.mark.parametrize("name", ["batch", "centred rms", "scale only"])
def test_masks_differ_between_shards(mesh, name: str, kind: str):
    """N48, N49: counts weigh the shards, and an empty one is none."""
    spec = SPECS[name].replace(masked_output="zero")
    x, mask, params = draw(offset=3.0), uneven(kind), nj.init(SPECS[name], (64, 6))
    x = jnp.where(mask, x, jnp.nan)
    bar = draw(seed=1)

    def both(run):
        y, pull = jax.vjp(lambda x: run(params, x), x)
        return y, pull(bar)[0]

    expected = both(lambda p, x: nj.normalize(spec, x, p, mask=mask))
    for found in (
        both(sharded(mesh, spec, mask=mask)),
        both(lambda p, x: lanes(spec, p, x, mask=mask)),
    ):
        assert np.isfinite(found[0]).all()
        close(found, expected, n=64, kappa=3.0)


def test_uneven_shards_have_the_right_numbers():
    """N48: A = [0, 2], B = six 10s: mean 7.75, variance 15.4375."""
    x = jnp.asarray([[0.0], [2.0], *[[0.0]] * 4, *[[10.0]] * 6])
    mask = jnp.asarray([[True]] * 2 + [[False]] * 4 + [[True]] * 6)
    spec = named(nj.batch_norm())

    def run(x, mask):
        return nj.moments(spec, x, mask)

    found = jax.vmap(run, axis_name="i")(x.reshape(2, 6, 1), mask.reshape(2, 6, 1))
    np.testing.assert_allclose(found.mean, 7.75, rtol=4 * U)
    np.testing.assert_allclose(found.variance(), 15.4375, rtol=4 * U)
    np.testing.assert_array_equal(found.count, 8)


def test_the_mean_travels_as_a_pair(mesh):
    """N04 over devices: at 2²⁴ one float32 cannot hold the mean."""
    x = jnp.asarray(2.0**24 + 2 * np.arange(16).reshape(16, 1), jnp.float32)
    spec = nj.batch_norm(affine=None)
    exact = np.arange(16) - 7.5
    exact = exact / np.sqrt(np.mean(exact**2) + 1e-5 / 4)
    found = wide(sharded(mesh, spec)({}, x))[:, 0]
    np.testing.assert_allclose(found, exact, rtol=0, atol=FACTOR * U * 16)


def test_layers_whose_features_are_split(mesh):
    """Layer norm with channels over devices: the parameters are split with them."""
    spec, x, bar = nj.layer_norm(), draw((4, 64), 1e3), draw((4, 64), seed=1)
    params = {"scale": draw((64,), 1.0, 3), "bias": draw((64,), 0.0, 4)}
    columns = PartitionSpec(None, "i")
    mapped = jax.shard_map(
        lambda p, x: nj.normalize(named(spec), x, p),
        mesh=mesh,
        in_specs=(SPLIT, columns),
        out_specs=columns,
    )

    def both(run):
        y, pull = jax.vjp(run, params, x)
        return y, pull(bar)

    found = both(jax.jit(mapped))
    close(found, both(lambda p, x: nj.normalize(spec, x, p)), n=64, kappa=1e3)


def test_two_axes_at_once():
    kind = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("i", "j"), axis_types=kind)
    spec, x = nj.batch_norm(affine=None), draw(offset=10.0)
    many = spec.replace(axis_names=("i", "j"))
    both = PartitionSpec(("i", "j"))
    run = jax.shard_map(
        partial(nj.normalize, many), mesh=mesh, in_specs=both, out_specs=both
    )
    close(jax.jit(run)(x), nj.normalize(spec, x), n=64, kappa=10.0)
    half = spec.replace(axis_names=("i",))
    run = jax.shard_map(
        partial(nj.normalize, half), mesh=mesh, in_specs=both, out_specs=both
    )
    parts = x.reshape(2, 4, 8, 6).transpose(1, 0, 2, 3).reshape(4, 16, 6)
    expected = jax.vmap(partial(nj.normalize, spec))(parts)
    expected = expected.reshape(4, 2, 8, 6).transpose(1, 0, 2, 3).reshape(64, 6)
    close(jax.jit(run)(x), expected, n=16, kappa=10.0)


def collectives(compiled) -> list[str]:
    """Every collective of a compiled program, as its shape and kind."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf"= (\S+|\(.*?\)) (?:{kinds})(?:-start)?\(", compiled.as_text())


@each
def test_one_collective_forward_and_one_more_backward(mesh, spec: nj.NormSpec):
    """Counted in the compiled program, with what it moves.

    A rescaled group needs its largest entry first: one more.
    """
    x, bar = draw(), draw(seed=1)
    params = nj.init(spec, x.shape)
    extra = 1 if spec.precision.rescale else 0

    def back(params, x, bar):
        y, pull = jax.vjp(lambda x: nj.normalize(named(spec), x, params), x)
        return y, pull(bar)[0]

    step = jax.shard_map(
        back, mesh=mesh, in_specs=(WHOLE, SPLIT, SPLIT), out_specs=(SPLIT, SPLIT)
    )
    forward = collectives(sharded(mesh, spec).lower(params, x).compile())
    both = collectives(jax.jit(step).lower(params, x, bar).compile())
    print(forward, both)
    assert len(forward) == 1 + extra
    # Without a mean the sums on the way back read x alone: XLA puts both in one.
    together = 0 if spec.center else 1
    assert len(both) == 2 - together + extra


@pytest.mark.parametrize(
    "spec",
    [*SPECS.values(), nj.layer_norm(), nj.rms_norm(), nj.NormSpec("[b] c", center=False,
     divide="none")],
)  # fmt: skip
def test_without_a_named_axis_each_device_is_by_itself(mesh, spec: nj.NormSpec):
    """Under shard_map, in both modes: as one shard after another."""
    x, bar = draw(), draw(seed=1)

    def both(x, bar):
        y, pull = jax.vjp(partial(nj.normalize, spec), x)
        return y, pull(bar)[0], jax.jvp(partial(nj.normalize, spec), (x,), (bar,))[1]

    mapped = jax.shard_map(both, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
    expected = jax.vmap(both)(x.reshape(8, 8, 6), bar.reshape(8, 8, 6))
    expected = [array.reshape(64, 6) for array in expected]
    close(list(jax.jit(mapped)(x, bar)), expected, n=8)


def test_given_statistics_need_no_axis():
    spec, x = named(nj.batch_norm()), draw()
    given = nj.Statistics(jnp.zeros(6), jnp.ones(6))
    found = nj.normalize(spec, x, moments=given)
    np.testing.assert_array_equal(
        found, nj.normalize(nj.batch_norm(), x, moments=given)
    )


@pytest.mark.parametrize("preset", [nj.batch_norm, nj.rms_norm])
def test_the_jacobian_on_each_device(preset):
    """mv, T.mv and the spectrum of a whole group, of which each lane has a part."""
    spec = preset(pattern="[b] c", epsilon=0.1)
    rng = np.random.default_rng(0)
    x, t = (jnp.asarray(rng.normal(m, 1, (4, 5, 3)), jnp.float32) for m in (3, 2))

    def part(x, t):
        J = nj.input_jacobian(named(spec), x)
        return J.mv(t), J.T.mv(t), nj.spectrum(named(spec), x)

    moved, pulled, found = jax.jit(jax.vmap(part, axis_name="i"))(x, t)
    J = nj.input_jacobian(spec, x.reshape(20, 3))
    whole = nj.spectrum(spec, x.reshape(20, 3))
    bound = 64 * 2.0**-24 * 20 * float(jnp.linalg.norm(t))
    for ours, right in ((moved, J.mv), (pulled, J.T.mv)):
        gap = ours.reshape(20, 3) - right(t.reshape(20, 3))
        assert float(jnp.linalg.norm(gap)) <= bound
    for name in ("offset", "radial", "tangential", "count"):
        ours, right = getattr(found, name), getattr(whole, name)
        np.testing.assert_allclose(ours[2], right, rtol=64 * 2.0**-24 * 20)
    assert found.multiplicities == whole.multiplicities


@pytest.mark.parametrize(
    "call",
    [
        nj.influence,
        lambda spec, x, **given: nj.input_jacobian(spec, x, **given).as_matrix(),
        lambda spec, x, **given: nj.eigenvalues(nj.input_jacobian(spec, x, **given)),
    ],
)
def test_what_needs_the_whole_group_is_refused(call):
    """One device has a part of it; given statistics couple nothing."""
    spec, x = named(nj.batch_norm()), draw((2, 4, 3))
    with pytest.raises(ValueError, match=r"axis_names"):
        jax.vmap(partial(call, spec), axis_name="i")(x)
    given = nj.Statistics(jnp.zeros(3), jnp.ones(3))
    call(spec, x[0], moments=given)


@pytest.mark.parametrize("call", [nj.normalize, nj.moments])
def test_an_axis_that_is_not_bound_is_one_clear_line(call):
    with pytest.raises(ValueError, match="axis_names has 'i', which is not bound here"):
        call(named(nj.batch_norm()), draw())


def test_a_mask_of_another_shard_shape_is_refused(mesh):
    """The mask is judged against the shard that it meets."""
    spec, x = named(nj.batch_norm()), draw()
    mask = jnp.ones((5, 1), bool)
    run = jax.shard_map(
        lambda x: nj.normalize(spec, x, mask=mask),
        mesh=mesh,
        in_specs=SPLIT,
        out_specs=SPLIT,
    )
    with pytest.raises(ValueError, match=r"mask has shape \(5, 1\), x has \(8, 6\)"):
        run(x)


@pytest.mark.parametrize("name", ["batch", "rms", "scale only"])
def test_plain_jit_on_a_sharded_batch(mesh, name: str):
    """XLA splits the program by itself; the numbers are those of one device."""
    spec, x, bar = SPECS[name], draw(offset=100.0), draw(seed=1)
    params = nj.init(spec, x.shape)

    def both(params, x, bar):
        y, pull = jax.vjp(lambda p, x: nj.normalize(spec, x, p), params, x)
        return y, pull(bar)

    split = NamedSharding(mesh, SPLIT)
    arrays = jax.device_put((x, bar), split)
    compiled = jax.jit(both).lower(params, *arrays).compile()
    print(collectives(compiled))
    close(compiled(params, *arrays), both(params, x, bar), n=64, kappa=100.0)
