"""Two models side by side, layer by layer: the first one that differs is named."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from normjax.interop.arrays import array_of, named
from normjax.interop.matching import Wanted
from normjax.records import check_choice, check_number

# Of rounding in units of u = eps/2: 2⁹ for the sums of a layer and those before it.
_UNITS = 512


@dataclass(frozen=True)
class LayerParity:
    """One array of both models.

    Attributes:
        phase: what both did, for instance ``"eval"``.
        layer: our name.
        theirs: their name.
        largest: the largest |entry| of theirs.
        error: the largest difference; inf if the shapes differ.
        tolerance: the largest ``relative`` that counts as rounding.
        unit: distance from 1 to the next number of the narrower dtype.
    """

    phase: str
    layer: str
    theirs: str
    largest: float
    error: float
    tolerance: float
    unit: float

    @property
    def relative(self) -> float:
        """The error by the largest |entry|."""
        return self.error / self.largest if self.largest else self.error

    @property
    def ulps(self) -> float:
        """The error in units of the last place of the largest |entry|."""
        if not np.isfinite(self.largest) or not self.largest:
            return self.error / self.unit
        return self.error / (2.0 ** np.floor(np.log2(self.largest)) * self.unit)

    @property
    def ok(self) -> bool:
        """Whether the difference is rounding; NaN is not."""
        return bool(self.relative <= self.tolerance)


@dataclass(frozen=True)
class ParityReport:
    """All arrays of both models, in their order; ``print`` shows a table.

    Attributes:
        rows: one for each pair.
        unpaired: names that only one side has, which were not compared.
    """

    rows: tuple[LayerParity, ...]
    unpaired: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every difference is rounding."""
        return all(row.ok for row in self.rows)

    @property
    def first(self) -> LayerParity | None:
        """The first row that is wrong: those after it may only inherit that."""
        return next((row for row in self.rows if not row.ok), None)

    def __add__(self, other: ParityReport) -> ParityReport:
        """Of several phases, in their order."""
        return ParityReport(self.rows + other.rows, self.unpaired + other.unpaired)

    def __str__(self) -> str:
        """A table, and the first layer that is wrong."""
        head = ("", "phase", "layer", "theirs", "largest", "error", "relative", "ulps")
        table: list[tuple[str, ...]] = [head]
        for row in self.rows:
            numbers = (row.largest, row.error, row.relative)
            table.append(
                (
                    "" if row.ok else "wrong",
                    *(row.phase, row.layer or "(all)", row.theirs or "(all)"),
                    *(f"{number:.2e}" for number in numbers),
                    f"{row.ulps:.3g}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(map(str.ljust, cells, widths)).rstrip()  # type: ignore[arg-type]
            for cells in table
        ]
        first = self.first
        last = f"{len(self.rows)} arrays agree to rounding"
        if first is not None:
            wrong = sum(not row.ok for row in self.rows)
            at = f"{first.phase}: {first.layer or '(all)'}"
            last = f"{wrong} of {len(self.rows)} differ, first in {at}"
        return "\n".join([*lines, last])


def parity(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    *,
    phase: str = "eval",
    names: Mapping[str, str] | None = None,
    channels: str = "last",
    align: Callable[[str, Any], Any] | None = None,
    tolerance: float | None = None,
) -> ParityReport:
    """Compare two models array by array, in the order in which theirs come.

    A difference travels: of the arrays that differ the first one names the layer. Take
    activations in eval mode first, then those of a training batch, then state dicts
    after one update: another ε or a transposed kernel shows in the first, ddof and
    momentum of the stored statistics in the last alone.

    Args:
        theirs: arrays by name, from ``torch_activations``, or a state dict.
        ours: likewise, from ``linen_activations``, or from ``to_torch``.
        phase: what to call it.
        names: our layers → theirs, as for ``from_torch``.
        channels: ``"first"`` where theirs are (N, C, ...) and ours (N, ..., C): axis 1
            of arrays with three axes or more comes last.
        align: ``align(name, array)`` of theirs, in place of ``channels``.
        tolerance: the largest difference by the largest |entry| that is rounding;
            None: 512 u of the narrower dtype. In float32 that is 3e-5, less than what a
            wrong ε often makes: compare in float64 to be certain.

    Returns:
        ParityReport.

    Raises:
        ValueError: if no name is on both sides.

    Example:
        >>> import numpy as np, normjax as nj
        >>> x = np.array([1.0, 2.0], np.float32)
        >>> report = nj.interop.parity({"a": x, "b": x}, {"a": x, "b": x * 1.1})
        >>> print(report)  # doctest: +NORMALIZE_WHITESPACE
               phase  layer  theirs  largest   error     relative  ulps
               eval   a      a       2.00e+00  0.00e+00  0.00e+00  0
        wrong  eval   b      b       2.00e+00  2.00e-01  1.00e-01  8.39e+05
        1 of 2 differ, first in eval: b
    """
    check_choice("channels", channels, ("last", "first"))
    if tolerance is not None:
        check_number("tolerance", tolerance)
    wanted = Wanted.of(names, None, None, ())
    mine = named(ours)[0]
    paired = {}
    for name in mine:
        layer, _, leaf = name.rpartition("/")
        for theirs_name in (wanted.theirs(name), f"{wanted.theirs(layer)}/{leaf}"):
            paired.setdefault(theirs_name, name)
    other = named(theirs)[0]
    rows = []
    for name, array in other.items():
        if name not in paired:
            continue
        aligned = _aligned(name, np.asarray(array), channels, align)
        mate = paired[name]
        rows.append(_row(phase, mate, name, aligned, np.asarray(mine[mate]), tolerance))
    if not rows:
        raise ValueError(
            f"no array of ours ({', '.join(list(mine)[:4])}, ...) has a name of theirs "
            f"({', '.join(list(other)[:4])}, ...): say names="
        )
    seen = {row.theirs for row in rows} | {row.layer for row in rows}
    return ParityReport(tuple(rows), tuple(n for n in (*other, *mine) if n not in seen))


def torch_activations(
    model: Any, *args: Any, train: bool = False, **kwargs: Any
) -> dict[str, np.ndarray]:
    """What every module of a PyTorch model returned, in the order of their ends.

    The model is copied: modes and stored statistics stay as they are.

    Args:
        model: the module.
        args: its inputs.
        train: in training mode, or in eval mode.
        kwargs: more inputs.

    Returns:
        Arrays by names of modules; of a tuple its first entry. A module that was called
        again has ``name:1`` and so on; the model itself is ``""``.
    """
    model = copy.deepcopy(model).train(train)
    found: dict[str, np.ndarray] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_: Any, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if hasattr(first, "detach"):
                found[_fresh(found, name)] = array_of(first)

        return keep

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))
    model(*args, **kwargs)
    return found


