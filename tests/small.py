"""A small batch-norm input and what belongs to it, and how a refusal is tested."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import normjax as nj


def refuse(message: str):
    """Expect a ValueError that contains the message."""
    return pytest.raises(ValueError, match=re.escape(message))


def ones(*shape: int, dtype: str = "float32") -> Any:
    """An array of ones, typed so that it may stand for any argument."""
    return np.ones(shape, dtype)


def moments(*shape: int) -> nj.Moments:
    """Moments in a shape."""
    return nj.Moments(ones(*shape), ones(*shape), ones(*shape), ones(*shape))


BATCH = nj.batch_norm()
X: Any = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
MOMENTS, STATISTICS = moments(4), nj.Statistics(ones(4), ones(4))
STATE = nj.running.State(ones(4), ones(4), ones(4, dtype="int32"))
