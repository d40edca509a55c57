"""What is known of one layer of another library."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from normjax.spec import NormSpec


@dataclass(frozen=True)
class Convention:
    """A layer of another library.

    Attributes:
        build: makes the spec from those arguments of the library's constructor that
            change it. Annotations say what each takes; one without a default has none
            in the library either.
        source: the version and the module that were read and run.
        notes: where no spec, or another than the default one, gives its numbers.
        without: parameters of ``build`` that this layer's constructor does not have.
    """

    build: Callable[..., NormSpec]
    source: str
    notes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, inspect.Parameter]:
        """What the layer's constructor takes, as far as it changes the spec."""
        found = inspect.signature(self.build).parameters
        return {name: found[name] for name in found if name not in self.without}
