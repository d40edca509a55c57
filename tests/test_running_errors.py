from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import BATCH, MOMENTS, STATE, STATISTICS, X, moments, refuse
from strategies import Bound, layouts

import normjax as nj
from normjax.spec import NormSpec, Running

LAYER = nj.layer_norm()


@pytest.mark.parametrize(
    "call",
    [
        lambda: nj.running.init(LAYER, X.shape),
        lambda: nj.running.update(LAYER, STATE, MOMENTS),
        lambda: nj.running.read(LAYER, STATE),
        lambda: nj.running.effective_weight(LAYER, STATE),
    ],
)
def test_only_a_spec_with_running_stores_statistics(call: Any):
    with refuse(f"{LAYER!r} stores no statistics: give it running=Running(decay=...)"):
        call()


@pytest.mark.parametrize(
    ("state", "new", "message"),
    [
        (MOMENTS, MOMENTS, "state is a Moments, expected State (nj.running.init)"),
        (STATE, STATE, "moments is a State, expected Moments (nj.moments)"),
        (STATE, STATISTICS, "moments is a Statistics, expected Moments (nj.moments)"),
        (
            STATE,
            moments(3),
            "state has shape (4,), expected (3,): moments of '[...] c' have shape (3,)",
        ),
        (
            STATE,
            moments(3, 4),
            "moments have 2 axes, expected those that '[...] c' maps, c: take nj",
        ),
    ],
)
def test_update(state: Any, new: Any, message: str):
    with refuse(message):
        nj.running.update(BATCH, state, new)


@pytest.mark.parametrize("read", [nj.running.read, nj.running.effective_weight])
@pytest.mark.parametrize("state", [MOMENTS, None])
def test_read(read: Any, state: Any):
    message = f"state is a {type(state).__name__}, expected State (nj.running.init)"
    with refuse(message):
        read(BATCH, state)


@pytest.mark.parametrize(
    ("states", "weights", "message"),
    [
        ([], None, "merge got no states, expected one or more"),
        (STATE, None, "states is a State, expected a list"),
        (
            [STATE, MOMENTS],
            None,
            "one of states is a Moments, expected State (nj.runni",
        ),
        (
            [STATE, STATE],
            [1.0],
            "merge got 2 states and 1 weights, expected one weight",
        ),
        (
            [STATE, jax.tree.map(lambda a: a[:3], STATE)],
            None,
            "merge got states of shapes (3,), (4,), expected one shape: they must",
        ),
    ],
)
def test_merge(states: Any, weights: Any, message: str):
    with refuse(message):
        nj.running.merge(states, weights)


@pytest.mark.parametrize(
    ("pattern", "example", "stored"),
    [
        ("... [c]", "auto", (3,)),
        ("b ... [c]", "...", (2,)),
        ("... [c]", None, (2, 3)),
        ("h w [c]", "w", (2,)),
        ("[...] c", "auto", (4,)),
        ("... a b [c]", "auto", (2, 3)),
    ],
)
def test_a_state_has_the_mapped_axes_but_the_example(pattern, example, stored):
    spec = NormSpec(pattern, example=example, running=Running())
    state = nj.running.update(spec, nj.running.init(spec, X.shape), nj.moments(spec, X))
    assert state.mean.shape == state.variance.shape == state.count.shape == stored
    assert nj.normalize(spec, X, moments=nj.running.read(spec, state)).shape == X.shape


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_a_state_fits_the_moments_of_every_layout(data: st.DataObject):
    bound: Bound = data.draw(layouts())
    pattern, shape = bound.layout.pattern, bound.layout.shape
    example = data.draw(st.sampled_from(["auto", None, *pattern.names]))
    spec = NormSpec(str(pattern), bound.sizes, example, running=Running())
    x = jax.ShapeDtypeStruct(shape, np.float32)
    own = jax.eval_shape(lambda x: nj.moments(spec, x), x)
    state = jax.eval_shape(lambda: nj.running.init(spec, shape))
    new = jax.eval_shape(lambda s, m: nj.running.update(spec, s, m), state, own)
    assert new == state
    read = jax.eval_shape(lambda s: nj.running.read(spec, s), state)
    y = jax.eval_shape(lambda x, m: nj.normalize(spec, x, moments=m), x, read)
    assert y.shape == shape
