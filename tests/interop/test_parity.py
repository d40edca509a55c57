"""N87, planted faults: the report names the layer, and the phase in which it shows."""

from __future__ import annotations

import copy
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ported import (
    BATCH_NORM,
    ENCODER,
    NET,
    Encoder,
    Net,
    TorchNet,
    channels_first,
    images,
    randomized,
    sequences,
    template,
    torch,
    torch_encoder,
)

from normjax.interop import (
    ParityReport,
    from_torch,
    linen_activations,
    parity,
    to_torch,
    torch_activations,
)

pytestmark = pytest.mark.jax_defaults
X: Any = images()


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return randomized(TorchNet())


@pytest.fixture(scope="module")
def theirs(model: Any) -> dict[str, Any]:
    """Activations in both modes, and the state after one training batch."""
    x = channels_first(X)
    found: dict[str, Any] = {
        phase: torch_activations(model, x, train=phase == "train")
        for phase in ("eval", "train")
    }
    before = copy.deepcopy(model.state_dict())
    after = copy.deepcopy(model).train()
    with torch.no_grad():
        after(x)
    # Neither hooks nor modes nor statistics of the model itself have changed.
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    return {**found, "update": after.state_dict()}


def compared(theirs: Any, flax: nn.Module, variables: Any, phase: str) -> ParityReport:
    ours = linen_activations(flax, variables, jnp.asarray(X), phase == "train")
    words: Any = {"phase": phase, "names": NET["names"], "channels": "first"}
    return parity(theirs[phase], ours, **words)


def converted(model: Any) -> Any:
    return from_torch(model, template(Net(), X, False), **NET)


def test_a_stored_variance_that_was_converted_shows_in_eval(model, theirs):
    """(n − 1)/n of a variance that is right as it is: wrong before any update."""
    variables = converted(model)
    stats = variables["batch_stats"]["layer1"]["bn2"]
    stats["var"] = stats["var"] * (383 / 384)
    first = compared(theirs, Net(), variables, "eval").first
    assert first is not None
    assert (first.phase, first.layer) == ("eval", "layer1/bn2")
    assert first.theirs == "layer1/bn2"
    assert 1e-4 < first.relative < 2e-3


def test_how_statistics_are_stored_shows_after_an_update(model, theirs):
    """Flax's ddof in the first layer, momentum as it is in all others.

    A training batch agrees to rounding; only the new state differs.
    """
    plain = BATCH_NORM.replace(**{"running.ddof": 0})
    flax = Net(first=plain, norm=BATCH_NORM.replace(**{"running.decay": 0.1}))
    variables, x = converted(model), jnp.asarray(X)
    report = compared(theirs, flax, variables, "train")
    assert report.ok
    _, state = jax.jit(
        lambda variables: flax.apply(variables, x, True, mutable=["batch_stats"])
    )(variables)
    after = to_torch({**variables, **state}, model, **NET)
    report = report + parity(theirs["update"], after, phase="update")
    found = [row.layer for row in report.rows if not row.ok]
    norms = ("layer1/bn1", "layer1/bn2", "layer2/bn1", "layer2/bn2")
    expected = [
        f"{norm}/running_{name}"
        for norm in (*norms, "layer2/downsample/1")
        for name in ("mean", "var")
    ]
    assert found == ["bn1/running_var", *expected]
    assert "differ, first in update: bn1/running_var" in str(report)


def test_a_transposed_square_kernel_is_named(model, theirs):
    """fc2 is (5, 5): every shape fits."""
    variables = converted(model)
    dense = variables["params"]["fc2"]
    dense["kernel"] = dense["kernel"].T
    report = compared(theirs, Net(), variables, "eval")
    assert [row.layer for row in report.rows if not row.ok] == ["fc2", ""]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_another_epsilon_is_named(dtype: str):
    """1e-6 in the second layer: 4e-6 of x̂, which float32 takes for rounding."""
    module = randomized(torch_encoder(True), dtype=getattr(torch, dtype))
    x, padded = sequences(np.dtype(dtype))
    flax = Encoder(True, (1e-5, 1e-6))
    variables = from_torch(module, template(flax, x, padded), **ENCODER)
    given = {"src_key_padding_mask": torch.tensor(padded)}
    theirs = torch_activations(module, torch.tensor(x), **given)
    ours = linen_activations(flax, variables, jnp.asarray(x), jnp.asarray(padded))
    report = parity(theirs, ours, **ENCODER)
    first = report.first
    if dtype == "float32":
        assert first is None
        first = parity(theirs, ours, tolerance=1e-6, **ENCODER).first
    assert first is not None
    assert (first.layer, first.theirs) == ("layers_1/norm1", "layers/1/norm1")


def test_what_a_report_says():
    one = np.array([1.0, -4.0], np.float32)
    theirs = {"a": one, "b": one, "c": one, "n": np.array(3), "only": one}
    ours = {
        "a": np.array([1, np.nextafter(np.float32(-4), np.float32(0))], np.float32),
        "b": one[:1],
        "c": np.array([1.0, np.nan], np.float32),
        "n": np.array(3),
        "mine": one,
    }
    report = parity(theirs, ours)
    a, b, c, n = report.rows
    assert (a.error, a.relative, a.ulps) == (2.0**-22, 2.0**-24, 0.5)
    assert [row.ok for row in report.rows] == [True, False, False, True]
    assert b.error == np.inf
    assert np.isnan(c.error)
    assert n.error == 0
    assert report.first == b
    assert report.unpaired == ("only", "mine")
    assert "2 of 4 differ, first in eval: b" in str(report)
    good = parity({"a": one}, {"a": one})
    assert good.ok
    assert good.first is None
    assert str(good).endswith("1 arrays agree to rounding")
    aligned = parity({"a": one[::-1]}, {"a": one}, align=lambda _, array: array[::-1])
    assert aligned.ok
    with pytest.raises(ValueError, match=r"no array of ours \(b.* of theirs \(a"):
        parity({"a": one}, {"b": one})
    with pytest.raises(ValueError, match="tolerance is -1"):
        parity({"a": one}, {"a": one}, tolerance=-1)
    with pytest.raises(ValueError, match="channels is 'second'"):
        parity({"a": one}, {"a": one}, channels="second")


def test_a_module_that_is_called_twice_has_two_rows():
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return self.fc(self.fc(x))

    class Flax(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layer = nn.Dense(3, name="fc")
            return layer(layer(x))

    module, x = randomized(Twice()), np.ones((2, 3))
    variables = from_torch(module, template(Flax(), x))
    theirs = torch_activations(module, torch.tensor(x))
    ours = linen_activations(Flax(), variables, jnp.asarray(x))
    assert [row.layer for row in parity(theirs, ours).rows] == ["fc", "fc:1", ""]
