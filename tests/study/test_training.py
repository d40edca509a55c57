"""Training against a perceptron in NumPy, and what a seed's numbers depend on."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from studies import quick_compile as quick_compile

from normjax.study import metrics, training
from normjax.study.cells import Cell, Row, program, run_block, stream
from normjax.study.models import MLP, initialize
from normjax.study.tasks import split
from normjax.study.validation import parse

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("quick_compile")]

OUTCOMES = {
    "test_r2",
    "test_loss",
    "train_loss",
    "grad_norm",
    "weight_norm",
    "stabilizer_share",
    "level_r2",
    "diverged_at",
}


def settings(**changes: Any) -> training.Settings:
    tiny = {"task": {"train": 40}, "model": {"widths": [4]}, "steps": 7}
    return parse(training.Settings, {**tiny, "record_every": 3, **changes})


def scalars(rows: list[Row], seed: int) -> dict[str, Any]:
    return {r.metric: r.value for r in rows if r.seed == seed and r.coordinate is None}


def curve(rows: list[Row], seed: int, metric: str) -> dict[float | None, float | None]:
    return {r.coordinate: r.value for r in rows if (r.seed, r.metric) == (seed, metric)}


class Net(NamedTuple):
    """Parameters of a perceptron with one hidden layer, or their gradients."""

    w: np.ndarray
    b: np.ndarray
    v: np.ndarray
    c: np.ndarray


def start(chosen: training.Settings, seed: int) -> tuple[Net, Any]:
    """The initial parameters and the split of a seed, in float64."""
    key = jax.random.key(seed)
    parts = split(chosen.task, stream(key, "data"))
    level = parts.train_x.mean(1)
    model = MLP(chosen.model)
    found = initialize(model, stream(key, "init"), parts.train_x, level, True)["params"]
    hidden, head = found["hidden_0"], found["head"]
    net = (hidden["kernel"], hidden["bias"], head["kernel"], head["bias"])
    wide = [np.asarray(part, np.float64) for part in parts]
    return Net(*(np.asarray(leaf, np.float64) for leaf in net)), wide


def forward(net: Net, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    h = np.maximum(x @ net.w + net.b, 0)
    return h, (h @ net.v + net.c)[:, 0]


def backward(net: Net, x: np.ndarray, y: np.ndarray) -> tuple[float, Net]:
    """Mean squared error and its gradient, by hand."""
    h, prediction = forward(net, x)
    error = (2 / len(y) * (prediction - y))[:, None]
    inner = (error @ net.v.T) * (h > 0)
    gradient = Net(x.T @ inner, inner.sum(0), h.T @ error, error.sum(0))
    return float(np.mean((prediction - y) ** 2)), gradient


def euclid(net: Net) -> float:
    return math.sqrt(sum(float((leaf**2).sum()) for leaf in net))


def r2(prediction: np.ndarray, y: np.ndarray) -> float:
    return 1 - float(((y - prediction) ** 2).sum() / ((y - y.mean()) ** 2).sum())


PLAIN = settings(optimizer={"name": "sgd", "learning_rate": 0.05, "momentum": 0.9})


@pytest.fixture(scope="module")
def plain() -> list[Row]:
    return run_block(training.measure, Cell("plain", PLAIN), (3, 4), 2)


@pytest.fixture(scope="module")
def by_hand() -> dict[int, dict[str, Any]]:
    """What the same training gives in NumPy, after each number of steps."""
    net, (x, y, test_x, test_y) = start(PLAIN, 4)
    speed = Net(*(0 * leaf for leaf in net))
    found = {}
    for step in range(PLAIN.steps + 1):
        loss, gradient = backward(net, x, y)
        prediction = forward(net, test_x)[1]
        found[step] = {
            "train_loss": loss,
            "grad_norm": euclid(gradient),
            "weight_norm": euclid(net),
            "test_r2": r2(prediction, test_y),
            "test_loss": float(np.mean((prediction - test_y) ** 2)),
            "heads": (forward(net, x)[0], forward(net, test_x)[0]),
        }
        speed = Net(*(g + 0.9 * s for g, s in zip(gradient, speed, strict=True)))
        net = Net(*(w - 0.05 * s for w, s in zip(net, speed, strict=True)))
    return found


def test_outcomes_are_those_that_are_documented(plain: list[Row]):
    for seed in (3, 4):
        found = scalars(plain, seed)
        assert {name for name in found if not name.startswith("check.")} == OUTCOMES
        assert found["stabilizer_share"] is None
        assert math.isnan(found["diverged_at"])
        others = OUTCOMES - {"stabilizer_share", "diverged_at"}
        assert all(math.isfinite(found[name]) for name in others)
    names = {row.metric for row in plain if row.coordinate is not None}
    assert names == {"curve.train_loss", "curve.test_r2", "curve.grad_norm"}


@pytest.mark.parametrize(
    "metric",
    ["train_loss", "grad_norm", "weight_norm", "test_r2", "test_loss"],
)
def test_the_end_is_that_of_a_perceptron_by_hand(plain, by_hand, metric: str):
    """Steps that the records do not divide are trained too: 7 = 2 · 3 + 1."""
    np.testing.assert_allclose(
        scalars(plain, 4)[metric], by_hand[7][metric], rtol=2e-4, atol=1e-5
    )
    assert abs(by_hand[7][metric] - by_hand[6][metric]) > 1e-3


def test_the_level_is_read_from_the_heads_input(plain, by_hand):
    _, (x, _, test_x, _) = start(PLAIN, 4)
    heads: Any = by_hand[7]["heads"]
    parts: list[Any] = [heads[0], x.mean(1), heads[1], test_x.mean(1)]
    expected = metrics.linear_probe(*map(jnp.asarray, parts), ridge=1e-4)
    np.testing.assert_allclose(scalars(plain, 4)["level_r2"], expected, atol=1e-4)


@pytest.mark.parametrize("metric", ["train_loss", "grad_norm", "test_r2"])
def test_curves_are_recorded_on_the_way(plain, by_hand, metric: str):
    found: Any = curve(plain, 4, f"curve.{metric}")
    assert list(found) == [3.0, 6.0]
    for step in (3, 6):
        np.testing.assert_allclose(found[step], by_hand[step][metric], rtol=2e-4)


def test_checks_are_measured_before_the_first_step(plain: list[Row]):
    found = scalars(plain, 4)
    _, (_, y, *_) = start(PLAIN, 4)
    np.testing.assert_allclose(
        found["check.data 40"], y @ np.arange(1.0, 41.0), rtol=1e-4
    )
    assert found["check.init.hidden_0/kernel 4x4"] > 0
    assert (
        scalars(plain, 3)["check.init.hidden_0/kernel 4x4"]
        != (found["check.init.hidden_0/kernel 4x4"])
    )
    assert found["check.examples"] == 40
    assert found["check.init.head/bias 1"] == 0
    np.testing.assert_allclose(found["check.side_level"], 1, rtol=1e-6)
    assert not [name for name in found if name.startswith("check.norm")]


def test_stored_statistics_serve_the_test_part():
    """With frozen parameters they are (1 − decayᵗ) of the way to the batch's own."""
    norm = {"preset": "batch_norm", "at": "hidden", "running": {"decay": 0.5}}
    frozen = settings(
        model={"widths": [4], "norm": norm},
        optimizer={"learning_rate": 1e-30},
        steps=3,
        record_every=20,
    )
    rows = run_block(training.measure, Cell("a", frozen), (4,), 1)
    net, (x, y, test_x, test_y) = start(frozen, 4)
    left = 0.5**3
    hidden = x @ net.w
    mean, variance = (1 - left) * hidden.mean(0), left + (1 - left) * hidden.var(0)

    def predict(h: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return (np.maximum((h - mean) / np.sqrt(variance + 1e-5), 0) @ net.v)[:, 0]

    found = scalars(rows, 4)
    prediction = predict(test_x @ net.w, mean, variance)
    np.testing.assert_allclose(found["test_r2"], r2(prediction, test_y), atol=1e-4)
    own = predict(hidden, hidden.mean(0), hidden.var(0))
    np.testing.assert_allclose(found["train_loss"], np.mean((own - y) ** 2), 1e-4)
    share = np.mean(1e-5 / (hidden.var(0) + 1e-5))
    np.testing.assert_allclose(found["stabilizer_share"], share, rtol=1e-3)
    # No record falls into three steps, so there is no curve; the end is there.
    assert not [row for row in rows if row.coordinate is not None]
    np.testing.assert_allclose(found["check.norm_mean"], 0, atol=1e-5)


NORM = {"preset": "layer_norm"}
LAYER = settings(model={"widths": [4], "norm": NORM})


@pytest.fixture(scope="module")
def layer():
    """A program on three lanes; seed 1 has targets that overflow."""

    def poisoned(cell: Cell, key: jax.Array) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            plain = training.split

            def loud(task, data_key):
                parts = plain(task, data_key)
                bad = jax.random.key_data(key)[-1] == 1
                return parts._replace(train_y=parts.train_y * jnp.where(bad, 1e30, 1.0))

            patch.setattr(training, "split", loud)
            return training.measure(cell, key)

    cell = Cell("layer", LAYER)
    compiled = program(poisoned, cell)
    return lambda *seeds: run_block(poisoned, cell, seeds, 3, compiled)


def same(first: list[Row], second: list[Row], seed: int) -> bool:
    """Whether all numbers of a seed are equal bit for bit."""
    ours, theirs = ([r for r in rows if r.seed == seed] for rows in (first, second))
    values = [np.array([r.value for r in rows], float) for rows in (ours, theirs)]
    return len(ours) > 0 and np.array_equal(*values, equal_nan=True)


def test_a_diverged_seed_does_not_poison_its_block(layer):
    poisoned, healthy = layer(0, 1, 2), layer(0, 5, 2)
    assert scalars(poisoned, 1)["diverged_at"] == 0
    assert math.isnan(scalars(poisoned, 1)["test_r2"])
    for seed in (0, 2):
        assert same(poisoned, healthy, seed)
        assert math.isfinite(scalars(poisoned, seed)["test_r2"])
        assert math.isnan(scalars(poisoned, seed)["diverged_at"])


def test_a_seed_does_not_depend_on_its_companions_or_its_lane(layer):
    first, second = layer(0, 2, 3), layer(7, 8, 2)
    assert same(first, second, 2)
    assert scalars(first, 2)["test_r2"] != scalars(first, 3)["test_r2"]


def test_a_short_block_gives_what_a_full_one_gives(layer):
    short = layer(2)
    assert {row.seed for row in short} == {2}
    assert same(short, layer(0, 2, 3), 2)


def test_the_size_of_a_block_changes_no_more_than_the_rounding(layer):
    """Initial values are equal in bits; found: a few 1e-6 of the losses after 7 steps.

    Training amplifies it, to 1e-3 of R² after 200, so arms share the size of a block.
    """
    three = scalars(layer(0, 2, 3), 2)
    two = scalars(run_block(training.measure, Cell("a", LAYER), (0, 2), 2), 2)
    assert set(two) == set(three)
    for name, value in two.items():
        rtol = 0 if name.startswith("check.init") else 5e-5
        np.testing.assert_allclose(value, three[name], rtol, 1e-5 if rtol else 0)


def test_batches_use_each_example_once_per_epoch(monkeypatch: pytest.MonkeyPatch):
    """The gradient counts examples: with rate 1 the parameters are minus the counts."""
    chosen = settings(
        batch_size=8, task={"train": 40}, optimizer={"learning_rate": 1.0}
    )
    eye = jnp.eye(40)

    def count(_model, variables, x, _level, _y, _train):
        return jnp.sum(x @ variables["params"]), (None, {})

    monkeypatch.setattr(training, "_loss", count)
    problem: Any = training.Problem(training.Split(eye, eye[0], eye, eye[0]), eye[0],
                                    eye[0])  # fmt: skip
    optimizer = chosen.optimizer.build()
    order, model = jax.random.key(1), MLP(chosen.model)
    step = training._step(chosen, model, optimizer, problem, order)
    zero = jnp.zeros(40)
    state = training.TrainingState(
        {"params": zero}, optimizer.init(zero), jnp.int32(0), jnp.int32(-1)
    )

    def record(state, _):
        state, _ = step(state, None)
        return state, -state.variables["params"]

    counts = np.asarray(jax.lax.scan(record, state, None, 10)[1])
    batches = np.diff(counts, axis=0, prepend=0)
    assert (batches.sum(1) == 8).all()
    np.testing.assert_array_equal(counts[4], np.ones(40))
    np.testing.assert_array_equal(counts[9], np.full(40, 2.0))
    assert not np.array_equal(batches[:5], batches[5:])
    # Another seed's order is another one.
    other = training._step(chosen, model, optimizer, problem, jax.random.key(2))
    assert not np.array_equal(-other(state, None)[0].variables["params"], counts[0])


def test_the_full_batch_is_the_default():
    assert settings().batch_size is None
    assert training.shapes(settings()) == {"model.norm": (40, 4)}


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({"model": {"norm": NORM}}, (40, 4)),
        ({"model": {"widths": [8, 3], "norm": {**NORM, "at": "hidden"}}}, (40, 8)),
        ({"batch_size": 20}, (20, 4)),
    ],
)
def test_shapes_are_those_of_the_norms_input(changes: dict, shape: tuple[int, ...]):
    assert training.shapes(settings(**changes)) == {"model.norm": shape}


@pytest.mark.parametrize(
    ("optimizer", "first", "second"),
    [
        ({"name": "sgd", "learning_rate": 0.1}, -0.2, -0.2),
        ({"name": "sgd", "learning_rate": 0.1, "momentum": 0.5}, -0.2, -0.3),
        ({"name": "adam", "learning_rate": 0.1}, -0.1, -0.1),
        ({"name": "adamw", "learning_rate": 0.1, "weight_decay": 0.5}, -0.25, -0.25),
    ],
)
def test_optimizers(optimizer: dict, first: float, second: float):
    """Two updates at parameter 3 with gradient 2."""
    built = parse(training.OptimizerSettings, optimizer).build()
    parameter, gradient = jnp.float32(3.0), jnp.float32(2.0)
    state = built.init(parameter)
    for expected in (first, second):
        update, state = built.update(gradient, state, parameter)
        np.testing.assert_allclose(np.asarray(update), expected, rtol=1e-4)