def linen_activations(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, np.ndarray]:
    """What every module of a linen model returned.

    Args:
        model: the module.
        variables: as for its ``apply``; they stay as they are.
        args: its inputs.
        kwargs: more inputs.

    Returns:
        Arrays by paths of modules, as ``torch_activations`` names them.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, normjax as nj
        >>> model, x = nn.Sequential([nn.Dense(3), nn.relu]), jnp.ones((2, 4))
        >>> variables = model.init(jax.random.key(0), x)
        >>> sorted(nj.interop.linen_activations(model, variables, x))
        ['', 'layers_0']
    """
    mutable = ["intermediates", *(name for name in variables if name != "params")]
    given, tree = jax.tree.flatten((args, kwargs))
    arrays = {
        k: v for k, v in enumerate(given) if isinstance(v, jax.Array | np.ndarray)
    }

    def call(variables: Any, arrays: Mapping[int, Any]) -> Any:
        whole = [arrays.get(k, leaf) for k, leaf in enumerate(given)]
        args, kwargs = jax.tree.unflatten(tree, whole)
        words = {"capture_intermediates": True, "mutable": mutable, **kwargs}
        return model.apply(variables, *args, **words)[1]

    changed = jax.jit(call)(variables, arrays)
    found: dict[str, np.ndarray] = {}

    def walk(node: Mapping[str, Any], path: tuple[str, ...]) -> None:
        for key, value in node.items():
            if isinstance(value, Mapping):
                walk(value, (*path, key))
            elif key == "__call__":
                for output in value:
                    first = output[0] if isinstance(output, tuple) else output
                    found[_fresh(found, "/".join(path))] = np.asarray(first)

    walk(changed["intermediates"], ())
    return found


def _fresh(found: Mapping[str, Any], name: str) -> str:
    """The name, with a number if its module was called before."""
    again = sum(1 for each in found if each.partition(":")[0] == name)
    return f"{name}:{again}" if again else name


def _aligned(
    name: str, array: np.ndarray, channels: str, align: Callable[[str, Any], Any] | None
) -> np.ndarray:
    if align is not None:
        return np.asarray(align(name, array))
    turn = channels == "first" and array.ndim > 2
    return np.moveaxis(array, 1, -1) if turn else array


def _row(
    phase: str,
    layer: str,
    name: str,
    theirs: np.ndarray,
    ours: np.ndarray,
    tolerance: float | None,
) -> LayerParity:
    kinds = [jnp.finfo(a.dtype) for a in (theirs, ours) if a.dtype.kind not in "biu"]
    unit = max([float(kind.eps) for kind in kinds], default=0.0)
    if tolerance is None:
        tolerance = _UNITS * unit / 2
    one, other = theirs.astype(np.float64), ours.astype(np.float64)
    error = np.inf
    if one.shape == other.shape:
        error = float(np.abs(one - other).max(initial=0))
    largest = float(np.abs(one).max(initial=0))
    return LayerParity(phase, layer, name, largest, error, tolerance, unit or 1.0)
