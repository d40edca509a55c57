"""What an audit calls: one layer of any library, on NumPy arrays, counted."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from normjax.layers.found import LAYER_SWITCHES


class TargetError(ValueError):
    """A target that cannot be audited: what was got, what is expected, the fix."""


class CallError(Exception):
    """The callable raised on a probe; for an audit that is a result.

    Attributes:
        kind: the name of the exception's class.
        message: its first line.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Calls(NamedTuple):
    """How a target is called; all arrays are NumPy's.

    Attributes:
        forward: ``forward(state, x, mask, train)`` returns y and the next state, and
            leaves the given one as it is.
        jacobian: ``jacobian(state, x, mask, train)`` returns ∂y/∂x, in the shape of y
            and then of x; None where there is no automatic differentiation.
        shape_of: ``shape_of(state, x, train)`` returns the shape of y, or raises, and
            computes nothing; None where only a call can tell.
    """

    forward: Callable[[Any, np.ndarray, Any, bool], tuple[np.ndarray, Any]]
    jacobian: Callable[[Any, np.ndarray, Any, bool], np.ndarray] | None = None
    shape_of: Callable[[Any, np.ndarray, bool], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Target:
    """A callable under audit.

    Attributes:
        name: as it is printed.
        shape: of x.
        dtype: of x; a call may be given others.
        how: the way it is called.
        parameters: its learned arrays by name; None if they are not known.
        state: what it stores before the first call; None if it stores nothing.
        accepts_mask: whether it takes a mask.
        mask_axes: the axes along which the mask may vary; None is all.
        train: the mode of a plain call.
        counter: one number, the calls so far; shared with resized copies.

    Example:
        >>> from normjax.auditing.adapters import adapt
        >>> target = adapt(lambda x: x - x.mean(-1, keepdims=True), shape=(2, 2))
        >>> print(target(np.array([[1, 3], [2, 2]], np.float32)), target.calls)
        [[-1.  1.]
         [ 0.  0.]] 1
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    how: Calls
    parameters: dict[str, np.ndarray] | None = None
    state: Any = None
    accepts_mask: bool = False
    mask_axes: tuple[int, ...] | None = None
    train: bool = False
    counter: list[int] = field(default_factory=lambda: [0], repr=False)

    @property
    def calls(self) -> int:
        """How often it was called, resized copies and derivatives included."""
        return self.counter[0]

    @property
    def has_state(self) -> bool:
        """Whether it stores something from call to call."""
        return self.state is not None

    @property
    def has_jacobian(self) -> bool:
        """Whether its derivative can be asked for."""
        return self.how.jacobian is not None

    @cached_property
    def resizable(self) -> tuple[int, ...]:
        """The axes that may be twice as long with the same parameters."""
        longer = [
            tuple(n * (1 + (a == axis)) for a, n in enumerate(self.shape))
            for axis in range(len(self.shape))
        ]
        return tuple(a for a, shape in enumerate(longer) if self.resized(shape))

    def __call__(self, x: np.ndarray, *, mask: np.ndarray | None = None) -> np.ndarray:
        """y on the state before the first call.

        Args:
            x: an array of the shape, or of another one to see what happens.
            mask: true where valid, in x's shape.

        Returns:
            y, as the callable gives it.

        Raises:
            CallError: if the callable raises.
        """
        return self._counted(self.how.forward, x, self._mask(mask))[0]

    def initial(self) -> Any:
        """What is stored before the first call."""
        return self.state

    def step(self, state: Any, x: np.ndarray, train: bool) -> tuple[np.ndarray, Any]:
        """One call that also gives what is stored after it; ``state`` stays as it is.

        Args:
            state: from ``initial`` or from an earlier step.
            x: the input.
            train: whether it is called as in training.

        Returns:
            y and the next state.

        Raises:
            CallError: if the callable raises.
        """
        return self._counted(self.how.forward, x, None, state=state, train=train)

    def jacobian(
        self, x: np.ndarray, *, mask: np.ndarray | None = None
    ) -> np.ndarray | None:
        """∂y/∂x by the library's own automatic differentiation.

        Args:
            x: the input.
            mask: true where valid, in x's shape.

        Returns:
            An array (y.size, x.size), or None where there is no derivative.

        Raises:
            CallError: if the callable, or its derivative, raises.
        """
        if self.how.jacobian is None:
            return None
        found = self._counted(self.how.jacobian, x, self._mask(mask))
        return np.asarray(found).reshape(-1, x.size)

    def check(self) -> tuple[int, ...]:
        """See that the callable takes its shape.

        Returns:
            The shape of y.

        Raises:
            TargetError: if it raises, with what it says.
        """
        x = np.ones(self.shape, self.dtype)
        call = self.how.shape_of or self._shape_by_call
        try:
            with self._quiet(x):
                return tuple(call(self.state, x, self.train))
        except Exception as error:
            raise TargetError(
                f"{self.name} refuses an input of shape {self.shape} and dtype "
                f"{self.dtype}: {said(error)}"
            ) from error

    def resized(self, shape: tuple[int, ...]) -> Target | None:
        """The same layer with the same parameters on another shape.

        Args:
            shape: of x.

        Returns:
            The target, or None if the layer refuses the shape.
        """
        other = replace(self, shape=shape)
        try:
            return other if other.check() == shape else None
        except TargetError:
            return None

    def _shape_by_call(self, state: Any, x: np.ndarray, train: bool) -> tuple[int, ...]:
        self.counter[0] += 1
        return self.how.forward(state, x, None, train)[0].shape

    def _counted(
        self,
        call: Callable,
        x: np.ndarray,
        mask: np.ndarray | None,
        state: Any = None,
        train: bool | None = None,
    ) -> Any:
        state = self.state if state is None else state
        train = self.train if train is None else train
        self.counter[0] += 1
        try:
            with self._quiet(x):
                return call(state, x, mask, train)
        except Exception as error:
            raise CallError(type(error).__name__, said(error)) from error

    @contextlib.contextmanager
    def _quiet(self, x: np.ndarray):
        """JAX's 64-bit types for float64; what overflows is seen in y."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(np.errstate(all="ignore"))
            if np.float64 in (x.dtype, self.dtype):
                stack.enter_context(jax.enable_x64(True))
            yield

    def _mask(self, mask: np.ndarray | None) -> np.ndarray | None:
        """Reduced to the axes along which it may vary."""
        if mask is None or self.mask_axes is None:
            return mask
        kept = [slice(None) if a in self.mask_axes else 0 for a in range(mask.ndim)]
        return mask[tuple(kept)]


def mode_arguments(call: Callable, train: bool) -> dict[str, Any]:
    """The arguments of a call that say whether it is training.

    Example:
        >>> mode_arguments(lambda x, deterministic: x, train=True)
        {'deterministic': False}
    """
    names = argument_names(call)
    return {word: train == on for word, on in LAYER_SWITCHES.items() if word in names}


def argument_names(call: Callable) -> tuple[str, ...]:
    """The names that a callable takes; none if they are not known."""
    try:
        return tuple(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return ()


def one_array(y: Any) -> Any:
    """Refuse what is not one array.

    Raises:
        TypeError: with what was returned.
    """
    if not hasattr(y, "shape"):
        raise TypeError(f"returned a {type(y).__name__}, expected one array")
    return y


def said(error: Exception) -> str:
    """The first line of what an exception says, or its class."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
