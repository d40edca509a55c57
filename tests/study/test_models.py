"""The perceptron of the studies, and leaves that depend on path and shape only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.study.models import MLP, ModelSettings, digests, initialize
from normjax.study.validation import InvalidError, parse

pytestmark = pytest.mark.jax_defaults

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
LEVEL = X.mean(1)
KEY = jax.random.key(5)


def settings(**changes: Any) -> ModelSettings:
    return parse(ModelSettings, {"widths": [4, 3], **changes})


def variables(key=KEY, **changes: Any) -> dict[str, Any]:
    found = initialize(MLP(settings(**changes)), key, X, LEVEL, True)
    found.pop("intermediates", None)
    return found


def apply(model: MLP, found: dict[str, Any]) -> Any:
    return model.apply(found, X, LEVEL, False)


def flat(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(value)
        for path, value in leaves
    }


NORM = {"preset": "layer_norm"}
ARMS = {
    "norm at the input": {"norm": NORM},
    "norms after hidden layers": {"norm": {**NORM, "at": "hidden"}},
    "batch norm": {"norm": {"preset": "batch_norm", "at": "hidden"}},
    "side route": {"side_route": "mean"},
    "side route beside a norm": {"norm": NORM, "side_route": "mean"},
    "one layer less": {"widths": [4]},
    "a wider second layer": {"widths": [4, 7]},
    "one layer more": {"widths": [4, 3, 5]},
}


@pytest.mark.parametrize("name", ARMS)
def test_leaves_of_equal_path_and_shape_are_identical(name: str):
    """Bit for bit; and what an arm adds or reshapes changes no other leaf."""
    plain, other = flat(variables()["params"]), flat(variables(**ARMS[name])["params"])
    shared = [k for k in plain if k in other and plain[k].shape == other[k].shape]
    assert "hidden_0/kernel" in shared
    for path in shared:
        np.testing.assert_array_equal(plain[path], other[path])
    assert set(plain) != set(other) or len(shared) < len(plain)


def test_every_leaf_has_a_key_of_its_own():
    found = flat(variables(widths=[4, 4, 4])["params"])
    kernels = [found[f"hidden_{i}/kernel"] for i in range(3)]
    for i in range(3):
        for j in range(i):
            assert not np.array_equal(kernels[i], kernels[j])
    other = flat(variables(jax.random.key(6), widths=[4, 4, 4])["params"])
    assert not np.array_equal(other["hidden_0/kernel"], kernels[0])
    for path in found:
        same = np.array_equal(found[path], other[path])
        assert same == (not path.endswith("kernel")), path


def test_kernels_are_lecun_normal_and_the_rest_as_flax_has_it():
    found = flat(initialize(MLP(settings(widths=[2000])), KEY, X, LEVEL, True))
    kernel = found["params/hidden_0/kernel"]
    np.testing.assert_allclose(kernel.std(), 4**-0.5, rtol=0.03)
    assert abs(kernel.mean()) < 0.02
    assert (found["params/hidden_0/bias"] == 0).all()


def test_the_side_route_is_a_dense_of_its_own():
    plain, routed = variables(), variables(side_route="mean")
    paths = set(flat(routed["params"])) - set(flat(plain["params"]))
    assert paths == {"side_route/kernel", "side_route/bias"}
    assert flat(routed["params"])["side_route/kernel"].shape == (1, 1)
    model = MLP(settings(side_route="mean"))
    kernel = routed["params"]["side_route"]["kernel"][0, 0]
    without = apply(MLP(settings()), plain)
    np.testing.assert_allclose(
        apply(model, routed), without + kernel * LEVEL, atol=1e-6
    )


def test_the_model_is_a_perceptron_with_the_norm_in_its_place():
    found = variables(norm={**NORM, "epsilon": 0.1})
    p = flat(found["params"])
    h = X.astype(np.float64)
    h = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + 0.1)
    for i in range(2):
        h = np.maximum(h @ p[f"hidden_{i}/kernel"] + p[f"hidden_{i}/bias"], 0)
    expected = h @ p["head/kernel"] + p["head/bias"]
    model = MLP(settings(norm={**NORM, "epsilon": 0.1}))
    y, taps = model.apply(found, X, LEVEL, False, mutable=["intermediates"])
    np.testing.assert_allclose(y, expected[:, 0], atol=1e-5)
    taps = {k: v[0] for k, v in taps["intermediates"].items()}
    assert set(taps) == {"norm_input", "norm_output", "head_input"}
    np.testing.assert_array_equal(taps["norm_input"], X)
    np.testing.assert_allclose(taps["head_input"], h, atol=1e-5)


def test_hidden_norms_stand_before_the_nonlinearity():
    found = variables(norm={"preset": "rms_norm", "at": "hidden", "epsilon": 0})
    p = flat(found["params"])
    assert {"norm_0/scale", "norm_1/scale"} <= set(p)
    h = X.astype(np.float64)
    for i in range(2):
        h = h @ p[f"hidden_{i}/kernel"]
        h = np.maximum(h / np.sqrt((h**2).mean(1, keepdims=True)), 0)
    model = MLP(settings(norm={"preset": "rms_norm", "at": "hidden", "epsilon": 0}))
    y = apply(model, found)
    np.testing.assert_allclose(y, (h @ p["head/kernel"])[:, 0], atol=1e-5)


def test_batch_norm_stores_and_uses_statistics():
    norm = {"preset": "batch_norm", "at": "hidden", "running": {"decay": 0.75}}
    model, found = MLP(settings(norm=norm)), variables(norm=norm)
    before = flat(found["batch_stats"])
    assert (before["norm_0/mean"] == 0).all()
    y, changed = model.apply(found, X, LEVEL, True, mutable=["batch_stats"])
    after = flat(changed["batch_stats"])
    hidden = X @ flat(found["params"])["hidden_0/kernel"]
    np.testing.assert_allclose(after["norm_0/mean"], 0.25 * hidden.mean(0), atol=1e-6)
    np.testing.assert_allclose(
        after["norm_0/var"], 0.75 + 0.25 * hidden.var(0), rtol=1e-5
    )
    stored = apply(model, {**found, **changed})
    assert not np.allclose(stored, y, atol=1e-3)
    again = model.apply({**found, **changed}, X, LEVEL, False, mutable=["batch_stats"])
    np.testing.assert_array_equal(flat(again[1])["batch_stats/norm_0/mean"],
                                  after["norm_0/mean"])  # fmt: skip


def test_digests_change_with_any_entry_and_name_path_and_shape():
    found = variables()
    before = digests(found)
    assert set(before) == {
        "hidden_0/bias 4",
        "hidden_0/kernel 4x4",
        "hidden_1/bias 3",
        "hidden_1/kernel 4x3",
        "head/bias 1",
        "head/kernel 3x1",
    }
    kernel = found["params"]["hidden_1"]["kernel"]
    bits = np.asarray(kernel).view(np.uint32).ravel().tolist()
    digest = sum(b * (2 * 2654435761 * i + 1) for i, b in enumerate(bits)) % 2**32
    assert before["hidden_1/kernel 4x3"] == digest
    for index in np.ndindex(kernel.shape):
        nudged = kernel.at[index].multiply(1 + 2**-23)
        found["params"]["hidden_1"]["kernel"] = nudged
        after = digests(found)
        assert after["hidden_1/kernel 4x3"] != before["hidden_1/kernel 4x3"]
        assert after["hidden_0/kernel 4x4"] == before["hidden_0/kernel 4x4"]
    swapped = jnp.flip(kernel, 0)
    found["params"]["hidden_1"]["kernel"] = swapped
    assert digests(found)["hidden_1/kernel 4x3"] != before["hidden_1/kernel 4x3"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": {**NORM, "at": "head"}}, "expected 'input' or 'hidden', got 'head'"),
        (
            {"side_route_shuffled": True},
            "there is no side route to shuffle: set side_route: mean",
        ),
        ({"side_route": "max"}, "expected 'none' or 'mean', got 'max'"),
        ({"name": "cnn"}, "expected 'mlp', got 'cnn'"),
    ],
)
def test_settings_without_meaning_are_refused(changes: dict, message: str):
    with pytest.raises(InvalidError, match=rf"\A{message}\Z"):
        settings(**changes)
