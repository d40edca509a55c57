"""Nodes of ONNX models that normalize, run by the core.

BatchNormalization, LayerNormalization, GroupNormalization, InstanceNormalization,
RMSNormalization, LpNormalization with p = 2, and MeanVarianceNormalization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from normjax import functional, running
from normjax.arguments import second_moment
from normjax.pattern import Pattern
from normjax.records import suggest
from normjax.spec import Affine, NormSpec, Precision, Running
from normjax.statistics import Moments

# Numbers of onnx.TensorProto's float types, for stash_type.
STASH = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}
# Added to the standard deviation by MeanVarianceNormalization's function body.
OUTSIDE = 1e-9


class _Operator(NamedTuple):
    """One operator: its attributes with their defaults, its inputs, and its spec."""

    attributes: dict[str, Any]
    inputs: int
    optional: int
    spec: Callable[[dict[str, Any], Sequence[Array]], NormSpec]


def node_spec(node: Any, inputs: Sequence[Any]) -> NormSpec:
    """The spec that a node declares, for the shapes of its inputs.

    Args:
        node: an ``onnx.NodeProto`` of one of the seven operators, opset 14 or newer.
            GroupNormalization's scale may belong to groups (opset 18) or to channels.
        inputs: as for ``normalize_node``.

    Returns:
        A NormSpec with ``affine`` over the axes that the scale has.

    Raises:
        ValueError: on another operator, an attribute that it does not have, a number of
            inputs that does not fit, or p = 1, which no spec divides by.

    Example:
        >>> from onnx.helper import make_node
        >>> node = make_node("MeanVarianceNormalization", ["x"], ["y"])
        >>> spec = node_spec(node, [jnp.ones((2, 3, 4, 4))])
        >>> spec.pattern, spec.epsilon_placement
        ('[x0] x1 [x2 x3]', 'outside_sqrt')
    """
    operator, attributes, arrays = _read(node, inputs)
    return operator.spec(attributes, arrays)


def normalize_node(node: Any, inputs: Sequence[Any]) -> tuple[Array, ...]:
    """Compute the outputs of a node.

    Args:
        node: as for ``node_spec``.
        inputs: arrays in the order of the node's inputs: x, scale, bias, mean, var, as
            far as it has them.

    Returns:
        As many arrays as the node has outputs: y; of BatchNormalization in training
        mode the updated mean and variance; of LayerNormalization Mean and InvStdDev.

    Raises:
        ValueError: as ``node_spec``, and on more outputs than there are.

    Example:
        >>> from onnx.helper import make_node
        >>> node = make_node("LpNormalization", ["x"], ["y"], axis=-1, p=2)
        >>> print(normalize_node(node, [jnp.array([[3.0, 4.0]])])[0])
        [[0.6 0.8]]

    Reference: https://onnx.ai/onnx/operators; function bodies of onnx 1.23.2.
    """
    operator, attributes, (x, *rest) = _read(node, inputs)
    spec = operator.spec(attributes, (x, *rest))
    params = _params(spec, x, rest)
    if node.op_type == "BatchNormalization":
        outputs = _batch(spec, x, params, rest, attributes["training_mode"])
    else:
        outputs = [functional.normalize(spec, x, params)]
        if node.op_type == "LayerNormalization":
            outputs += _stage_one(spec, x)
    if len(node.output) > len(outputs):
        raise ValueError(
            f"{node.op_type} has {len(node.output)} outputs, expected at most "
            f"{len(outputs)}: opset 14 and newer have no others"
        )
    return tuple(outputs[: len(node.output)])


def _read(node: Any, inputs: Sequence[Any]):
    """The operator, its attributes with defaults, and the inputs as arrays."""
    from onnx.helper import get_attribute_value

    if node.op_type not in OPERATORS:
        hint = suggest(node.op_type, OPERATORS)
        raise ValueError(f"{node.op_type} is no normalization{hint}")
    operator = OPERATORS[node.op_type]
    found = {item.name: get_attribute_value(item) for item in node.attribute}
    for name in found:
        if name not in operator.attributes:
            hint = suggest(name, operator.attributes)
            raise ValueError(f"{node.op_type} has no attribute {name!r}{hint}")
    attributes = {**operator.attributes, **found}
    missing = [name for name, value in attributes.items() if value is None]
    if missing:
        raise ValueError(f"{node.op_type} needs the attribute {missing[0]!r}")
    most = operator.inputs + operator.optional
    if not operator.inputs <= len(inputs) <= most:
        counts = str(most) if not operator.optional else f"{operator.inputs} to {most}"
        raise ValueError(f"{node.op_type} got {len(inputs)} inputs, expected {counts}")
    return operator, attributes, [jnp.asarray(array) for array in inputs]


def _params(spec: NormSpec, x: Array, rest: Sequence[Array]) -> dict[str, Array]:
    """Scale and bias in the shape that the spec gives them; they may broadcast."""
    params = functional.init(spec, x.shape, x.dtype)
    for name, given in zip(("scale", "bias"), rest, strict=False):
        shape = params[name].shape
        try:
            params[name] = jnp.broadcast_to(given, shape)
        except ValueError:
            raise ValueError(
                f"{name} has shape {given.shape}, expected one that broadcasts to "
                f"{shape}"
            ) from None
    return params


def _batch(spec: NormSpec, x: Array, params, rest, training: int) -> list[Array]:
    """y, and in training mode momentum · old + (1 − momentum) · new."""
    mean, variance = rest[2:]
    count = jnp.zeros(mean.shape, jnp.int32)
    state = running.State(mean, variance, count)
    if not training:
        stored = running.read(spec, state)
        return [functional.normalize(spec, x, params, moments=stored)]
    state = running.update(spec, state, functional.moments(spec, x))
    return [functional.normalize(spec, x, params), state.mean, state.variance]


def _stage_one(spec: NormSpec, x: Array) -> list[Array]:
    """LayerNormalization's Mean and 1/√(σ²+ε), reduced axes kept, in the stash type."""
    found: Moments = functional.moments(spec, x)
    first = x.ndim - len(spec.parsed.reduced)
    shape = (*x.shape[:first], *[1] * (x.ndim - first))
    mean = (found.mean + found.mean_low).reshape(shape)
    variance = second_moment(spec, found).reshape(shape)
    return [mean, 1 / jnp.sqrt(variance + spec.epsilon)]


