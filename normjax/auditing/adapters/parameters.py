"""Parameters with every number different, so that the axes they vary along show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

BIASES = ("bias", "offset", "beta", "shift")


def randomized(
    parameters: Mapping[str, Any], seed: int | None = 0
) -> dict[str, np.ndarray]:
    """Gains within a half of where they start, biases normal around theirs.

    An array that starts at one number, with more than one entry, is one of the two; a
    bias is known by its name. All others stay as they are.

    Args:
        parameters: arrays by name, as the layer starts.
        seed: of the numbers; None leaves all as they are.

    Returns:
        NumPy arrays of the same names, shapes and dtypes.

    Example:
        >>> found = randomized({"scale": np.ones(3), "bias": np.zeros(3)})
        >>> bool((abs(found["scale"] - 1) <= 0.5).all()), len(set(found["bias"]))
        (True, 3)
    """
    given = {name: np.asarray(value) for name, value in parameters.items()}
    if seed is None:
        return given
    random = np.random.default_rng(seed)
    found = {}
    for name, value in sorted(given.items()):
        found[name] = value
        is_float = np.issubdtype(value.dtype, np.inexact) or value.dtype.kind == "V"
        if not is_float or value.size < 2 or (value != value.flat[0]).any():
            continue
        if any(word in name.lower() for word in BIASES):
            noise = random.normal(size=value.shape)
        else:
            noise = random.uniform(-0.5, 0.5, value.shape)
        found[name] = (value.astype(np.float64) + noise).astype(value.dtype)
    return found
