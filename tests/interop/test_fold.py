"""Folding a norm into the linear layer beside it, against the two layers by Flax."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.interop import fold

# 64 u times a fan-in of at most 100, in float64.
CLOSE = 64 * 2.0**-53 * 100
KEY = jax.random.key(0)
normalize = jax.jit(nj.normalize)


def random(*shape: int, dtype: Any = np.float64, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def norm_of(features: int, **changes: Any):
    """A batch norm, its parameters, and stored statistics with an offset."""
    params = {"scale": random(features, seed=1), "bias": random(features, seed=2)}
    variance = jnp.abs(random(features, seed=4)) + 0.1
    stored = nj.Statistics(3 * random(features, seed=3), variance)
    return nj.batch_norm(**changes), params, stored


def by_flax(params: dict[str, Any], stored: nj.Statistics, x: jax.Array) -> jax.Array:
    """Flax's own BatchNorm in eval mode: shares nothing with the fold."""
    layer = nn.BatchNorm(use_running_average=True, param_dtype=jnp.float64)
    state = {"mean": stored.mean, "var": stored.variance}
    y: Any = layer.apply({"params": params, "batch_stats": state}, x)
    return y


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], dict[str, Any]]] = {
    "dense": (nn.Dense(6), (3, 4), {}),
    "dense without bias": (nn.Dense(6, use_bias=False), (3, 4), {}),
    "conv": (nn.Conv(6, (3, 2), strides=2), (2, 5, 6, 4), {}),
    "grouped": (nn.Conv(6, (3,), feature_group_count=2), (2, 5, 4), {"groups": 2}),
    "depthwise": (nn.Conv(8, (3,), feature_group_count=4), (2, 5, 4), {"groups": 4}),
    "transposed": (
        nn.ConvTranspose(6, (3, 3), strides=(2, 2), use_bias=False),
        (2, 4, 3, 4), {"transposed": True},
    ),
    "transposed kernel": (
        nn.ConvTranspose(6, (3,), transpose_kernel=True),
        (2, 4, 4), {"transposed": True, "layout": "... o i"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_after_a_layer(case: str):
    module, shape, words = LAYERS[case]
    x = random(*shape)
    module = module.clone(param_dtype=jnp.float64)  # type: ignore[call-arg]
    layer: Any = jax.eval_shape(module.init, KEY, x)["params"]
    layer = {name: random(*v.shape, seed=9) for name, v in layer.items()}
    out: Any = module.apply({"params": layer}, x)
    spec, params, stored = norm_of(out.shape[-1])

    def apply(layer: Any, x: Any) -> Any:
        whole = module.clone(use_bias="bias" in layer)  # type: ignore[call-arg]
        return whole.apply({"params": layer}, x)

    folded = fold(layer, spec, params, stored, apply=apply, x=x, **words)
    assert folded.rest is None
    assert folded.ok
    assert folded.error is not None
    expected = by_flax(params, stored, out)
    np.testing.assert_allclose(
        apply(folded.params, x), expected, rtol=CLOSE, atol=CLOSE * 10
    )
    # As plain arrays, and without a probe.
    plain = {name: np.asarray(value) for name, value in layer.items()}
    again = fold(plain, spec, params, stored, **words)
    assert isinstance(again.params["kernel"], np.ndarray)
    np.testing.assert_array_equal(again.params["kernel"], folded.params["kernel"])
    assert again.ok is None


@pytest.mark.parametrize("groups", [2, 4])
def test_a_grouped_transposed_kernel(groups: int):
    """N77: torch's [in, out/groups, ...], on which its own fuse raises."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: TORCH=1")
    module = torch.nn.ConvTranspose2d(8, 12, 3, 2, groups=groups).double()
    norm = torch.nn.BatchNorm2d(12).double().eval()
    with torch.no_grad():
        for k, tensor in enumerate([*norm.parameters(), norm.running_mean]):
            tensor.copy_(torch.tensor(np.asarray(random(12, seed=k))))
        norm.running_var.uniform_(0.2, 2.0)
        x = torch.tensor(np.asarray(random(2, 8, 4, 3)))
        expected = norm(module(x)).numpy()
        layer = {"kernel": module.weight.numpy(), "bias": module.bias.numpy()}
        folded = fold(
            layer,
            nj.interop.convention("torch.nn.BatchNorm2d"),
            {"scale": norm.weight.numpy(), "bias": norm.bias.numpy()},
            nj.Statistics(norm.running_mean.numpy(), norm.running_var.numpy()),
            layout="i o ...",
            groups=groups,
            transposed=True,
        )
        module.weight.copy_(torch.tensor(folded.params["kernel"]))
        module.bias.copy_(torch.tensor(folded.params["bias"]))
        np.testing.assert_allclose(module(x).numpy(), expected, rtol=CLOSE, atol=1e-12)


@pytest.mark.parametrize(
    ("bias", "norm", "expected"),
    [
        (True, {"scale": 3.0, "bias": -1.0}, (12.0, 2.0)),
        (False, {"scale": 3.0, "bias": -1.0}, (12.0, -4.0)),
        (True, {"scale": 3.0}, (12.0, 3.0)),  # a missing shift is 0
        (True, {"bias": -1.0}, (4.0, 0.0)),  # a missing gain is 1
        (False, {}, (4.0, -1.0)),
    ],
)
def test_the_scalar_case(bias, norm, expected):
    """N77: w 2, b 1, mean 0.5, variance 0.25, gain 3, shift −1, ε 0: 12, 2; 1 → 14."""
    layer = {"kernel": jnp.full((1, 1), 2.0), **({"bias": jnp.ones(1)} if bias else {})}
    affine = nj.Affine("c", scale="scale" in norm, bias="bias" in norm)
    spec = nj.batch_norm(epsilon=0.0, affine=affine if norm else None)
    params = {name: jnp.full(1, value) for name, value in norm.items()}
    stored = nj.Statistics(jnp.full(1, 0.5), jnp.full(1, 0.25))
    folded = fold(layer, spec, params, stored, x=jnp.ones((1, 1)))
    assert [v.item() for v in folded.params.values()] == list(expected)
    assert folded.error == 0
    assert folded.amplification == expected[0] / 2


BEFORE = [("VALID", 1), ("VALID", 2), (0, 1), ([(0, 0)], 1), ("CIRCULAR", 1)]


@pytest.mark.parametrize(("padding", "groups"), BEFORE)
def test_before_a_convolution_that_pads_no_zeros(padding, groups: int):
    module = nn.Conv(6, (3,), padding=padding, feature_group_count=groups)
    x = random(2, 7, 4)
    layer = {"kernel": random(3, 4 // groups, 6), "bias": random(6, seed=5)}
    spec, params, stored = norm_of(4)

    def apply(layer: Any, x: Any) -> Any:
        return module.apply({"params": layer}, x)

    words: Any = {"padding": padding, "groups": groups}
    folded = fold(layer, spec, params, stored, order="before", **words)
    expected: Any = apply(layer, by_flax(params, stored, x))
    np.testing.assert_allclose(apply(folded.params, x), expected, atol=1e-12)


def test_zeros_at_the_border_are_refused_and_measured():
    """N77: the border has fewer terms. What is claimed wrongly shows on a probe."""
    module = nn.Conv(6, (3,))
    layer = {"kernel": random(3, 4, 6), "bias": random(6, seed=5)}
    spec, params, stored = norm_of(4)

    def apply(layer: Any, x: Any) -> Any:
        return module.apply({"params": layer}, x)

    for padding, text in ((None, "say padding="), ("SAME", "zeros"), (1, "zeros")):
        with pytest.raises(ValueError, match=text):
            fold(layer, spec, params, stored, order="before", padding=padding)
    claimed = {"order": "before", "padding": "VALID", "apply": apply}
    folded = fold(layer, spec, params, stored, x=random(2, 7, 4), **claimed)
    assert folded.ok is False
    # Without an offset the zeros are zeros on both sides, and one tap has no border.
    plain = spec.replace(center=False, divide="rms", affine=None)
    free = {**claimed, "padding": "SAME", "x": random(2, 7, 4)}
    assert fold(layer, plain, None, stored, **free).ok
    point = {"kernel": random(1, 4, 6)}
    module = nn.Conv(6, (1,))
    free["apply"] = lambda layer, x: module.clone(use_bias="bias" in layer).apply(
        {"params": layer}, x
    )
    folded = fold(point, spec, params, stored, **free)
    assert folded.ok
    assert sorted(folded.params) == ["bias", "kernel"]  # it needs one now


@pytest.mark.parametrize(
    ("spec", "layer", "layout"),
    [
        (nj.layer_norm(), {"kernel": (4, 6), "bias": (6,)}, "... i o"),
        (nj.layer_norm(), {"kernel": (4, 6)}, "... i o"),
        (nj.layer_norm(), {"kernel": (6, 4), "bias": (6,)}, "o i"),
        (nj.layer_norm(), {"kernel": (4, 2, 3), "bias": (2, 3)}, "i o o"),
        (nj.rms_norm(), {"kernel": (4, 6)}, "... i o"),
        (
            nj.rms_norm(affine=nj.Affine("c", bias=False, stored="1+w")),
            {"kernel": (4, 6), "bias": (6,)},
            "... i o",
        ),
        (nj.group_norm(groups=2), {"kernel": (4, 6)}, "... i o"),
    ],
)
def test_the_affine_part_into_the_next_layer(spec, layer, layout):
    """What is left has no parameters; a layer without a bias stays so if it can."""
    x = random(5, 4, seed=8) + 2
    layer = {name: random(*shape, seed=7) for name, shape in layer.items()}
    params = {name: random(4, seed=6) for name in nj.init(spec, x.shape)}
    words: Any = {"order": "before", "part": "affine", "layout": layout}
    folded = fold(layer, spec, params, x=x, **words)
    assert folded.rest == spec.replace(affine=None)
    assert folded.ok
    assert ("bias" in folded.params) == ("bias" in layer or "bias" in params)
    flat = np.asarray(folded.params["kernel"])
    flat = flat.T if layout == "o i" else flat.reshape(4, 6)
    assert folded.rest is not None
    rest = np.asarray(normalize(folded.rest, x)) @ flat
    rest = rest + np.ravel(folded.params.get("bias", 0))
    kernel = np.asarray(layer["kernel"])
    kernel = kernel.T if layout == "o i" else kernel.reshape(4, 6)
    whole = np.asarray(normalize(spec, x, params)) @ kernel
    np.testing.assert_allclose(rest, whole + np.ravel(layer.get("bias", 0)), rtol=1e-12)


STORED: list[tuple[nj.NormSpec, tuple[int, ...]]] = [
    (nj.instance_norm(running=nj.Running()), (2, 5, 4)),
    (nj.group_norm(groups=2, running=nj.Running()), (2, 5, 4)),
    (nj.ghost_batch_norm(ghosts=2), (4, 5, 4)),
    (nj.batch_renorm(), (2, 4)),
    (nj.batch_norm(running=nj.Running(debias=True, initial=(0, 0))), (2, 4)),
    (nj.batch_norm(epsilon_placement="floor_std", epsilon=1.0, single="error"), (2, 4)),
]


@pytest.mark.parametrize(("spec", "shape"), STORED)
def test_whatever_stores_statistics_folds(spec: nj.NormSpec, shape: tuple[int, ...]):
    """N42, N79: also what takes each example's own in training; State as it is."""
    x = random(*shape, seed=5) * 2 + 1
    params = {name: random(4, seed=6) for name in nj.init(spec, shape)}
    fresh = nj.running.init(spec, shape)

    @jax.jit
    def update(x: jax.Array) -> nj.running.State:
        return nj.running.update(spec, fresh, nj.moments(spec, x))

    state = update(x)
    layer = {"kernel": random(4, 6), "bias": random(6, seed=5)}
    folded = fold(layer, spec, params, state, order="before", x=x)
    assert folded.ok
    assert folded.rest is None
