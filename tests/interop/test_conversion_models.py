"""Whole PyTorch models in Flax: eval mode, and after one step of SGD."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ported import (
    ENCODER,
    NET,
    Encoder,
    Net,
    TorchNet,
    channels_first,
    images,
    randomized,
    same_arrays,
    sequences,
    template,
    torch,
    torch_encoder,
)

import normjax as nj
from normjax.interop import (
    from_torch,
    linen_activations,
    parity,
    to_torch,
    torch_activations,
)

pytestmark = pytest.mark.jax_defaults
# 1024 u: sums of up to 4·9·384 terms forth and back, in a dozen layers.
CLOSE = 1024 * 2.0**-53
RATE = 0.1
LABELS = np.array([0, 3, 1, 4, 2, 2])


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def torch_step(model: Any, loss_of: Any) -> tuple[float, Any]:
    """Loss, and a copy of the model after one step."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    return loss.item(), model


def jax_step(variables: Any, loss_of: Any) -> tuple[float, Any]:
    """Loss, and the variables after one step; what is no parameter is replaced."""

    def scalar(params: Any) -> Any:
        return loss_of({**variables, "params": params})

    (loss, state), slope = jax.jit(jax.value_and_grad(scalar, has_aux=True))(
        variables["params"]
    )
    params = jax.tree.map(lambda p, g: p - RATE * g, variables["params"], slope)
    return float(loss), {"params": params, **state}


def test_a_residual_network_in_float32():
    model = randomized(TorchNet(), dtype=torch.float32)
    flax, x = Net(), images(dtype=np.float32)
    variables = from_torch(model, template(flax, x, False), **NET)
    theirs = torch_activations(model, channels_first(x))
    ours = linen_activations(flax, variables, jnp.asarray(x), False)
    report = parity(theirs, ours, names=NET["names"], channels="first")
    assert report.ok, str(report)
    assert {row.unit for row in report.rows} == {2.0**-23}


def test_a_residual_network():
    """Every activation, the loss, every parameter and every stored statistic."""
    model = randomized(TorchNet())
    flax, x = Net(), images()
    variables = from_torch(model, template(flax, x, False), **NET)
    back = to_torch(variables, randomized(TorchNet(), 1), **NET)
    same_arrays(back, model.state_dict())
    names: Any = {"names": NET["names"], "channels": "first"}
    reports = []
    for phase, train in (("eval", False), ("train", True)):
        theirs = torch_activations(model, channels_first(x), train=train)
        ours = linen_activations(flax, variables, jnp.asarray(x), train)
        reports.append(parity(theirs, ours, phase=phase, **names))
        assert len(reports[-1].rows) == 17

    def their_loss(model: Any) -> Any:
        y = model(channels_first(x))
        return torch.nn.functional.cross_entropy(y, torch.tensor(LABELS))

    def our_loss(variables: Any) -> Any:
        y, state = flax.apply(variables, jnp.asarray(x), True, mutable=["batch_stats"])
        chosen = jnp.take_along_axis(jax.nn.log_softmax(y), LABELS[:, None], 1)
        return -chosen.mean(), state

    loss, after = torch_step(model, their_loss)
    our, new = jax_step(variables, our_loss)
    assert abs(our - loss) < CLOSE * loss
    reports.append(
        parity(
            after.state_dict(),
            to_torch(new, model, **NET),
            phase="update",
            tolerance=CLOSE,
        )
    )
    assert len(reports[-1].rows) == len(model.state_dict())
    assert new["batch_stats"]["bn1"]["count"].tolist() == [4] * 4
    for report in reports:
        assert report.ok, str(report)


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_encoder(norm_first: bool):
    """With padding, whose positions count in no attention and no loss."""
    model = randomized(torch_encoder(norm_first))
    flax = Encoder(norm_first)
    x, padded = sequences()
    variables = from_torch(model, template(flax, x, padded), **ENCODER)
    other = randomized(torch_encoder(norm_first), 1)
    same_arrays(to_torch(variables, other, **ENCODER), model.state_dict())
    given: Any = {"src_key_padding_mask": torch.tensor(padded)}
    theirs = torch_activations(model, torch.tensor(x), **given)
    ours = linen_activations(flax, variables, jnp.asarray(x), jnp.asarray(padded))
    report = parity(theirs, ours, **ENCODER)
    assert len(report.rows) == 14
    assert report.ok, str(report)
    weights = np.random.default_rng(2).normal(size=x.shape)
    weights = weights * ~padded[..., None]

    def their_loss(model: Any) -> Any:
        return (model(torch.tensor(x), **given) * torch.tensor(weights)).sum()

    def our_loss(variables: Any) -> Any:
        y: Any = flax.apply(variables, jnp.asarray(x), jnp.asarray(padded))
        return (y * weights).sum(), {}

    loss, after = torch_step(model, their_loss)
    our, new = jax_step(variables, our_loss)
    size = float(np.abs(weights).sum())
    assert abs(our - loss) < CLOSE * size
    report = parity(
        after.state_dict(),
        to_torch(new, model, **ENCODER),
        phase="update",
        tolerance=CLOSE,
    )
    assert len(report.rows) == len(model.state_dict())
    assert report.ok, str(report)


def test_the_folded_network_is_the_network():
    """Conversion and folding together: no norm is left, and eval mode agrees."""
    model = randomized(TorchNet())
    x = images()
    variables = from_torch(model, template(Net(), x, False), **NET)
    params, stats = variables["params"], variables["batch_stats"]

    def folded(conv: str, norm: str, block: str = "") -> dict[str, Any]:
        def at(tree: Any) -> Any:
            return tree[block] if block else tree

        held = at(stats)[norm]
        state = nj.running.State(held["mean"], held["var"], held["count"])
        spec = Net().norm
        return nj.interop.fold(at(params)[conv], spec, at(params)[norm], state).params

    def conv(layer: Any, x: jax.Array, stride: int = 1) -> jax.Array:
        kernel = layer["kernel"]
        edge = [(len(kernel) // 2, len(kernel) // 2)] * 2
        form = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, kernel, (stride,) * 2, edge, None, None, form
        )
        return y + layer["bias"]

    def run(x: jax.Array) -> jax.Array:
        x = jax.nn.relu(conv(folded("conv1", "bn1"), x))
        for block, stride in (("layer1", 1), ("layer2", 2)):
            y = jax.nn.relu(conv(folded("conv1", "bn1", block), x, stride))
            y = conv(folded("conv2", "bn2", block), y)
            if stride > 1:
                shortcut = folded("downsample_conv", "downsample_bn", block)
                x = conv(shortcut, x, stride)
            x = jax.nn.relu(y + x)
        x = x.reshape(len(x), 2, 2, 2, 2, 6).max((2, 4)).reshape(len(x), -1)
        fc1, fc2 = params["fc1"], params["fc2"]
        x = jax.nn.relu(x @ fc1["kernel"] + fc1["bias"])
        return x @ fc2["kernel"] + fc2["bias"]

    with torch.no_grad():
        expected = model.eval()(channels_first(x)).numpy()
    got = run(jnp.asarray(x))
    np.testing.assert_allclose(
        got, expected, rtol=0, atol=1e-13 * np.abs(expected).max()
    )
