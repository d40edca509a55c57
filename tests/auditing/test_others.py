"""What is no plain normalization is called by its name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy_layers import PARTS, B, W, mean_square, normalizer
from scipy.special import erf

import normjax as nj

pytestmark = pytest.mark.jax_defaults

RNG = np.random.default_rng(3)
MATRIX = RNG.normal(size=(6, 6)).astype(np.float32)
KERNEL = RNG.normal(size=(3, 6, 6)).astype(np.float32)
LAYER = normalizer(**PARTS)
RMS = normalizer(eps=1e-6, alpha=0, size=mean_square, gain=W, bias=B)
F = np.float32


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return (x * 0.5 * (1 + erf(x / F(np.sqrt(2))))).astype(np.float32)


def convolution(x: np.ndarray) -> np.ndarray:
    padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    windows = np.stack([padded[:, i : i + x.shape[1]] for i in range(3)])
    return np.einsum("kbtc,kcd->btd", windows, KERNEL)


def local_response(x: np.ndarray) -> np.ndarray:
    s = np.pad(x * x, ((0, 0), (0, 0), (1, 1)))
    return x / (1 + s[..., :-2] + s[..., 1:-1] + s[..., 2:]) ** F(0.75)


def cumulative(x: np.ndarray) -> np.ndarray:
    n = np.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
    m = np.cumsum(x, 1) / n
    return (x - m) / np.sqrt(np.abs(np.cumsum(x * x, 1) / n - m * m) + F(1e-5))


def dropout() -> Callable[[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    return lambda x: 2 * x * (rng.random(x.shape) < 0.5)


OTHERS = {
    "DyT": (lambda x: np.tanh(F(0.7) * x) * W[:6].astype(F), "DyT: tanh(0.7 x)"),
    "steep DyT": (lambda x: np.tanh(F(20) * x), "DyT: tanh(20 x)"),
    "sigmoid": (sigmoid, "element-wise: sigmoid"),
    "softmax": (softmax, "softmax over the groups"),
    "dropout": (dropout(), "stochastic: two equal calls differ by"),
    "identity": (lambda x: x, "identity"),
    "inference": (lambda x: W[:6].astype(F) * x + 1, "element-wise and affine: fixed"),
    "linear": (lambda x: x @ MATRIX, "a linear map within each group"),
    "convolution": (convolution, "a linear map; reach by axis 0 to 0, -1 to 1, -5"),
    "norm, relu": (lambda x: np.maximum(LAYER(x), 0), "a layer norm, then relu"),
    "norm, silu": (lambda x: LAYER(x) * sigmoid(LAYER(x)), "a layer norm, then silu"),
    "rms, gelu": (lambda x: gelu(RMS(x)), "an RMS norm, then gelu"),
    "relu": (lambda x: np.maximum(x, 0), "element-wise: relu"),
    "linear, norm": (
        lambda x: LAYER(x @ MATRIX),
        "a linear map, then a normalization (centered)",
    ),
    "linear, rms": (
        lambda x: RMS(x @ MATRIX),
        "a linear map, then a normalization (not centered)",
    ),
    "cumulative": (
        cumulative,
        "cumulative: each element sees all earlier ones along axis 1; scale invariant",
    ),
    "local response": (local_response, "overlapping windows, no partition; not scale"),
    "constant": (np.ones_like, "constant: the output does not depend on the input"),
    "single elements": (
        lambda x: x / np.sqrt(x * x + F(1e-5)),
        "element-wise: x / √(x² + 1e-05), a norm over single elements",
    ),
    "not finite": (lambda x: x / F(0), "outputs for a normal input are not finite"),
    "unknown": (lambda x: LAYER(x) ** 2, "not recognized"),
    "unknown, element-wise": (np.sin, "element-wise, not recognized"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_normalization_is_named(name: str):
    function, kind = OTHERS[name]
    found = nj.audit(function, shape=(2, 5, 6))
    assert found.kind is not None
    assert kind in found.kind
    assert (found.spec, found.nearest) == (None, None)


def test_a_norm_is_not_taken_for_anything_else():
    assert nj.audit(LAYER, shape=(2, 5, 6)).kind is None
