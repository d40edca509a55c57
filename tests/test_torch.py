"""Presets against PyTorch's own layers in float64: values, gradients, state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj

torch = pytest.importorskip("torch", reason="PyTorch is not installed: TORCH=1")
functional = torch.nn.functional

# Rounding in float64 with at most 60 entries in a group and an offset of κ < 2.
CLOSE = 64 * 2.0**-53 * 62


CASES = {
    "layer": (
        nj.layer_norm(),
        (4, 5, 6),
        lambda x, w, b: functional.layer_norm(x, (6,), w, b),
    ),
    "layer over three axes": (
        nj.layer_norm("h w c"),
        (3, 2, 5, 6),
        lambda x, w, b: functional.layer_norm(x, (2, 5, 6), w, b),
    ),
    "rms": (
        nj.rms_norm(),
        (4, 5, 6),
        lambda x, w, _: functional.rms_norm(x, (6,), w, eps=1e-5),
    ),
    "group": (
        nj.group_norm(groups=3, channels="first"),
        (4, 6, 5, 2),
        lambda x, w, b: functional.group_norm(x, 3, w, b),
    ),
    "instance": (
        nj.instance_norm(channels="first"),
        (4, 6, 5),
        lambda x, w, b: functional.instance_norm(x, weight=w, bias=b),
    ),
    "batch": (
        nj.batch_norm(channels="first"),
        (10, 6),
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
    ),
    "batch with positions": (
        nj.batch_norm(channels="first"),
        (4, 6, 5, 3),
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
    ),
}


def close(actual, expected) -> None:
    np.testing.assert_allclose(actual, expected, rtol=CLOSE, atol=CLOSE)


def tensor(array):
    return torch.tensor(np.asarray(array), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("spec", "shape", "layer"), CASES.values(), ids=CASES)
def test_value_and_gradients(spec, shape, layer):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(1.0, 1.5, shape))
    params = {
        name: jnp.asarray(random.normal(1.0, 0.5, value.shape))
        for name, value in nj.init(spec, shape, jnp.float64).items()
    }
    weights = jnp.asarray(random.normal(size=shape))
    value, pull = jax.vjp(lambda x, p: nj.normalize(spec, x, p), x, params)
    by_x, by_params = pull(weights)
    t, w = tensor(x), tensor(params["scale"])
    b = tensor(params["bias"]) if "bias" in params else None
    y = layer(t, w, b)
    y.backward(torch.tensor(np.asarray(weights)))
    close(value, y.detach().numpy())
    close(by_x, np.asarray(t.grad))
    close(by_params["scale"], np.asarray(w.grad))
    if b is not None:
        close(by_params["bias"], np.asarray(b.grad))


def test_stored_statistics_after_five_updates():
    """PyTorch's momentum is 1 − decay, and it stores the unbiased variance."""
    layer = torch.nn.BatchNorm1d(3, momentum=0.1, dtype=torch.float64)
    spec = nj.batch_norm(running=nj.Running(decay=0.9, ddof=1))
    state = nj.running.init(spec, (8, 3), jnp.float64)
    random = np.random.default_rng(1)
    for _ in range(5):
        x = random.normal(2.0, 3.0, (8, 3))
        layer(torch.tensor(x))
        state = nj.running.update(spec, state, nj.moments(spec, jnp.asarray(x)))
    close(state.mean, np.asarray(layer.running_mean))
    close(state.variance, np.asarray(layer.running_var))
    layer.eval()
    x = random.normal(size=(8, 3))
    found = nj.normalize(spec, jnp.asarray(x), moments=nj.running.read(spec, state))
    close(found, layer(torch.tensor(x)).detach().numpy())


def test_right_where_torch_is_not():
    """N04: at 2²⁴ PyTorch's float32 layer norm is shifted; ours is right."""
    x = np.array([[2.0**24, 2.0**24 + 2, 2.0**24 + 4, 2.0**24 + 6]], np.float32)
    theirs = functional.layer_norm(torch.tensor(x), (4,)).numpy()
    ours = nj.normalize(nj.layer_norm(), jnp.asarray(x))
    right = [[-1.3416395, -0.4472132, 0.4472132, 1.3416395]]
    np.testing.assert_allclose(ours, right, atol=1e-6)
    assert np.abs(theirs - right).max() > 0.4
