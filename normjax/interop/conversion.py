"""Parameters and statistics of whole models: from another library to Flax, and back.

Nothing is computed: arrays are transposed, split and renamed, bit for bit. So stored
variances stay what they are. PyTorch stores n/(n − 1) of the batch's: in eval mode both
models agree, and the next update agrees only if the spec says so, as those of
``nj.interop.convention`` do (``flax.linen.BatchNorm`` stores the plain one).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from normjax.interop.arrays import (
    keras_arrays,
    keras_known,
    named,
    tensor,
    to_ours,
    to_theirs,
    torch_arrays,
    torch_known,
)
from normjax.interop.matching import Known, Wanted
from normjax.interop.moves import KERAS, TORCH, same

Names = Mapping[str, str] | None
Tree = dict[str, Any]


def from_torch(
    source: Any,
    template: Mapping[str, Any],
    *,
    names: Names = None,
    kinds: Names = None,
    flatten: Mapping[str, tuple[int, ...]] | None = None,
    ignore: Iterable[str] = (),
) -> Tree:
    """The variables of a Flax model with the arrays of a PyTorch model.

        Linear (O, I) → (I, O)       Conv (O, I/g, ...) → (..., I/g, O)
        ConvTranspose (I, O, ...) → (..., I, O), positions reversed; padding p is
            Flax's (k − 1 − p, k − 1 − p + output_padding)
        weight, bias, running_mean, running_var → scale, bias, mean, var
        in_proj of MultiheadAttention → kernels (E, heads, d) of query, key and value

    What a layer is follows from shapes and names. A square kernel could be that of a
    convolution or a transposed one: the model knows, a state dict has to be helped.

    Args:
        source: a module, or its ``state_dict()``.
        template: the Flax variables, as arrays or as shapes (``jax.eval_shape`` of
            ``init``, or ``nnx.to_pure_dict(nnx.state(model))``).
        names: our layers → theirs, for instance ``{"layers_0": "layers.0"}``; names
            that follow are kept. What is not named has the same name in both.
        kinds: our layers, or patterns of them, → ``dense``, ``conv``,
            ``conv_transpose``, ``conv_transpose_kernel`` (Flax's
            ``transpose_kernel=True``), ``embedding``, ``norm``,
            ``norm_channels_first`` (parameters over (C, ...) there and (..., C) here)
            or ``attention``.
        flatten: our dense layers that follow a flattened image → its (C, H, W), since
            Flax flattens (H, W, C).
        ignore: patterns of names on either side to leave out.

    Returns:
        A tree like the template, in the dtypes of the source. A counter
        ``num_batches_tracked`` becomes ``count``; without one it is 0.

    Raises:
        ValueError: with all that is missing, left over, or of another shape.

    Example:
        >>> import jax.numpy as jnp, numpy as np, normjax as nj
        >>> state = {"fc.weight": np.ones((6, 4)), "fc.bias": np.zeros(6)}
        >>> state = {name: v.astype(np.float32) for name, v in state.items()}
        >>> shapes = {"kernel": jnp.zeros((4, 6)), "bias": jnp.zeros(6)}
        >>> found = nj.interop.from_torch(state, {"params": {"fc": shapes}})
        >>> found["params"]["fc"]["kernel"].shape
        (4, 6)
    """
    wanted = Wanted.of(names, kinds, flatten, ignore)
    state, known = torch_arrays(source), torch_known(source)
    return to_ours("from_torch", state, template, TORCH, wanted, known)


def to_torch(
    variables: Mapping[str, Any],
    like: Any,
    *,
    names: Names = None,
    kinds: Names = None,
    flatten: Mapping[str, tuple[int, ...]] | None = None,
    ignore: Iterable[str] = (),
) -> dict[str, Any]:
    """The state dict of a PyTorch model with the arrays of a Flax model.

    It undoes ``from_torch`` bit for bit.

    Args:
        variables: of the Flax model, as arrays.
        like: the module or its ``state_dict()``. Of what Flax has no place for, the
            counters and what is ignored, its values are kept.
        names: as for ``from_torch``, and so are the others.
        kinds: as for ``from_torch``.
        flatten: as for ``from_torch``.
        ignore: as for ``from_torch``.

    Returns:
        Tensors by name, for ``module.load_state_dict``.

    Raises:
        ValueError: as ``from_torch``.

    Example:
        >>> import torch, normjax as nj  # doctest: +SKIP
        >>> module = torch.nn.Linear(4, 6)  # doctest: +SKIP
        >>> shapes = {"params": {"kernel": np.empty((4, 6)), "bias": np.empty(6)}}
        >>> variables = nj.interop.from_torch(module, shapes)  # doctest: +SKIP
        >>> state = nj.interop.to_torch(variables, module)  # doctest: +SKIP
        >>> torch.equal(state["weight"], module.weight)  # doctest: +SKIP
        True
    """
    wanted = Wanted.of(names, kinds, flatten, ignore)
    state, known = torch_arrays(like), torch_known(like)
    found = to_theirs("to_torch", state, variables, TORCH, wanted, known)
    return {name: tensor(array) for name, array in found.items()}


def from_keras(
    source: Any,
    template: Mapping[str, Any],
    *,
    names: Names = None,
    kinds: Names = None,
    ignore: Iterable[str] = (),
) -> Tree:
    """The variables of a Flax model with the arrays of a Keras model.

        gamma, beta, moving_mean, moving_variance → scale, bias, mean, var
        kernels as they are; transposed ones (..., O, I) → (..., I, O), reversed;
        depthwise ones (..., C, M) → (..., 1, C·M)

    Args:
        source: a model, or arrays by the ``path`` of their variables.
        template: as for ``from_torch``.
        names: our layers → theirs, for instance ``{"Dense_0": "dense"}``.
        kinds: as for ``from_torch``, and ``depthwise``.
        ignore: as for ``from_torch``.

    Returns:
        A tree like the template, in the dtypes of the source.

    Raises:
        ValueError: as ``from_torch``.

    Example:
        >>> import numpy as np, normjax as nj
        >>> weights = {"norm/gamma": np.float32([1, 2]), "norm/beta": np.zeros(2, "f4")}
        >>> shapes = {"scale": np.empty(2), "bias": np.empty(2)}
        >>> template = {"params": {"LayerNorm_0": shapes}}
        >>> found = nj.interop.from_keras(
        ...     weights, template, names={"LayerNorm_0": "norm"}
        ... )
        >>> found["params"]["LayerNorm_0"]["scale"].tolist()
        [1.0, 2.0]
    """
    wanted = Wanted.of(names, kinds, None, ignore)
    state = keras_arrays(source)
    known = keras_known(source, state)
    return to_ours("from_keras", state, template, KERAS, wanted, known)


def to_keras(
    variables: Mapping[str, Any],
    like: Any,
    *,
    names: Names = None,
    kinds: Names = None,
    ignore: Iterable[str] = (),
) -> dict[str, np.ndarray]:
    """The arrays of a Keras model, by path, from the variables of a Flax model.

    It undoes ``from_keras`` bit for bit; ``weight.assign(found[weight.path])`` puts
    each of ``model.weights`` in its place.

    Args:
        variables: of the Flax model, as arrays.
        like: the model, or arrays by the path of their variables.
        names: as for ``from_keras``, and so are the others.
        kinds: as for ``from_keras``.
        ignore: as for ``from_keras``.

    Returns:
        Arrays by path.

    Raises:
        ValueError: as ``from_torch``.

    Example:
        >>> import numpy as np, normjax as nj
        >>> variables = {"params": {"norm": {"scale": np.float32([1, 2])}}}
        >>> like = {"norm/scale": np.zeros(2)}  # of an RMSNormalization
        >>> nj.interop.to_keras(variables, like)["norm/scale"].tolist()
        [1.0, 2.0]
    """
    wanted = Wanted.of(names, kinds, None, ignore)
    state = keras_arrays(like)
    known = keras_known(like, state)
    return to_theirs("to_keras", state, variables, KERAS, wanted, known)


def from_flax(
    source: Mapping[str, Any],
    template: Mapping[str, Any],
    *,
    names: Names = None,
    ignore: Iterable[str] = (),
) -> Tree:
    """The variables of one Flax model for another with other names, linen or nnx.

    Args:
        source: variables, as arrays; nnx as ``nnx.to_pure_dict(nnx.state(model))``.
        template: as for ``from_torch``.
        names: layers of the template → those of the source.
        ignore: as for ``from_torch``.

    Returns:
        A tree like the template. A counter that the source does not have is 0.

    Raises:
        ValueError: as ``from_torch``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> linen = {"params": {"Dense_0": {"kernel": jnp.ones((4, 6))}}}
        >>> nnx = {"head": {"kernel": jnp.zeros((4, 6))}}
        >>> found = nj.interop.from_flax(linen, nnx, names={"head": "Dense_0"})
        >>> found["head"]["kernel"][0, 0].item()
        1.0
    """
    wanted = Wanted.of(names, None, None, ignore)
    state = {name: np.asarray(leaf) for name, leaf in named(source)[0].items()}
    leaves = {name.rpartition("/")[2] for name in {*state, *named(template)[0]}}
    return to_ours("from_flax", state, template, same(leaves), wanted, Known())
