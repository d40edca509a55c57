"""PyTorch's layers against their conventions, on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peers import batches, check_layer, check_running, distance, right

import normjax as nj

torch = pytest.importorskip("torch", reason="PyTorch is not installed: TORCH=1")
pytestmark = pytest.mark.jax_defaults

CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "batch 1d": ("BatchNorm1d", {"num_features": 6}, (10, 6)),
    "batch 1d, positions": ("BatchNorm1d", {"num_features": 6}, (5, 6, 4)),
    "batch 2d": ("BatchNorm2d", {"num_features": 6, "eps": 1e-3}, (4, 6, 3, 3)),
    "batch 3d": ("BatchNorm3d", {"num_features": 3}, (3, 3, 2, 3, 2)),
    "batch, no parameters": (
        "BatchNorm2d", {"num_features": 6, "affine": False}, (4, 6, 3, 3),
    ),
    "batch, nothing stored": (
        "BatchNorm2d", {"num_features": 6, "track_running_stats": False}, (4, 6, 3, 3),
    ),
    "layer": ("LayerNorm", {"normalized_shape": 6}, (5, 4, 6)),
    "layer, three axes": ("LayerNorm", {"normalized_shape": (4, 3, 6)}, (5, 4, 3, 6)),
    "layer, no bias": ("LayerNorm", {"normalized_shape": (6,), "bias": False}, (5, 6)),
    "layer, no parameters": (
        "LayerNorm", {"normalized_shape": 6, "elementwise_affine": False}, (5, 6),
    ),
    "rms": ("RMSNorm", {"normalized_shape": 6, "eps": 2.0**-52}, (5, 4, 6)),
    "rms, two axes": ("RMSNorm", {"normalized_shape": (4, 6), "eps": 0.1}, (5, 4, 6)),
    "rms, no parameters": (
        "RMSNorm",
        {"normalized_shape": 6, "eps": 0.1, "elementwise_affine": False},
        (5, 6),
    ),
    "group": ("GroupNorm", {"num_groups": 3, "num_channels": 6}, (5, 6, 4, 2)),
    "group, no parameters": (
        "GroupNorm", {"num_groups": 2, "num_channels": 6, "affine": False}, (5, 6, 4),
    ),
    "instance 1d": ("InstanceNorm1d", {"num_features": 3}, (5, 3, 7)),
    "instance 2d": (
        "InstanceNorm2d", {"num_features": 3, "affine": True}, (5, 3, 4, 2),
    ),
    "instance 3d": ("InstanceNorm3d", {"num_features": 3}, (5, 3, 2, 3, 2)),
}  # fmt: skip
WORDS = {"scale": "weight", "bias": "bias"}


def made(name: str, arguments: dict[str, Any], **more: Any) -> Any:
    return getattr(torch.nn, name)(**arguments, **more)


def spec_of(name: str, arguments: dict[str, Any]) -> nj.NormSpec:
    return nj.interop.convention(f"torch.nn.{name}", **arguments)


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients(case: str):
    name, arguments, shape = CASES[case]

    def layer(x, params, weights):
        module = made(name, arguments, dtype=torch.float64)
        with torch.no_grad():
            for word, value in params.items():
                getattr(module, WORDS[word]).copy_(torch.tensor(value))
        given = torch.tensor(x, requires_grad=True)
        y = module(given)
        y.backward(torch.tensor(weights))
        by_params = {w: getattr(module, WORDS[w]).grad.numpy() for w in params}
        held = {
            word for word in WORDS if getattr(module, WORDS[word], None) is not None
        }
        assert held == set(params)
        return y.detach().numpy(), given.grad.numpy(), by_params

    with jax.enable_x64(True):
        check_layer(spec_of(name, arguments), shape, layer)


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
def test_stored_statistics_after_five_updates(momentum: float | None):
    """N21, N22: 1 − momentum is kept, n/(n−1) is stored; None is the plain mean."""
    shape, arguments = (4, 3, 5, 2), {"num_features": 3, "momentum": momentum}
    module = made("BatchNorm2d", arguments, dtype=torch.float64)

    def evaluate(x):
        module.eval()
        return module(torch.tensor(x)).detach().numpy()

    with jax.enable_x64(True):
        check_running(
            spec_of("BatchNorm2d", arguments),
            shape,
            lambda x: module(torch.tensor(x)),
            lambda: (module.running_mean.numpy(), module.running_var.numpy()),
            evaluate,
        )


def test_tracked_instance_statistics_average_the_variances():
    """The note: nj.running.update pools, which adds the spread of the means."""
    shape, arguments = (4, 3, 6), {"num_features": 3, "track_running_stats": True}
    spec = spec_of("InstanceNorm1d", arguments)
    module = made("InstanceNorm1d", arguments, dtype=torch.float64)
    with jax.enable_x64(True):
        x = batches(shape, 1)[0]
        module(torch.tensor(x))
        fresh = nj.running.init(spec, shape, jnp.float64)
        state = nj.running.update(spec, fresh, nj.moments(spec, jnp.asarray(x)))
        np.testing.assert_allclose(state.mean, module.running_mean.numpy())
        averaged = 0.9 + 0.1 * x.var(2, ddof=1).mean(0)
        np.testing.assert_allclose(module.running_var.numpy(), averaged)
        pooled = 0.9 + 0.1 * x.var((0, 2), ddof=1)
        np.testing.assert_allclose(state.variance, pooled)
        assert np.abs(pooled - averaged).max() > 0.05


def run(name: str, arguments: dict[str, Any], x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return made(name, arguments)(torch.tensor(x)).numpy()


ONE = {"num_features": 1}
FOLDED: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "BatchNorm1d": (ONE, (4, 1), (0,)),
    "BatchNorm2d": (ONE, (2, 1, 2, 1), (0, 2, 3)),
    "InstanceNorm1d": (ONE, (1, 1, 4), (2,)),
    "GroupNorm": ({"num_groups": 1, "num_channels": 4}, (1, 4), (1,)),
}


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_folding_loses_digits_and_so_does_the_spec(name: str, offset: float):
    """N05: off by up to |mean|/std units of rounding; the default by less than 8."""
    arguments, shape, axes = FOLDED[name]
    x = (np.arange(4) + offset).astype(np.float32).reshape(shape)
    spec = spec_of(name, arguments)
    theirs, truth = run(name, arguments, x), right(spec, x, axes)
    kappa = offset / np.sqrt(1.25) * 2.0**-24
    found = distance(jax.jit(nj.normalize, static_argnums=0)(spec, x), truth)
    assert kappa / 50 < distance(theirs, truth) < 2 * kappa
    assert kappa / 50 < found < 2 * kappa
    safe = spec.replace(precision=nj.Precision())
    assert distance(nj.normalize(safe, jnp.asarray(x)), truth) < 8 * 2.0**-24


@pytest.mark.parametrize("name", ["BatchNorm1d", "GroupNorm"])
def test_at_two_to_the_24_the_digits_are_the_same(name: str):
    """N04, compiled as theirs is, with fused multiply-add; 0.45 away from x̂."""
    arguments, shape, axes = FOLDED[name]
    x = (np.arange(4) * 2 + 2.0**24).astype(np.float32).reshape(shape)
    spec = spec_of(name, arguments)
    theirs, truth = run(name, arguments, x), right(spec, x, axes)
    ours = jax.jit(nj.normalize, static_argnums=0)(spec, x)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert np.abs(theirs - truth).max() > 0.2
    safe = spec.replace(precision=nj.Precision())
    np.testing.assert_allclose(nj.normalize(safe, jnp.asarray(x)), truth, atol=1e-6)


def test_layer_norm_is_right_at_1e6_and_no_spec_has_its_digits_at_two_to_the_24():
    arguments = {"normalized_shape": 4}
    spec = spec_of("LayerNorm", arguments)
    x = (np.arange(4) + 1e6).astype(np.float32)[None]
    theirs, truth = run("LayerNorm", arguments, x), right(spec, x, (1,))
    assert distance(theirs, truth) < 1e-6
    assert distance(nj.normalize(spec, jnp.asarray(x)), theirs) < 1e-6
    x = (np.arange(4) * 2 + 2.0**24).astype(np.float32)[None]
    theirs, truth = run("LayerNorm", arguments, x), right(spec, x, (1,))
    assert distance(theirs, truth) > 0.1
    for algorithm in ("shifted", "two_pass", "one_pass"):
        other = spec.replace(precision=nj.Precision(algorithm=algorithm))
        assert distance(nj.normalize(other, jnp.asarray(x)), theirs) > 0.1
    safe = spec.replace(precision=nj.Precision())
    assert distance(nj.normalize(safe, jnp.asarray(x)), truth) < 1e-6


def test_a_group_of_one_element_is_noise_there():
    """N27: up to 6e-5 where 0 is right."""
    arguments = {"num_groups": 4, "num_channels": 4}
    x = np.arange(8, dtype=np.float32).reshape(2, 4, 1)
    theirs = run("GroupNorm", arguments, x)
    assert 1e-5 < np.abs(theirs).max() < 7 / np.sqrt(1e-5) * 2.0**-24
    safe = spec_of("GroupNorm", arguments).replace(precision=nj.Precision())
    np.testing.assert_array_equal(nj.normalize(safe, jnp.asarray(x)), 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_state_stops_moving(dtype: str):
    """N13: 100 for ever, where 101 is right; so does a State that is cast each time."""
    arguments = {"num_features": 1, "momentum": 0.01}
    module = made("BatchNorm1d", arguments).to(getattr(torch, dtype))
    module.running_mean.fill_(100)
    spec = spec_of("BatchNorm1d", arguments)
    fresh = nj.running.init(spec, (4, 1))
    wide = half = dataclasses.replace(fresh, mean=fresh.mean + 100)
    x = np.array([[100], [101], [101], [102]], np.float32)
    given = torch.tensor(x).to(module.running_mean.dtype)
    found = nj.moments(spec, jnp.asarray(x, dtype))
    update = jax.jit(nj.running.update)
    for _ in range(200):
        module(given)
        wide = update(spec, wide, found)
        new = update(spec, half, found)
        half = dataclasses.replace(
            new, mean=new.mean.astype(dtype), variance=new.variance.astype(dtype)
        )
    assert module.running_mean.item() == 100.0
    assert half.mean.tolist() == [100.0]
    np.testing.assert_allclose(wide.mean, 101 - 0.99**200, rtol=1e-5)


def test_one_element_is_an_error_there():
    """N26: in training; InstanceNorm's spec says so too, BatchNorm's gives the bias."""
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run("BatchNorm1d", ONE, np.ones((1, 1), np.float32))
    spec = spec_of("BatchNorm1d", ONE)
    assert nj.normalize(spec, jnp.ones((1, 1))).tolist() == [[0.0]]
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        run("InstanceNorm1d", ONE, np.ones((3, 1, 1), np.float32))
    with pytest.raises(ValueError, match="groups of one element"):
        nj.normalize(spec_of("InstanceNorm1d", ONE), jnp.ones((3, 1, 1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rms_norm_without_eps_has_that_of_float32(dtype: str):
    """N09: 0.99998 with 2⁻²³; the epsilon of bfloat16 would give 0.549."""
    x = torch.full((1, 4), 0.058).to(getattr(torch, dtype))
    theirs = torch.nn.RMSNorm(4, dtype=x.dtype)(x).detach().float().numpy()
    spec = spec_of("RMSNorm", {})
    ours = nj.normalize(spec, jnp.asarray(x.float().numpy(), dtype))
    close = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=close)
    assert abs(theirs[0, 0] - 1) < 1e-2


def test_a_rank_that_torch_refuses_does_not_fit_the_pattern():
    spec = spec_of("BatchNorm2d", {"num_features": 3})
    with pytest.raises(ValueError, match="has 4 dimensions, the tensor has 3"):
        nj.normalize(spec, jnp.ones((2, 3, 4)))
    with pytest.raises(ValueError, match="c=3 does not match dimension 1 of size 4"):
        nj.normalize(spec, jnp.ones((2, 4, 3, 3)))
