"""The drop-ins against Flax's own layers, on inputs where those are right."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_layers import (
    EVERY,
    KEY,
    KINDS,
    OURS,
    SHAPE,
    THEIRS,
    called,
    draw,
    features,
    make,
    slow,
)

pytestmark = pytest.mark.jax_defaults

# Flax's one-pass variance errs by κ² u log₂ n. In groups of 3 or 4 entries κ is up to
# 20; x̂, y and the gradients of Σ sin(y) are all of size 1 to 10.
U = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def close(found: Any, expected: Any, dtype: str = "float32", factor: float = 64 * 64):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        wide = [np.asarray(each, np.float64) for each in (mine, theirs)]
        slack = factor * U[dtype] * max(1.0, np.abs(wide[1]).max(initial=0) / 10)
        np.testing.assert_allclose(*wide, rtol=0, atol=slack)


def both(framework: str, kind: str, arguments: dict[str, Any], x, **call):
    number = None if framework == "linen" else features(kind, arguments, x.shape)
    for library in (OURS, THEIRS):
        layer = make(library[framework], kind, number, **arguments)
        yield called(layer, x, **call)


@pytest.mark.parametrize(("framework", "kind", "arguments"), EVERY)
def test_variables_values_gradients_and_statistics_are_those_of_flax(
    framework, kind, arguments
):
    mine, theirs = both(framework, kind, arguments, draw())
    # The same keys in the same order: random initializers draw the same numbers.
    jax.tree.map(np.testing.assert_array_equal, mine["params"], theirs["params"])
    jax.tree.map(np.testing.assert_array_equal, mine["kept"], theirs["kept"])
    close(mine["y"], theirs["y"])
    close(mine["stats"], theirs["stats"])
    close(mine["gradients"], theirs["gradients"])
    if kind == "BatchNorm":
        assert set(mine["stats"]) == {"mean", "var"}


@pytest.mark.parametrize("framework", THEIRS)
@pytest.mark.parametrize("kind", KINDS)
def test_constructor_and_call_take_what_flax_takes(framework, kind):
    mine, theirs = getattr(OURS[framework], kind), getattr(THEIRS[framework], kind)
    assert issubclass(mine, theirs)
    assert str(inspect.signature(mine)) == str(inspect.signature(theirs))
    words = [inspect.signature(each.__call__).parameters for each in (mine, theirs)]
    assert [p.kind for p in words[0].values()] == [p.kind for p in words[1].values()]
    assert list(words[0]) == list(words[1])


DTYPES = [
    ("float32", "bfloat16", "float32"),
    ("bfloat16", None, "float32"),
    ("float16", None, "bfloat16"),
    ("int32", None, "float32"),
    ("float32", None, "bfloat16"),
    ("bfloat16", None, "bfloat16"),
    ("float16", "float16", "float32"),
    ("int32", None, "bfloat16"),
    ("int32", "bfloat16", "float32"),
]


@pytest.mark.parametrize(("given", "dtype", "param"), slow(DTYPES, *DTYPES[:4]))
@pytest.mark.parametrize(
    ("framework", "kind"), [("linen", "LayerNorm"), ("nnx", "BatchNorm")]
)
def test_dtypes_promote_as_in_flax(framework, kind, given, dtype, param):
    x = draw((6, 4), given)
    arguments = {"dtype": dtype and jnp.dtype(dtype), "param_dtype": jnp.dtype(param)}
    number = None if framework == "linen" else 4
    outputs = []
    for library in (OURS, THEIRS):
        layer = make(library[framework], kind, number, **arguments)
        outputs.append(called(layer, x, gradients=False))
    mine, theirs = outputs
    # nnx rounds what it is given to dtype first, and loses three digits of it.
    narrow = min(U, key=lambda name: -U[name] if name in (given, dtype, param) else 1)
    jax.tree.map(np.testing.assert_array_equal, mine["params"], theirs["params"])
    factor = 512 if narrow == "float32" else 16
    close(mine["y"], theirs["y"], narrow, factor)
    close(mine["stats"], theirs["stats"], narrow, factor)


@pytest.mark.parametrize("dtype", slow([None, "float32", "float64"], None))
def test_float64_promotes_as_in_flax(dtype):
    """The stored statistics too: they are float64 from the first update on."""
    with jax.enable_x64(True):
        for given in ("float64", "float32"):
            x = draw((6, 4), given)
            dtypes = {"dtype": dtype and jnp.dtype(dtype), "param_dtype": jnp.float64}
            mine, theirs = both("linen", "BatchNorm", dtypes, x, gradients=False)
            # Flax takes the statistics of a float32 input in float32.
            narrow = dtype == "float32" or (dtype is None and given == "float32")
            close(mine["y"], theirs["y"], factor=64 if narrow else 1e-6)
            # Flax multiplies the first statistics, which are float32, in float32.
            close(mine["stats"], theirs["stats"], factor=64 if narrow else 4)


@pytest.mark.parametrize("framework", THEIRS)
@pytest.mark.parametrize("arguments", [{}, {"use_scale": False, "use_bias": False}])
@pytest.mark.parametrize("given", slow(["bfloat16", "int32"], "bfloat16"))
def test_dtypes_promote_as_in_flax_without_parameters(framework, arguments, given):
    """nnx promotes to the stored statistics of a batch norm too, linen does not."""
    x = draw((6, 4), given)
    mine, theirs = both(framework, "BatchNorm", arguments, x, gradients=False)
    assert mine["y"].dtype == theirs["y"].dtype


MASKS = [("linen", kind, SHAPE) for kind in KINDS] + [
    ("linen", "LayerNorm", (5, 1, 1, 6)),
    ("linen", "RMSNorm", (3, 6)),
    ("nnx", "BatchNorm", (4, 3, 1)),
]


@pytest.mark.parametrize(
    ("framework", "kind", "shape"), slow(MASKS, MASKS[0], MASKS[3], *MASKS[-2:])
)
def test_a_mask_broadcasts_from_the_right_as_in_flax(framework, kind, shape):
    mask = jnp.asarray(np.random.default_rng(1).random(shape) < 0.8)
    arguments = {"num_groups": 1} if kind == "GroupNorm" else {}
    mine, theirs = both(framework, kind, arguments, draw(), mask=mask)
    full = np.broadcast_to(mask, SHAPE)
    groups = {
        "BatchNorm": (0, 1, 2), "LayerNorm": 3, "RMSNorm": 3, "GroupNorm": (1, 2, 3),
        "InstanceNorm": (1, 2),
    }[kind]  # fmt: skip
    valid = np.broadcast_to(full.any(groups, keepdims=True), SHAPE)
    close(jnp.where(valid, mine["y"], 0), jnp.where(valid, theirs["y"], 0))
    if valid.all():
        close(mine["gradients"], theirs["gradients"])
        close(mine["stats"], theirs["stats"])


@pytest.mark.parametrize("framework", THEIRS)
def test_inference_is_that_of_flax(framework):
    x = draw((6, 4))
    found = []
    for library in (OURS, THEIRS):
        layer = make(library[framework], "BatchNorm", 4, use_running_average=True)
        mean, var = jnp.arange(4.0), 1.0 + jnp.arange(4.0)
        if framework == "linen":
            variables: Any = layer.init(KEY, x)
            stats = {"mean": mean, "var": var}
            y, changed = layer.apply(
                {**variables, "batch_stats": stats}, x, mutable=["batch_stats"]
            )
            jax.tree.map(np.testing.assert_array_equal, changed["batch_stats"], stats)
        else:
            layer.mean.set_value(mean)
            layer.var.set_value(var)
            y = layer(x)
            np.testing.assert_array_equal(layer.mean.get_value(), mean)
        found.append(y)
    close(*found)


@pytest.mark.parametrize(
    ("framework", "kind"),
    slow(
        [("linen", "LayerNorm"), ("nnx", "GroupNorm"), ("linen", "InstanceNorm")],
        ("nnx", "GroupNorm"),
        ("linen", "InstanceNorm"),
    ),
)
def test_other_ranks_are_as_in_flax(framework, kind):
    """Positions from the front may name what positions from the end name."""
    arguments = {"num_groups": 2} if kind == "GroupNorm" else {}
    for shape in ((5, 6), (2, 3, 2, 2, 6)):
        mine, theirs = both(framework, kind, arguments, draw(shape), gradients=False)
        close(mine["y"], theirs["y"])


@pytest.mark.parametrize("framework", THEIRS)
def test_an_axis_of_vmap_is_a_batch_as_in_flax(framework):
    """Each lane is one example: locally there is nothing to reduce."""
    x = draw((8, 6))
    found = []
    for library in (OURS, THEIRS):
        layer = make(library[framework], "BatchNorm", 6, axis_name="lanes")
        if framework == "linen":
            variables: Any = layer.init(KEY, x[0])

            def lane(x, layer=layer, variables=variables):
                return layer.apply(variables, x, mutable=["batch_stats"])

            mapped = jax.vmap(lane, axis_name="lanes", out_axes=(0, None))
            y, changed = jax.jit(mapped)(x)
            found.append((y, dict(changed["batch_stats"])))
        else:
            mapped = nnx.vmap(
                lambda layer, x: layer(x), in_axes=(None, 0), axis_name="lanes"
            )
            y = nnx.jit(mapped)(layer, x)
            found.append((y, nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat))))
    close(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_of_partitioned_linen_parameters_stays(kind):
    scale = flax.linen.with_partitioning(jax.nn.initializers.ones, ("model",))
    arguments = {"num_groups": 2} if kind == "GroupNorm" else {}
    specs = []
    for library in (OURS, THEIRS):
        layer = getattr(library["linen"], kind)(scale_init=scale, **arguments)
        call = {"use_running_average": False} if kind == "BatchNorm" else {}
        shapes = jax.eval_shape(partial(layer.init, **call), KEY, draw())
        specs.append(flax.linen.get_partition_spec(shapes))
    assert specs[0] == specs[1]
    assert specs[0]["params"]["scale"] == jax.sharding.PartitionSpec("model")


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_of_partitioned_nnx_parameters_stays(kind):
    arguments: Any = {"num_groups": 2} if kind == "GroupNorm" else {}
    scale = nnx.with_partitioning(jax.nn.initializers.ones, ("model",))
    specs = []
    axes = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=axes)):
        for library in (OURS, THEIRS):
            layer = getattr(library["nnx"], kind)(
                6, scale_init=scale, **arguments, rngs=nnx.Rngs(0)
            )
            specs.append(nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer))))
    assert specs[0] == specs[1]
    assert specs[0]["scale"] == jax.sharding.PartitionSpec("model")
