"""What leaves a layer's output unchanged: table 1 of the layer norm paper, measured.

A layer is h = N(x W) or, for a norm of the kernel, h = x N(W). Six changes of W or x;
each multiplies what is normalized by δ and adds β:

    weight matrix re-scaling    W′ = 3 W
    weight matrix re-centering  W′ = W + γ 1ᵀ: the same vector to every output's weights
    weight vector re-scaling    the weights of one output times 3
    dataset re-scaling          x′ = 3 x
    dataset re-centering        x′ = x + γ
    single case re-scaling      one case times 3

A norm with its own statistics removes them exactly when δ is one number, and β one
number (0 if nothing is subtracted), in each of its groups. At ε > 0 what remains of a
scale is, with S the divisor,

    h′ = h δ S(v)/S(δ² v),  S(v) = √(v + ε)

Reference: Ba, Kiros, Hinton, "Layer Normalization" (2016), arXiv:1607.06450.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from normjax import functional, presets
from normjax.arguments import bind
from normjax.spec import NormSpec
from normjax.statistics import Statistics
from normjax.verify.oracles import numpy_divisor
from normjax.verify.tolerance import normwise, rounding_tolerance

EPSILON = 1e-5
FACTOR = 3.0
HOLDS = 1e-9
VISIBLE = 1e-3
# Cases, positions, channels in and out.
SIZES = (8, 5, 6, 8)

# What is normalized, and of which spec: h = N(x W), x N(W), or N(x W) with statistics
# that were stored before the change.
ROWS: dict[str, tuple[str, NormSpec]] = {
    "batch norm": ("activations", presets.batch_norm()),
    "weight norm": ("kernel", presets.l2_norm(pattern="[i] o", affine=None)),
    "layer norm": ("activations", presets.layer_norm()),
    "RMS norm": ("activations", presets.rms_norm()),
    "group norm": ("activations", presets.group_norm(groups=2)),
    "instance norm": ("activations", presets.instance_norm()),
    "weight standardization": ("kernel", presets.weight_standardization(axes="i")),
    "ghost batch norm": ("activations", presets.ghost_batch_norm(ghosts=2)),
    "batch norm, stored statistics": ("stored", presets.batch_norm()),
}


@dataclass(frozen=True)
class Variation:
    """Another kernel W and dataset x, and the δ and β that they mean.

    Attributes:
        kernel: W′, (channels in, channels out).
        data: x′, (cases, positions, channels in).
        outputs: δ and β of the outputs x W, which broadcast to them.
        weights: δ and β of W.
    """

    kernel: np.ndarray
    data: np.ndarray
    outputs: tuple[np.ndarray, np.ndarray]
    weights: tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Invariance:
    """One cell: does this change leave the output of this layer as it was?

    Attributes:
        layer: a row of the table.
        change: a column.
        claimed: whether it holds, by algebra.
        exact: ‖h′ − h‖/‖h‖ at ε = 0, the largest over output channels.
        stabilized: the same at ε = 1e-5.
        predicted: the same of the closed form; None where the invariance is not
            claimed.
        error: distance of h′ from the closed form, relative to h.
        tolerance: of ``error``.
    """

    layer: str
    change: str
    claimed: bool
    exact: float
    stabilized: float
    predicted: float | None
    error: float
    tolerance: float

    @property
    def holds(self) -> bool | None:
        """As measured at ε = 0; None where it is neither kept nor visibly broken."""
        if self.exact <= HOLDS:
            return True
        return False if self.exact > VISIBLE else None

    @property
    def ok(self) -> bool:
        """Whether it is decided, as claimed, and ε does what the closed form says."""
        if self.holds is not self.claimed:
            return False
        if self.claimed:
            return bool(self.error <= self.tolerance)
        return bool(self.stabilized > VISIBLE)


def invariances(seed: int = 0) -> tuple[Invariance, ...]:
    """Measure every layer under every change, in float64, at ε = 0 and ε = 1e-5.

    Args:
        seed: of the kernel and the dataset.

    Returns:
        One ``Invariance`` for each cell, row by row.

    Example:
        >>> import normjax as nj
        >>> cells = nj.verify.invariances()
        >>> len(cells), all(cell.ok for cell in cells)
        (54, True)
        >>> [cell.change for cell in cells if cell.layer == "layer norm" and cell.holds]
        ['weight matrix re-scaling', 'weight matrix re-centering', 'dataset re-scaling',
        'single case re-scaling']

    Reference: Ba, Kiros, Hinton, "Layer Normalization" (2016), arXiv:1607.06450,
        table 1.
    """
    kernel, data, table = changes(seed)
    return tuple(
        invariance_of(layer, name, kernel, data, change)
        for layer in ROWS
        for name, change in table.items()
    )


def invariance_markdown(cells: tuple[Invariance, ...]) -> str:
    """The table that the README shows; beside "yes" what ε leaves of the change.

    Example:
        >>> invariance_markdown(invariances()).splitlines()[2][:49]
        '| batch norm | yes, up to ε: 5.8e-07 | no | yes, '
    """
    names = list(dict.fromkeys(cell.change for cell in cells))
    rows = [("layer", *names), ("---",) * (1 + len(names))]
    for layer in dict.fromkeys(cell.layer for cell in cells):
        rows.append((layer, *(_words(c) for c in cells if c.layer == layer)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _words(cell: Invariance) -> str:
    if not cell.holds:
        return "no" if cell.holds is False else "?"
    return f"yes, up to ε: {cell.stabilized:.1e}" if cell.predicted else "yes"


def changes(
    seed: int = 0, sizes: tuple[int, int, int, int] = SIZES
) -> tuple[np.ndarray, np.ndarray, dict[str, Variation]]:
    """A kernel, a dataset and the six changes of them.

    Args:
        seed: of the random numbers.
        sizes: cases, positions, channels in and out.

    Returns:
        W, x, and the columns of the table.
    """
    cases, positions, inputs, outputs = sizes
    random = np.random.default_rng(seed)
    w = random.normal(0.2, 1.0, (inputs, outputs))
    x = random.normal(0.7, 1.5, (cases, positions, inputs))
    gamma = random.normal(size=inputs)
    one, zero, a = np.ones(1), np.zeros(1), np.full(1, FACTOR)
    vector = np.where(np.arange(outputs) == 0, FACTOR, 1.0)
    case = np.where(np.arange(cases) == 0, FACTOR, 1.0)[:, None, None]
    same = (one, zero)
    return (
        w,
        x,
        {
            "weight matrix re-scaling": Variation(a * w, x, (a, zero), (a, zero)),
            "weight matrix re-centering": Variation(
                w + gamma[:, None],
                x,
                (one, (x @ gamma)[..., None]),
                (one, gamma[:, None]),
            ),
            "weight vector re-scaling": Variation(
                vector * w, x, (vector, zero), (vector, zero)
            ),
            "dataset re-scaling": Variation(w, a * x, (a, zero), same),
            "dataset re-centering": Variation(w, x + gamma, (one, gamma @ w), same),
            "single case re-scaling": Variation(w, case * x, (case, zero), same),
        },
    )


def invariance_of(
    layer: str, name: str, kernel: np.ndarray, data: np.ndarray, change: Variation
) -> Invariance:
    """One cell of the table.

    Args:
        layer: a row of ``ROWS``.
        name: of the change.
        kernel: W.
        data: x.
        change: W′ and x′.

    Returns:
        The cell.
    """
    where, spec = ROWS[layer]
    base = kernel if where == "kernel" else data @ kernel
    delta, beta = change.weights if where == "kernel" else change.outputs
    layout = bind(spec, base.shape)
    view = base.reshape(layout.view_shape)

    def constant(array: np.ndarray) -> np.ndarray | None:
        """Its one number for each group, None where there are several."""
        full = np.broadcast_to(array, base.shape).reshape(layout.view_shape)
        least, most = (f(layout.reduced, keepdims=True) for f in (full.min, full.max))
        return most if np.array_equal(least, most) else None

    scale, shift = constant(delta), constant(beta)
    claimed = bool(
        where != "stored"
        and scale is not None
        and shift is not None
        and (spec.center or not shift.any())
        and (where != "kernel" or change.data is data)
    )
    with jax.enable_x64(True):
        exact, still = (
            layer_output(where, spec.replace(epsilon=epsilon), kernel, data, change)
            for epsilon in (0.0, EPSILON)
        )
    predicted, error = None, 0.0
    if claimed and scale is not None:
        before, moved, normalized = still
        factor = stabilized_scale(spec, view, layout.reduced, scale)
        closed = (normalized.reshape(view.shape) * factor).reshape(base.shape)
        closed = data @ closed if where == "kernel" else closed
        predicted, error = distance(closed, before), distance(moved, closed)
    return Invariance(
        layer,
        name,
        claimed,
        distance(exact[1], exact[0]),
        distance(still[1], still[0]),
        predicted,
        error,
        rounding_tolerance("float64", layout.group_size + len(kernel)),
    )


def layer_output(
    where: str, spec: NormSpec, kernel: np.ndarray, data: np.ndarray, change: Variation
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """h, h′ and what was normalized for h.

    Args:
        where: what is normalized, as in ``ROWS``.
        spec: the norm.
        kernel: W.
        data: x.
        change: W′ and x′.

    Returns:
        Float64 arrays.
    """
    axes, moments = (0, 1), None
    if where == "stored":  # of the dataset as it was
        y = data @ kernel
        moments = Statistics(jnp.asarray(y.mean(axes)), jnp.asarray(y.var(axes)))

    def norm(array: np.ndarray) -> np.ndarray:
        found = functional.normalize(spec, jnp.asarray(array), moments=moments)
        return np.asarray(found)

    if where == "kernel":
        normalized = norm(kernel)
        return data @ normalized, change.data @ norm(change.kernel), normalized
    normalized = norm(data @ kernel)
    return normalized, norm(change.data @ change.kernel), normalized


def stabilized_scale(
    spec: NormSpec, view: np.ndarray, axes: tuple[int, ...], scale: np.ndarray
) -> np.ndarray:
    """δ S(v)/S(δ² v) of each group: what ε leaves of a scale.

    Args:
        spec: the norm.
        view: what is normalized, as its group view.
        axes: reduced axes of the view.
        scale: δ of each group.

    Returns:
        The factor; 1 where δ is 1.
    """
    about = view.mean(axes, keepdims=True) if spec.divide == "std" else 0.0
    total = np.sum if spec.divide == "l2" else np.mean
    second = total((view - about) ** 2, axis=axes, keepdims=True)
    settings = (EPSILON, spec.epsilon_placement)
    larger = numpy_divisor(scale**2 * second, *settings)
    return scale * numpy_divisor(second, *settings) / larger


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """‖actual − expected‖/‖expected‖, the largest over output channels."""
    channels = actual.shape[-1]
    return normwise(actual.reshape(-1, channels).T, expected.reshape(-1, channels).T)
