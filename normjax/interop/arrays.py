"""The arrays of a model of any library by their names, and trees of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax.interop.matching import Known, Matched, Wanted, match, slashed
from normjax.interop.moves import Kind, arrived, returned

COLLECTIONS = {"params", "batch_stats"}
_TRANSPOSED = ("conv_transpose", "conv_transpose_kernel")

# What the class of a layer says about its kind, and in Keras what its name does.
_TORCH_KINDS = {
    "Linear": ("dense",),
    **{f"Conv{n}d": ("conv",) for n in "123"},
    **{f"ConvTranspose{n}d": _TRANSPOSED for n in "123"},
    "Embedding": ("embedding",),
    "MultiheadAttention": ("attention",),
}
_KERAS_KINDS = {
    "dense": ("dense",),
    "conv[123]d": ("conv",),
    "conv[123]d_?transpose": _TRANSPOSED,
    "depthwise_?conv[12]d": ("depthwise",),
}


def named(tree: Any) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """The leaves of a tree, and their paths, by names without the collection.

    Raises:
        ValueError: if the tree is no mapping, or two leaves have one name.

    Example:
        >>> named({"params": {"Dense_0": {"bias": 0.0}}})[0]
        {'Dense_0/bias': 0.0}
    """
    if not isinstance(tree, Mapping):
        raise ValueError(
            f"the variables are a {type(tree).__name__}, expected a dict: of linen's "
            "init, or nnx.to_pure_dict(nnx.state(model))"
        )
    collections = bool(tree) and set(tree) <= COLLECTIONS
    leaves: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}

    def walk(node: Any, path: tuple[Any, ...]) -> None:
        if isinstance(node, Mapping):
            for key, value in node.items():
                walk(value, (*path, key))
            return
        name = slashed("/".join(map(str, path[1:] if collections else path)))
        if name in leaves:
            raise ValueError(f"the variables have two arrays named {name}")
        leaves[name], paths[name] = node, path

    walk(tree, ())
    return leaves, paths


def to_ours(
    title: str,
    state: Mapping[str, np.ndarray],
    template: Any,
    library: Mapping[str, Kind],
    wanted: Wanted,
    known: Known,
) -> dict[str, Any]:
    """A tree like the template with the arrays of the other library.

    Raises:
        ValueError: as ``match``, or where JAX does not have the dtype.
    """
    leaves, paths = named(template)
    shapes = {name: tuple(np.shape(leaf)) for name, leaf in leaves.items()}
    given, _ = _by_slashes(state)
    matched = _match(title, given, shapes, library, wanted, known)
    found: dict[str, Any] = {}
    for move, theirs, ours in matched.links:
        array = arrived(move, given[theirs], shapes[ours])
        assert array is not None  # match has tried it
        if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            raise ValueError(
                f"{title}: {theirs} is {array.dtype}, which JAX only has with "
                "jax_enable_x64: switch it on, or cast the model to float32 first"
            )
        found[ours] = jnp.asarray(array)
    for name in matched.only_ours:
        leaf = leaves[name]
        if name.rpartition("/")[2] == "count":
            leaf = jnp.zeros(shapes[name], jnp.int32)
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{title}: {name} is ignored and the template has only its shape: give "
                "a template with arrays"
            )
        found[name] = leaf
    tree: dict[str, Any] = {}
    for name, path in paths.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = found[name]
    return tree


def to_theirs(
    title: str,
    state: Mapping[str, np.ndarray],
    variables: Any,
    library: Mapping[str, Kind],
    wanted: Wanted,
    known: Known,
) -> dict[str, np.ndarray]:
    """The arrays of the other library with our values, by its own names.

    Raises:
        ValueError: as ``match``, or if a counter, or what is one array of theirs, has
            several values here.
    """
    given = {name: np.asarray(leaf) for name, leaf in named(variables)[0].items()}
    shapes = {name: array.shape for name, array in given.items()}
    likes, originals = _by_slashes(state)
    matched = _match(title, likes, shapes, library, wanted, known)
    parts: dict[str, dict[int, np.ndarray]] = {}
    for move, theirs, ours in matched.links:
        array = returned(move, given[ours], likes[theirs].shape)
        if array is None:
            raise ValueError(
                f"{title}: {ours} goes from {given[ours].min()} to "
                f"{given[ours].max()}, and {theirs} is one number"
            )
        known_part = parts.setdefault(theirs, {}).setdefault(move.part[0], array)
        if not np.array_equal(known_part, array, equal_nan=True):
            raise ValueError(
                f"{title}: {ours} and another array of ours are both {theirs} and "
                "differ: tied arrays must be equal"
            )
    found = {
        name: np.concatenate([parts[name][k] for k in sorted(parts[name])])
        if len(parts[name]) > 1
        else next(iter(parts[name].values()))
        for name in parts
    }
    found |= {name: likes[name] for name in matched.only_theirs}
    return {originals[name]: np.asarray(found[name], order="C") for name in likes}


def _match(
    title: str,
    theirs: Mapping[str, np.ndarray],
    ours: Mapping[str, tuple[int, ...]],
    library: Mapping[str, Kind],
    wanted: Wanted,
    known: Known,
) -> Matched:
    """``match``, with what Flax's own names of layers say where theirs say nothing."""
    kinds = dict(known.kinds)
    for name in ours:
        layer = name.rpartition("/")[0]
        if re.fullmatch(r"(.*/)?Conv_\d+", layer) and "conv" in library:
            kinds.setdefault(wanted.theirs(layer), ("conv",))
    shapes = {name: array.shape for name, array in theirs.items()}
    return match(title, shapes, ours, library, wanted, replace(known, kinds=kinds))


