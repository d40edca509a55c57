"""Stored statistics are read through the outputs of inference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy_layers import B, W

import normjax as nj
from normjax.auditing import Audit, adapt_step

pytestmark = pytest.mark.jax_defaults
SHAPE = (5, 4)
GAIN, BIAS = W[:4].astype(np.float32), B[:4].astype(np.float32)


def batch_norm(
    keep: float | None = 0.9,
    *,
    ddof: int = 0,
    start: tuple[float, float] = (0, 1),
    debias: bool = False,
    copy_first: bool = False,
    stuck: bool = False,
    skip: bool = False,
    always: bool = False,
    use_stored: bool = False,
):
    """A step in float32 that shares no code with the library; keep None: cumulative."""

    def updated(state: Any, x: np.ndarray) -> Any:
        count, mean, variance = state
        new = x.astype(np.float64).mean(0), x.astype(np.float64).var(0, ddof=ddof)
        if stuck or (skip and not np.isfinite(new).all()):
            return state
        rate = 1 / (count + 1) if keep is None else 1 - keep
        rate = 1.0 if copy_first and count == 0 else rate
        return (
            count + 1,
            mean + rate * (new[0] - mean),
            variance + rate * (new[1] - variance),
        )

    def step(state: Any, x: np.ndarray, train: bool) -> tuple[np.ndarray, Any]:
        after = updated(state, x) if train or always else state
        count, mean, variance = after if train else state
        if debias and keep is not None:
            with np.errstate(all="ignore"):
                share = 1 - np.float64(keep) ** count
                mean, variance = mean / share, variance / share
        if train and not use_stored:
            mean, variance = x.mean(0), x.var(0)
        with np.errstate(all="ignore"):
            y = (x - mean) / np.sqrt(variance + 1e-5) * GAIN + BIAS
        return y.astype(np.float32), after

    initial = (0, np.full(4, start[0], float), np.full(4, start[1], float))
    return adapt_step(step, initial, SHAPE, train=True)


def audited(*args: Any, **options: Any) -> Audit:
    with np.errstate(all="ignore"):
        return nj.audit(batch_norm(*args, **options))


@pytest.mark.parametrize(
    ("options", "running"),
    [
        ({}, nj.Running(decay=0.9)),
        ({"keep": 0.999}, nj.Running(decay=0.999)),
        ({"keep": 0.0}, nj.Running(decay=0.0)),
        ({"ddof": 1}, nj.Running(decay=0.9, ddof=1)),
        ({"keep": 0.99, "ddof": 1}, nj.Running(decay=0.99, ddof=1)),
        ({"keep": None}, nj.Running(average="cumulative")),
        ({"start": (0.5, 2)}, nj.Running(decay=0.9, initial=(0.5, 2.0))),
        (
            {"debias": True, "start": (0, 0)},
            nj.Running(decay=0.9, debias=True, initial=(0.0, 0.0)),
        ),
        ({"skip": True}, nj.Running(decay=0.9, nonfinite="skip")),
    ],
)
def test_the_stored_statistics_are_declared(options: Any, running: nj.Running):
    found = audited(**options)
    assert found.spec is not None, found.differs
    declared = found.spec.running
    assert declared is not None
    assert declared.decay == pytest.approx(running.decay, abs=3e-5)
    assert declared.replace(decay=running.decay) == running
    assert not found["running"].defect
    assert found["running"].facts["training_uses"] == "the batch"


@pytest.mark.parametrize(
    ("options", "says", "differs"),
    [
        (
            {"debias": True},
            "VARIANCE DEBIASED FROM A START AT 1",
            "debiases a variance that does not start at 0",
        ),
        ({"always": True}, "INFERENCE UPDATES IT", "inference updates what is stored"),
        ({"stuck": True}, "training does not update it", "stores statistics by no"),
        (
            {"use_stored": True, "copy_first": True},
            "TRAINING NORMALIZES WITH WHAT IS STORED AFTER THE UPDATE",
            "stores a copy of the first batch",
        ),
    ],
)
def test_what_is_stored_wrongly_is_named(options: Any, says: str, differs: str):
    found = audited(**options)
    assert says in found["running"].value
    assert found["running"].defect
    assert found.spec is None
    assert found.differs[0].startswith(differs)


def test_planted_stored_ddof_that_is_not_the_one_that_normalizes():
    found = audited(ddof=1)
    assert (found["ddof"].value, found["running"].facts["stored_ddof"]) == ("0", 1)
    assert "stores ddof 1" in found["running"].value
    assert found["running"].facts["factor"] == pytest.approx(5 / 4, abs=1e-3)


def test_layers_that_store_differently_are_not_the_same():
    spec = nj.batch_norm(affine=None, running=nj.Running(decay=0.9))
    other = spec.replace(**{"running.ddof": 1})
    found = nj.equivalent(spec, other, SHAPE, train=True)
    assert (found.same, found.property) == (False, "running")
    assert "stores ddof 0" in found.first
    assert "stores ddof 1" in found.second
    assert nj.equivalent(spec, spec.replace(), SHAPE, train=True).same
