"""Data sets that ship inside packages, scaled by their training part only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import model_validator as _validator

from normjax.study.cells import fingerprint
from normjax.study.schema import Settings, problem


class TaskSettings(Settings):
    """A data set and the size of its training part; the rest is the test part."""

    name: Literal["auto_mpg"] = "auto_mpg"
    train: int = 300

    @_validator(mode="after")
    def _room(self) -> TaskSettings:
        most = len(TASKS[self.name]().targets) - 2
        if not 2 <= self.train <= most:
            text = (
                f"expected 2 to {most}, so that there is a test part, got {self.train}"
            )
            raise problem("train", text)
        return self


@dataclass(frozen=True)
class Task:
    """A regression data set.

    Attributes:
        inputs: examples × features, float64, not scaled.
        targets: one for each example.
        features: names of the columns.
        digest: SHA-256 of inputs and targets.
    """

    inputs: np.ndarray
    targets: np.ndarray
    features: tuple[str, ...]
    digest: str


class Split(NamedTuple):
    """Training and test part, scaled by statistics of the training part."""

    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array


@cache
def auto_mpg() -> Task:
    """Auto MPG: 392 complete cars (UCI; shipped by mlxtend, BSD).

    Features are log displacement, log horsepower, log weight and minus log
    acceleration: each grows with the car, so their mean after scaling is the size of
    the car. The target is the log of the mileage.
    """
    from mlxtend.data import autompg_data

    table, mileage = autompg_data()
    logs = np.log(np.asarray(table[:, 1:5], np.float64))
    inputs = logs * np.array([1.0, 1.0, 1.0, -1.0])
    targets = np.log(np.asarray(mileage, np.float64))
    names = ("log displacement", "log horsepower", "log weight", "-log acceleration")
    return Task(inputs, targets, names, fingerprint(inputs, targets))


TASKS = {"auto_mpg": auto_mpg}


def split(settings: TaskSettings, key: Array) -> Split:
    """A random split; features and targets are z-scored on the training part.

    Args:
        settings: which task, and how many training examples.
        key: of the permutation.

    Returns:
        float32 arrays.
    """
    task = TASKS[settings.name]()
    order = jax.random.permutation(key, len(task.targets))
    x = jnp.asarray(task.inputs, jnp.float32)[order]
    y = jnp.asarray(task.targets, jnp.float32)[order]
    n = settings.train
    x = (x - x[:n].mean(0)) / x[:n].std(0)
    y = (y - y[:n].mean()) / y[:n].std()
    return Split(x[:n], y[:n], x[n:], y[n:])