def _by_slashes(
    state: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    return (
        {slashed(name): array for name, array in state.items()},
        {slashed(name): name for name in state},
    )


def torch_arrays(source: Any) -> dict[str, np.ndarray]:
    """The state dict of a module, or one as it is, as arrays.

    Raises:
        ValueError: if it is neither.
    """
    state = source.state_dict() if hasattr(source, "state_dict") else source
    if not isinstance(state, Mapping):
        raise ValueError(
            f"the PyTorch model is a {type(source).__name__}, expected a module or its "
            "state_dict()"
        )
    return {str(name): array_of(value) for name, value in state.items()}


def array_of(value: Any) -> np.ndarray:
    """A tensor or an array of any library, on the host."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    value = value.detach().cpu()
    if str(value.dtype) != "torch.bfloat16":  # NumPy has none of its own
        return np.asarray(value)
    torch: Any = import_module("torch")

    return np.asarray(value.contiguous().view(torch.int16)).view(jnp.bfloat16)


def tensor(array: np.ndarray) -> Any:
    """A tensor of PyTorch, of its own memory."""
    torch: Any = import_module("torch")

    if array.dtype == jnp.bfloat16:
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(array)


def torch_known(source: Any) -> Known:
    """What the classes of a module's layers say; nothing for a state dict."""
    if not hasattr(source, "named_modules"):
        return Known()
    kinds, heads = {}, {}
    for name, module in source.named_modules():
        classes = [each.__name__ for each in type(module).__mro__]
        found = [_TORCH_KINDS[each] for each in classes if each in _TORCH_KINDS]
        if found:
            kinds[slashed(name)] = found[0]
        if "MultiheadAttention" in classes:
            heads[slashed(name)] = module.num_heads
    return Known(kinds, heads)


def keras_arrays(source: Any) -> dict[str, np.ndarray]:
    """Arrays by the paths of a model's weights, or of a mapping as it is.

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(source, Mapping):
        return {str(name): np.asarray(value) for name, value in source.items()}
    if not hasattr(source, "weights"):
        raise ValueError(
            f"the Keras model is a {type(source).__name__}, expected a model or arrays "
            "by the paths of its variables"
        )
    return {weight.path: np.asarray(weight.value) for weight in source.weights}


def keras_known(source: Any, state: Mapping[str, np.ndarray]) -> Known:
    """What the classes of a model's layers say, or the names that Keras gives them."""
    classes: dict[str, str] = {}
    if hasattr(source, "_flatten_layers"):
        classes = {each.path: type(each).__name__ for each in source._flatten_layers()}
    found = {}
    for name in state:
        layer = name.rpartition("/")[0]
        by_name = re.sub(r"_\d+$", "", layer.rpartition("/")[2])
        word = classes.get(layer, by_name).lower()
        for pattern, kinds in _KERAS_KINDS.items():
            if re.fullmatch(pattern, word):
                found[layer] = kinds
    return Known(found)
