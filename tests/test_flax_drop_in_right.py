"""Where Flax's own number is wrong: which, why, and ours held to float64."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_layers import KEY, KINDS, OURS, THEIRS, draw, make, pure, slow

pytestmark = pytest.mark.jax_defaults

PLAIN = {"scale_init": jax.nn.initializers.ones, "bias_init": jax.nn.initializers.zeros}
OFFSET = [1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3]
# Each kind with the group [1e4 .. 1e4 + 3]: shape, arguments, epsilon.
GROUPS: dict[str, tuple[tuple[int, ...], dict[str, Any], float]] = {
    "BatchNorm": ((4, 1), {}, 1e-5),
    "LayerNorm": ((1, 4), {}, 1e-6),
    "GroupNorm": ((1, 2, 2), {"num_groups": 1}, 1e-6),
    "InstanceNorm": ((1, 4, 1), {}, 1e-6),
}


def plain(library: Any, kind: str, features: int | None = None, **arguments: Any):
    known = {k: v for k, v in PLAIN.items() if (kind, k) != ("RMSNorm", "bias_init")}
    return make(library, kind, features, **{**known, **arguments})


def output(layer: Any, x: jax.Array, **call: Any) -> tuple[jax.Array, dict[str, Any]]:
    function, params, _ = pure(layer, x, **call)
    return jax.jit(function)(params, x)


@pytest.mark.parametrize("framework", THEIRS)
@pytest.mark.parametrize("kind", GROUPS)
def test_a_large_offset(framework, kind):
    """N01, N73: E[x²] − E[x]² rounds to 0 at a mean of 1e4; ±1500 and slopes of 1e8."""
    shape, arguments, epsilon = GROUPS[kind]
    x = jnp.array(OFFSET, jnp.float32).reshape(shape)
    found = []
    for library in (THEIRS, OURS):
        layer = plain(library[framework], kind, shape[-1], **arguments)
        function, params, _ = pure(layer, x)

        def first(x, function=function, params=params):
            y = function(params, x)[0].ravel()
            return y[0], y

        slope, y = jax.jit(jax.grad(first, has_aux=True))(x)
        found.append((y, slope.ravel()))
    (theirs, steep), (mine, slope) = found
    assert np.abs(theirs).max() > 400
    assert np.abs(steep).max() > 1e6
    centred = np.arange(4) - 1.5
    s = np.sqrt(1.25 + epsilon)
    jacobian = (np.eye(4) - 0.25 - np.outer(centred, centred) / 4 / s**2) / s
    np.testing.assert_allclose(mine, centred / s, rtol=4 * 2.0**-23)
    np.testing.assert_allclose(slope, jacobian[0], rtol=0, atol=8 * 2.0**-23)


@pytest.mark.parametrize("framework", THEIRS)
def test_squares_that_leave_float16(framework):
    """N06: without float32 reductions 300² is infinite, and the output 0."""
    x = jnp.array([[300, -300, 300, 300]], jnp.float16)
    mine, _ = output(plain(OURS[framework], "RMSNorm", 4), x)
    np.testing.assert_array_equal(mine, [[1, -1, 1, 1]])
    if framework == "linen":
        narrow = {"force_float32_reductions": False}
        theirs, _ = output(plain(THEIRS[framework], "RMSNorm", **narrow), x)
        mine, _ = output(plain(OURS[framework], "RMSNorm", **narrow), x)
        np.testing.assert_array_equal(theirs, [[0, 0, 0, 0]])
        np.testing.assert_array_equal(mine, [[1, -1, 1, 1]])


def test_half_precision_statistics_that_never_move():
    """N13: 100 + 0.01 rounds to 100 in bfloat16; after 1000 updates 101 is right."""
    narrow = {"force_float32_reductions": False, "param_dtype": jnp.bfloat16}
    x = jnp.full((4, 1), 101, jnp.bfloat16)
    found = []
    for library in (THEIRS, OURS):
        layer = plain(library["linen"], "BatchNorm", **narrow)
        variables: Any = layer.init(KEY, x)
        stats = dict(variables["batch_stats"])
        stats["mean"] = jnp.full_like(stats["mean"], 100)

        def step(_, stats, layer=layer, variables=variables):
            held = {**variables, "batch_stats": stats}
            changed = layer.apply(held, x, mutable=["batch_stats"])[1]["batch_stats"]
            return jax.tree.map(lambda new, old: new.astype(old.dtype), changed, stats)

        found.append(float(jax.lax.fori_loop(0, 1000, step, stats)["mean"][0]))
    assert found[0] == 100.0
    # An update smaller than u · 100 is lost: float32 stops that far from 101.
    assert found[1] == pytest.approx(100.99996, abs=100 * 2.0**-24 / 0.01)


def test_nnx_rounds_its_input_to_dtype_first():
    """1000 to 1003 are one number in bfloat16; the output alone is to be narrow."""
    x = jnp.array([[1000.0, 1001.0, 1002.0, 1003.0]], jnp.float32)
    theirs = plain(THEIRS["nnx"], "LayerNorm", 4, dtype=jnp.bfloat16)(x)
    mine = plain(OURS["nnx"], "LayerNorm", 4, dtype=jnp.bfloat16)(x)
    assert (
        np.abs(np.asarray(theirs, np.float64) - [[-1.34, -0.45, 0.45, 1.34]]).max() > 1
    )
    assert mine.dtype == jnp.bfloat16
    right = (np.arange(4) - 1.5)[None] / np.sqrt(1.25 + 1e-6)
    np.testing.assert_allclose(np.asarray(mine, np.float64), right, rtol=2.0**-8)


def test_nnx_rounds_its_stored_statistics_to_dtype():
    """A stored mean of 1001 becomes 1000 in bfloat16."""
    x, found = jnp.array([[1002.0]], jnp.float32), []
    for library in (THEIRS, OURS):
        layer = plain(library["nnx"], "BatchNorm", 1, dtype=jnp.bfloat16)
        layer.mean.set_value(jnp.array([1001.0]))
        found.append(float(layer(x, use_running_average=True)[0, 0]))
    assert abs(found[0] - 1) > 0.5
    assert found[1] == pytest.approx(1, rel=2.0**-8)


@pytest.mark.parametrize("framework", THEIRS)
def test_masks_of_different_counts_on_two_devices(framework):
    """N48, N49: means of means, and NaN from a device without a valid entry."""
    x = jnp.array([[0.0, 2, 0, 0, 0, 0], [10, 10, 10, 10, 10, 10]])[..., None]
    mask = jnp.arange(6)[None, :, None] < jnp.array([2, 6])[:, None, None]
    empty = mask & jnp.array([False, True])[:, None, None]
    cases = (("theirs", THEIRS, mask), ("mine", OURS, mask), ("theirs, empty", THEIRS,
             empty), ("mine, empty", OURS, empty))  # fmt: skip
    found = {}
    for name, library, valid in cases:
        layer = plain(library[framework], "BatchNorm", 1, momentum=0.0, axis_name="d")
        if framework == "linen":
            variables: Any = layer.init(KEY, x[0])

            def device(x, mask, layer=layer, variables=variables):
                return layer.apply(variables, x, mask=mask, mutable=["batch_stats"])[1]

            devices = jax.jit(jax.vmap(device, axis_name="d"))
            changed = devices(x, valid)["batch_stats"]
            stats = [float(changed[n].ravel()[0]) for n in ("mean", "var")]
        else:
            mapped = nnx.vmap(
                lambda layer, x, mask: layer(x, mask=mask),
                in_axes=(None, 0, 0),
                axis_name="d",
            )
            nnx.jit(mapped)(layer, x, valid)
            stats = [float(each.get_value()[0]) for each in (layer.mean, layer.var)]
        found[name] = stats
    assert found["theirs"] == [5.5, 20.75]
    assert found["mine"] == [7.75, 15.4375]
    assert np.isnan(found["theirs, empty"]).all()
    assert found["mine, empty"] == [10.0, 0.0]


@pytest.mark.parametrize("framework", THEIRS)
def test_nothing_valid_and_an_empty_batch(framework):
    """N28: NaN in the stored statistics for good; ours stay."""
    x = jnp.ones((4, 2))
    cases = [(x[:0], {}), (x, {"mask": jnp.zeros((4, 1), bool)})]
    for given, call in cases:
        with np.errstate(invalid="ignore"):
            _, theirs = output(plain(THEIRS[framework], "BatchNorm", 2), given, **call)
        y, mine = output(plain(OURS[framework], "BatchNorm", 2), given, **call)
        assert np.isnan(theirs["mean"]).all()
        assert mine["mean"].tolist() == [0, 0]
        assert mine["var"].tolist() == [1, 1]
        np.testing.assert_array_equal(y, jnp.zeros_like(given))


@pytest.mark.parametrize("framework", THEIRS)
def test_nan_under_the_mask_and_the_gradient_of_what_is_valid(framework):
    """N45: 0 · NaN reaches every gradient."""
    x = jnp.array([[1.0, 2.0, 4.0, jnp.nan]])
    mask = jnp.array([True, True, True, False])
    slopes = []
    for library in (THEIRS, OURS):
        layer = plain(library[framework], "LayerNorm", 4, epsilon=1e-5)
        function, params, _ = pure(layer, x, mask=mask)

        def loss(x, function=function, params=params):
            return jnp.sum(function(params, x)[0][0, :3] ** 3)

        slopes.append(jax.grad(loss)(x)[0])
    assert np.isnan(slopes[0]).all()
    expected = [1.3253782, -1.9880784, 0.6626999, 0]
    np.testing.assert_allclose(slopes[1], expected, rtol=0, atol=64 * 2.0**-24)


@pytest.mark.parametrize("framework", THEIRS)
def test_group_norm_over_axes_that_flax_mixes_up(framework):
    """nnx repeats along axis 1; linen does not sort (1, 2, −1) in nine axes."""
    if framework == "nnx":
        x, axes = draw((4, 2, 6)), (-1,)
        theirs, _ = output(
            plain(nnx, "GroupNorm", 6, num_groups=3, reduction_axes=axes), x
        )
        view = np.asarray(x, np.float64).reshape(4, 2, 3, 2)
    else:
        x, axes = draw((2, 3, 2, 1, 1, 1, 1, 1, 6)), (1, 2, -1)
        with pytest.raises(ValueError, match="must include the final dimension"):
            output(plain(THEIRS[framework], "GroupNorm", num_groups=3,
                         reduction_axes=axes), x)  # fmt: skip
        theirs = jnp.zeros_like(x)
        view = np.asarray(x, np.float64).reshape(2, 6, 3, 2)
        view = view.reshape(2, 3, 2, 1, 1, 1, 1, 1, 3, 2)
    layer = plain(OURS[framework], "GroupNorm", 6, num_groups=3, reduction_axes=axes)
    mine, _ = output(layer, x)
    reduced = (-1,) if framework == "nnx" else (1, 2, -1)
    mean, variance = (f(view, axis=reduced, keepdims=True) for f in (np.mean, np.var))
    right = ((view - mean) / np.sqrt(variance + 1e-6)).reshape(x.shape)
    # Groups of 2 entries: κ is up to 100.
    np.testing.assert_allclose(mine, right, rtol=0, atol=64 * 100 * 2.0**-24)
    assert np.abs(np.asarray(theirs) - right).max() > 0.1


def message(framework: str, kind: str, x, call: Any = None, **arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        output(plain(OURS[framework], kind, 6, **arguments), x, **(call or {}))
    return str(caught.value)


@pytest.mark.parametrize("framework", THEIRS)
def test_what_does_not_fit_is_one_line_that_says_so(framework):
    told = partial(message, framework)
    x = jnp.ones((4, 3, 6))
    assert told("LayerNorm", x, reduction_axes=-4) == (
        "reduction_axes is -4, and the input has 3 axes: expected numbers from -3 to 2"
    )
    assert told("InstanceNorm", x, feature_axes=(0, 2)) == (
        "feature_axes has the leading axis, which holds the examples of an "
        "InstanceNorm: name others"
    )
    text = told("RMSNorm", x, {"mask": jnp.ones((4, 3), bool)})
    assert text == (
        "mask has shape (4, 3), x has (4, 3, 6): expected one that broadcasts to it "
        "from the right, for instance mask[..., None] without channels"
    )
    text = told("LayerNorm", x.astype(jnp.complex64), dtype=jnp.float32)
    assert text.startswith("x has dtype complex64, expected a float dtype")
    assert re.match(
        "the axes of a group norm are '.*', expected the last one among the reduced",
        told("GroupNorm", x, num_groups=2, reduction_axes=(1,)),
    )


@pytest.mark.parametrize("kind", slow(KINDS, "BatchNorm", "RMSNorm"))
def test_groups_of_devices_are_refused_where_they_would_matter(kind):
    arguments: Any = {"num_groups": 2} if kind == "GroupNorm" else {}
    layer = plain(
        OURS["linen"], kind, axis_name="d", axis_index_groups=[[0], [1]], **arguments
    )
    x = jnp.ones((2, 4, 6))
    variables = layer.init(KEY, x[0])
    lane = partial(layer.apply, variables, mutable=["batch_stats"])
    text = "axis_index_groups is .*, expected None: .* the whole of axis_name. Split"
    with pytest.raises(ValueError, match=text):
        jax.vmap(lane, axis_name="d")(x)
    if kind == "BatchNorm":
        layer = layer.clone(use_running_average=True)
        assert layer.apply(variables, x).shape == x.shape


def test_group_counts_that_do_not_divide():
    x = jnp.ones((4, 3, 6))
    assert "g=4 does not divide dimension 2 of size 6" in message(
        "linen", "GroupNorm", x, num_groups=4
    )
    assert "say num_groups=None beside group_size" in message(
        "linen", "GroupNorm", x, group_size=3
    )
    assert "Number of groups (4) does not divide" in message(
        "nnx", "GroupNorm", x, num_groups=4
    )


def test_a_mode_that_is_given_nowhere_or_twice():
    x = jnp.ones((4, 6))
    nowhere = {"use_running_average": None}
    assert "use_running_average is given nowhere" in message(
        "nnx", "BatchNorm", x, **nowhere
    )
    assert "must be passed" in message("linen", "BatchNorm", x, **nowhere)
    twice = {"use_running_average": True}
    assert "just once" in message("linen", "BatchNorm", x, twice, **twice)
