"""Faults of models beyond one layer, each found at its layer and step."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import normjax as nj
from normjax.diagnosis.companions import _moved

pytestmark = pytest.mark.jax_defaults

_, MODES, _, DERIVATIVE, PRECISION, COUPLING, CONFIGURATION = nj.diagnosis.STEPS
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 6)).astype(np.float32)
SEQUENCES = RNG.normal(size=(4, 5, 8)).astype(np.float32)
CONSTANT = RNG.normal(size=6).astype(np.float32)
VALID = np.arange(5) < np.array([[5], [3], [2], [4]])


class Rooted(nn.Module):
    """Takes the root of the deviation from itself between its norms."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name="first")(x)
        x = x + jnp.sqrt(jnp.abs(x - jax.lax.stop_gradient(x)))
        return nn.LayerNorm(name="second")(nn.Dense(6)(x))


class Deep(nn.Module):
    """A factor in front of every layer beside a constant, and nothing skips it."""

    factor: float

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = nn.LayerNorm(name=f"norm_{i}")(x)
            x = self.factor * nn.Dense(6)(x) + CONSTANT
        return x


class Amplified(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(epsilon=1e-12, name="norm")(x * 1e-5)


class Between(nn.Module):
    """An offset that float32 holds and bfloat16 does not, between two norms."""

    @nn.compact
    def __call__(self, x):
        x = nj.linen.LayerNorm(name="first")(x) + 300.0
        return nj.linen.LayerNorm(name="second")(nn.Dense(6)(x - 300.0) + x - 300.0)


class Dropped(nn.Module):
    behind: bool = False

    @nn.compact
    def __call__(self, x, train: bool):
        drop = nn.Dropout(0.5, deterministic=not train)
        x = nn.relu(nn.Dense(32)(x))
        x = x if self.behind else drop(x)
        x = nn.BatchNorm(not train, name="bn")(nn.Dense(8)(x))
        return drop(x) if self.behind else x


class InARow(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RMSNorm(name="second")(nn.LayerNorm(name="first")(x))


class Unsorted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(reduction_axes=(2, 1), name="norm")(x)


class Attends(nn.Module):
    scale: float
    normalize_qk: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name="norm")(x) * self.scale
        return nn.MultiHeadDotProductAttention(
            2, normalize_qk=self.normalize_qk, name="attention"
        )(x)


class AttendsNnx(nnx.Module):
    def __init__(self, scale: float, rngs: nnx.Rngs):
        self.scale = scale
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

    def __call__(self, x):
        return self.attention(self.norm(x) * self.scale)


class Padded(nn.Module):
    """A batch norm over positions that may know which are valid."""

    masked: bool

    @nn.compact
    def __call__(self, x, mask, train: bool):
        x = nn.Dense(8)(x)
        own = mask[..., None] if self.masked else None
        x = nn.BatchNorm(not train, name="bn")(x, mask=own)
        return nn.LayerNorm(name="ln")(nn.relu(x))


class Mixing(nn.Module):
    """A mean over positions, padding included, behind a norm that knows them."""

    @nn.compact
    def __call__(self, x, mask):
        x = nn.LayerNorm(name="first")(x)
        x = x + jnp.mean(x * mask[..., None], 1, keepdims=True)
        return nn.LayerNorm(name="second")(x)


def padded(model: Any) -> Any:
    return nj.diagnose(model, None, {"x": SEQUENCES, "mask": VALID}, mask="mask")


FAULTS: dict[str, tuple[Any, tuple[str, str, str]]] = {
    "root of zero": (
        lambda: nj.diagnose(Rooted(), None, X), ("error", DERIVATIVE, "first")),
    "vanishing": (
        lambda: nj.diagnose(Deep(1e-3), None, X), ("warning", DERIVATIVE, "norm_0")),
    "gain": (
        lambda: nj.diagnose(Amplified(), None, X), ("warning", DERIVATIVE, "norm")),
    "offset between": (
        lambda: nj.diagnose(Between(), None, X), ("warning", PRECISION, "second")),
    "repeated": (
        lambda: nj.diagnose(Dropped(True), None, X[[0, 1, 2, 3] * 4]),
        ("warning", COUPLING, "bn")),
    "padding": (lambda: padded(Padded(False)), ("error", COUPLING, "bn")),
    "NaN under the mask": (lambda: padded(Mixing()), ("warning", COUPLING, "second")),
    "dropout": (
        lambda: nj.diagnose(Dropped(), None, X), ("warning", CONFIGURATION, "bn")),
    "in a row": (
        lambda: nj.diagnose(InARow(), None, X), ("warning", CONFIGURATION, "second")),
    "unsorted": (
        lambda: nj.diagnose(Unsorted(), None, SEQUENCES),
        ("warning", CONFIGURATION, "norm")),
    "logits": (
        lambda: nj.diagnose(Attends(20.0), None, SEQUENCES),
        ("warning", CONFIGURATION, "attention")),
    "logits in nnx": (
        lambda: nj.diagnose(AttendsNnx(20.0, nnx.Rngs(0)), None, SEQUENCES),
        ("warning", CONFIGURATION, "attention")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_model_is_found_at_its_layer_and_step(name: str):
    run, expected = FAULTS[name]
    found = [(each.severity, each.step, each.path) for each in run().findings]
    assert expected in found, found


HEALTHY = {
    "deep": lambda: nj.diagnose(Deep(1.0), None, X),
    "dropout behind": lambda: nj.diagnose(Dropped(True), None, X),
    "masked": lambda: padded(Padded(True)),
    "attention": lambda: nj.diagnose(Attends(1.0), None, SEQUENCES),
    "QK-norm": lambda: nj.diagnose(Attends(20.0, True), None, SEQUENCES),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_the_same_model_without_the_fault_has_notes_at_most(name: str):
    found = HEALTHY[name]().findings
    assert [each for each in found if each.severity != "note"] == []


def test_an_encoder_that_leaves_padding_out_is_healthy():
    model = nj.layers.examples.Encoder(features=3, width=8, depth=1)
    found = nj.diagnose(model, None, {"x": SEQUENCES, "mask": VALID}, mask="mask")
    assert found.ok, found.findings


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([0.0, 0.0], [0.0, 3.0], 1.0),
        ([1.0, 1.0], [1.0, np.nan], np.inf),
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
    ],
)
def test_rows_of_zeros_and_nan_move(before: Any, after: Any, expected: float):
    first = np.array([True])
    assert _moved(np.array([before]), np.array([after]), first) == expected


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        def step(module: Any, x: Any, _: Any) -> tuple[Any, None]:
            del module
            x = nn.BatchNorm(not train, name="bn")(nn.Dense(6)(x))
            return x, None

        scan = nn.scan(
            step,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=2,
        )
        return scan(self, x, None)[0]


def test_stacked_layers_are_named_as_unchecked():
    found = nj.diagnose(Scanned(), None, X).findings
    notes = {(each.step, each.path, each.what) for each in found}
    assert (MODES, "bn", "stored statistics are not checked") in notes


def test_decay_is_blamed_on_a_norm_that_it_reaches():
    import optax

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(6)(nn.LayerNorm(name="first")(x))
            return nn.LayerNorm(name="second")(x)

    def only_second(params: Any) -> Any:
        return {
            name: jax.tree.map(lambda _, on=name == "second": on, each)
            for name, each in params.items()
        }

    optimizer = optax.adamw(1e-3, mask=only_second)
    found = nj.diagnose(Two(), None, X, optimizer=optimizer).findings
    (decay,) = (each for each in found if "decay" in each.what)
    assert (decay.path, decay.numbers["arrays"]) == ("second", 2)


@pytest.mark.parametrize(
    ("mask", "message"),
    [("valid", "mask is 'valid', expected an argument"), (VALID[:2], "mask has shape")],
)
def test_a_mask_that_does_not_fit_is_one_clear_line(mask: Any, message: str):
    with pytest.raises(ValueError, match=message):
        nj.diagnose(Mixing(), None, {"x": SEQUENCES, "mask": VALID}, mask=mask)