def _batch_norm(attributes: dict[str, Any], _: Sequence[Array]) -> NormSpec:
    kept = running.decay(attributes["momentum"], "onnx")
    return NormSpec(
        "[b] c [...]",
        epsilon=attributes["epsilon"],
        affine="c",
        running=Running(kept),
    )


def _layer_norm(attributes: dict[str, Any], inputs: Sequence[Array]) -> NormSpec:
    """Stage two, the affine part, is in the dtype of x: the cast comes before."""
    pattern = _from(inputs[0].ndim, attributes["axis"])
    return NormSpec(
        pattern,
        epsilon=attributes["epsilon"],
        affine=Affine(_inside(pattern), bias=len(inputs) == 3, cast="before"),
        precision=_stash(attributes),
    )


def _rms_norm(attributes: dict[str, Any], inputs: Sequence[Array]) -> NormSpec:
    spec = _layer_norm(attributes, inputs)
    return spec.replace(center=False, divide="rms")


def _group_norm(attributes: dict[str, Any], inputs: Sequence[Array]) -> NormSpec:
    """Opset 18 has a scale for each group, 21 one for each channel."""
    groups, channels = attributes["num_groups"], inputs[0].shape[1]
    of_groups = inputs[1].shape == (groups,) and groups != channels
    return NormSpec(
        "b (g [c]) [...]",
        sizes={"g": groups},
        epsilon=attributes["epsilon"],
        affine=Affine("g" if of_groups else "(g c)", cast="before"),
        precision=_stash(attributes),
    )


def _instance_norm(attributes: dict[str, Any], _: Sequence[Array]) -> NormSpec:
    return NormSpec("b c [...]", epsilon=attributes["epsilon"], affine="c")


def _lp_norm(attributes: dict[str, Any], inputs: Sequence[Array]) -> NormSpec:
    """x / √Σx², and 0 where that is 0/0."""
    if attributes["p"] != 2:
        raise ValueError(
            f"LpNormalization has p={attributes['p']}, expected p=2: p=1 divides by a "
            "sum of absolute values, which no NormSpec does"
        )
    pattern = str(Pattern.from_axes(inputs[0].ndim, attributes["axis"]))
    return NormSpec(pattern, center=False, divide="l2", epsilon=0.0)


def _mean_variance(attributes: dict[str, Any], inputs: Sequence[Array]) -> NormSpec:
    pattern = str(Pattern.from_axes(inputs[0].ndim, attributes["axes"]))
    return NormSpec(pattern, epsilon=OUTSIDE, epsilon_placement="outside_sqrt")


def _from(ndim: int, axis: int) -> str:
    """All axes from one on, as the pattern that reduces them."""
    Pattern.from_axes(ndim, axis)  # refuses what is out of range
    return str(Pattern.from_axes(ndim, tuple(range(axis % ndim, ndim))))


def _inside(pattern: str) -> str:
    return " ".join(Pattern.parse(pattern).reduced)


def _stash(attributes: dict[str, Any]) -> Precision:
    number = attributes["stash_type"]
    if number not in STASH:
        kinds = ", ".join(f"{key} ({value})" for key, value in STASH.items())
        raise ValueError(f"stash_type is {number}, expected one of {kinds}")
    return Precision(accumulate=STASH[number])


_EPSILON = {"epsilon": 1e-5}
_STAGED = {"axis": -1, **_EPSILON, "stash_type": 1}
OPERATORS = {
    "BatchNormalization": _Operator(
        {**_EPSILON, "momentum": 0.9, "training_mode": 0}, 5, 0, _batch_norm
    ),
    "LayerNormalization": _Operator(_STAGED, 2, 1, _layer_norm),
    "GroupNormalization": _Operator(
        {**_EPSILON, "num_groups": None, "stash_type": 1}, 3, 0, _group_norm
    ),
    "InstanceNormalization": _Operator(_EPSILON, 3, 0, _instance_norm),
    "RMSNormalization": _Operator(_STAGED, 2, 0, _rms_norm),
    "LpNormalization": _Operator({"axis": -1, "p": 2}, 1, 0, _lp_norm),
    "MeanVarianceNormalization": _Operator({"axes": [0, 2, 3]}, 1, 0, _mean_variance),
}
