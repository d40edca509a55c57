"""The node tests that the onnx package makes, and what they leave out."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.interop import onnx as nodes

onnx = pytest.importorskip("onnx", reason="ONNX is not installed")
pytestmark = pytest.mark.jax_defaults

LONE = ("test_l1normalization_axis_0", "test_l1normalization_axis_1",
        "test_l1normalization_axis_last")  # fmt: skip


@cache
def generated() -> dict[str, Any]:
    """The package's own cases of one node each, by name; its generators warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found: dict[str, Any] = {case.name: case for case in collect_testcases(None)}
    return {
        name: case
        for name, case in found.items()
        if len(case.model.graph.node) == 1
        and case.model.graph.node[0].op_type in nodes.OPERATORS
    }


def test_all_53_generated_cases_at_the_packages_and_at_a_tight_tolerance():
    """50 agree to 1e-6 of the largest entry; three ask for p = 1."""
    cases = generated()
    agreed = Counter()
    for name, case in cases.items():
        node = case.model.graph.node[0]
        for inputs, outputs in case.data_sets:
            if name in LONE:
                with pytest.raises(ValueError, match="has p=1, expected p=2"):
                    nodes.normalize_node(node, inputs)
                continue
            found = nodes.normalize_node(node, inputs)
            assert len(found) == len(outputs)
            for y, expected in zip(found, outputs, strict=True):
                assert (y.shape, y.dtype) == (expected.shape, expected.dtype), name
                np.testing.assert_allclose(
                    y, expected, case.rtol, case.atol, True, name
                )
                largest = np.abs(expected).max()
                np.testing.assert_allclose(y, expected, 0, 1e-6 * largest, True, name)
            agreed[node.op_type] += 1
    assert set(LONE) < set(cases)
    assert agreed == {
        "LayerNormalization": 19,
        "RMSNormalization": 19,
        "BatchNormalization": 4,
        "LpNormalization": 3,
        "GroupNormalization": 2,
        "InstanceNormalization": 2,
        "MeanVarianceNormalization": 1,
    }
    assert len(cases) == 53


def make(kind: str, inputs: int, outputs: int = 1, **attributes: Any) -> Any:
    names = [f"i{k}" for k in range(inputs)], [f"o{k}" for k in range(outputs)]
    return onnx.helper.make_node(kind, *names, **attributes)


def draw(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(1.0, 2.0, shape).astype(dtype)


def test_group_norm_of_opset_18_has_a_scale_for_each_group():
    x, scale, bias = draw(3, 6, 4), draw(2), draw(2)
    node = make("GroupNormalization", 3, num_groups=2)
    (y,) = nodes.normalize_node(node, [x, scale, bias])
    assert nodes.node_spec(node, [x, scale, bias]).affine.axes == "g"
    wide = [np.repeat(part, 3) for part in (scale, bias)]
    (expected,) = nodes.normalize_node(node, [x, *wide])
    np.testing.assert_array_equal(y, expected)
    per_channel = nodes.node_spec(node, [x, *wide]).affine
    assert per_channel.axes == "(g c)"


def test_batch_norm_keeps_momentum_of_the_old_in_training():
    x, old = draw(5, 3, 4), [np.full(3, 2.0, np.float32), np.full(3, 4.0, np.float32)]
    node = make("BatchNormalization", 5, 3, training_mode=1, momentum=0.7)
    ones = np.ones(3, np.float32)
    _, mean, variance = nodes.normalize_node(node, [x, ones, 0 * ones, *old])
    axes = (0, 2)
    np.testing.assert_allclose(mean, 1.4 + 0.3 * x.mean(axes), rtol=1e-6)
    np.testing.assert_allclose(variance, 2.8 + 0.3 * x.var(axes), rtol=1e-6)


def test_the_axes_and_the_stabilizer_of_mean_variance_normalization():
    x = draw(3, 4, 5)
    node = make("MeanVarianceNormalization", 1, axes=[-1, 0])
    (y,) = nodes.normalize_node(node, [x])
    expected = (x - x.mean((0, 2), keepdims=True)) / x.std((0, 2), keepdims=True)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    spec = nodes.node_spec(node, [x])
    assert (spec.epsilon, spec.epsilon_placement) == (1e-9, "outside_sqrt")
    constant = nodes.normalize_node(node, [np.ones((3, 4, 5), np.float32)])[0]
    np.testing.assert_array_equal(constant, 0)


def test_lp_norm_of_zeros_is_zero():
    node = make("LpNormalization", 1)
    (y,) = nodes.normalize_node(node, [np.array([[0, 0], [3, 4]], np.float32)])
    np.testing.assert_allclose(y, [[0, 0], [0.6, 0.8]], rtol=1e-6)


@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_stage_two_is_in_the_dtype_of_the_input(kind: str):
    """N16: x̂ is cast to bfloat16 before the gain: 0.9492 for 0.9471 of the exact one.

    The statistics are in the stash type: squares of 300 overflow float16.
    """
    x = jnp.asarray([[1, 2, 3, 4]], "bfloat16")
    gain = jnp.full(4, 1.3, "bfloat16")
    node = make(kind, 2, epsilon=1e-6)
    (y,) = nodes.normalize_node(node, [x, gain])
    spec = nodes.node_spec(node, [x, gain])
    assert spec.affine.cast == "before"
    assert y.dtype == jnp.bfloat16
    hat = nj.normalize(spec, x)
    np.testing.assert_array_equal(y, hat * gain)
    if kind == "RMSNormalization":
        expected = [[0.474609, 0.949219, 1.421875, 1.898438]]
        np.testing.assert_allclose(y.astype("float32"), expected, rtol=1e-6)
    large = jnp.asarray([[300, -300, 300, -300]], "float16")
    one = jnp.ones(4, "float16")
    assert nodes.normalize_node(node, [large, one])[0].tolist() == [[1, -1, 1, -1]]
    half = make(kind, 2, stash_type=10)
    assert nodes.node_spec(half, [large, one]).precision.accumulate == "float16"


def test_the_scale_may_broadcast():
    x = draw(2, 3, 4)
    node = make("LayerNormalization", 3, axis=1)
    (y,) = nodes.normalize_node(node, [x, draw(4), np.float32(2.0)])
    full = np.broadcast_to(draw(4), (3, 4)), np.full((3, 4), 2.0, np.float32)
    (expected,) = nodes.normalize_node(node, [x, *full])
    np.testing.assert_array_equal(y, expected)


def test_right_at_1e4():
    """N01: the function body's two passes are right here too; ours at any offset."""
    x = np.array([[1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3]], np.float32)
    node = make("LayerNormalization", 2, 3)
    y, mean, inverse = nodes.normalize_node(node, [x, np.ones(4, np.float32)])
    np.testing.assert_allclose(y, [[-1.3416, -0.4472, 0.4472, 1.3416]], atol=5e-5)
    np.testing.assert_allclose(mean, [[10001.5]])
    np.testing.assert_allclose(inverse, [[1 / np.sqrt(1.25 + 1e-5)]], rtol=1e-6)


WRONG: dict[str, tuple[Any, int, str]] = {
    "operator": (
        ("LayerNormalisation", {}), 2,
        "LayerNormalisation is no normalization; did you mean 'LayerNormalization'?",
    ),
    "attribute": (
        ("BatchNormalization", {"spatial": 1}), 5,
        "BatchNormalization has no attribute 'spatial'; expected one of epsilon, "
        "momentum, training_mode",
    ),
    "attribute that is missing": (
        ("GroupNormalization", {}), 3,
        "GroupNormalization needs the attribute 'num_groups'",
    ),
    "inputs": (
        ("LayerNormalization", {}), 4,
        "LayerNormalization got 4 inputs, expected 2 to 3",
    ),
    "one number of inputs": (
        ("RMSNormalization", {}), 3,
        "RMSNormalization got 3 inputs, expected 2",
    ),
    "outputs": (
        ("RMSNormalization", {"outputs": 2}), 2,
        "RMSNormalization has 2 outputs, expected at most 1: opset 14 and newer have "
        "no others",
    ),
    "p": (
        ("LpNormalization", {"p": 1}), 1,
        "LpNormalization has p=1, expected p=2: p=1 divides by a sum of absolute "
        "values, which no NormSpec does",
    ),
    "stash type": (
        ("LayerNormalization", {"stash_type": 7}), 2,
        "stash_type is 7, expected one of 1 (float32), 10 (float16), 11 (float64), "
        "16 (bfloat16)",
    ),
    "axis": (
        ("LayerNormalization", {"axis": 3}), 2,
        "reduction axis 3 is out of range for 2 dimensions; choose from -2 to 1",
    ),
    "scale": (
        ("LayerNormalization", {"scale": (3,)}), 2,
        "scale has shape (3,), expected one that broadcasts to (4,)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line(case: str):
    (kind, attributes), inputs, message = WRONG[case]
    attributes = dict(attributes)
    outputs, size = attributes.pop("outputs", 1), attributes.pop("scale", (4,))
    node = make(kind, inputs, outputs, **attributes)
    arrays = [draw(2, 4), *[np.ones(size, np.float32)] * (inputs - 1)]
    with pytest.raises(ValueError, match=r"\A[^\n]*\Z") as caught:
        nodes.normalize_node(node, arrays)
    assert str(caught.value) == message
