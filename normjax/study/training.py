"""The built-in experiment: train a model on a task and measure."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from pydantic import Field
from pydantic import model_validator as _validator

from normjax.study import interventions, metrics, schema
from normjax.study.cells import Cell, Curve, stream
from normjax.study.models import MLP, ModelSettings, digests, initialize
from normjax.study.tasks import TASKS, Split, TaskSettings, split

SEEDED = True
MANIPULATIONS = interventions.TRAINING
LABELS = {
    "coordinate": "step",
    "test_r2": "test R²",
    "test_loss": "test loss",
    "train_loss": "training loss",
    "grad_norm": "gradient norm",
    "weight_norm": "weight norm",
    "stabilizer_share": "stabilizer share ρ",
    "level_r2": "level read from the head's input, R²",
}


class OptimizerSettings(schema.Settings):
    """An optax optimizer; ``momentum`` is for sgd, ``weight_decay`` for adamw."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float = Field(default=0.01, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)

    def build(self) -> optax.GradientTransformation:
        """The optax transformation."""
        if self.name == "sgd":
            return optax.sgd(self.learning_rate, momentum=self.momentum or None)
        if self.name == "adam":
            return optax.adam(self.learning_rate)
        return optax.adamw(self.learning_rate, weight_decay=self.weight_decay)


class Settings(schema.Settings):
    """What a training study can vary; ``batch_size: null`` is the full batch."""

    task: TaskSettings = TaskSettings()
    model: ModelSettings = ModelSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    steps: int = Field(default=400, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    record_every: int = Field(default=20, ge=1)

    @_validator(mode="after")
    def _batches(self) -> Settings:
        if self.batch_size is not None and self.batch_size > self.task.train:
            text = (
                f"expected at most task.train, {self.task.train}, got {self.batch_size}"
            )
            raise schema.problem("batch_size", text)
        return self


class TrainingState(NamedTuple):
    """What one training step hands to the next."""

    variables: dict[str, Any]
    optimizer: Any
    step: Array
    diverged_at: Array


class Problem(NamedTuple):
    """A split with the side route's feature of both parts."""

    data: Split
    train_level: Array
    test_level: Array


def shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Shape of the input of the norm, for the comparison of arms."""
    task = TASKS[settings.task.name]()
    norm = settings.model.norm
    hidden = norm is not None and norm.at == "hidden"
    width = settings.model.widths[0] if hidden else task.inputs.shape[1]
    return {"model.norm": (settings.batch_size or settings.task.train, width)}


def data() -> dict[str, str]:
    """SHA-256 of every task's data."""
    return {name: load().digest for name, load in TASKS.items()}


def measure(cell: Cell, key: Array) -> dict[str, Any]:
    """Train one seed and return outcomes, diagnostics, curves and manipulation checks.

    Streams of the key: ``data`` (the split), ``init`` (each leaf by its path),
    ``order`` (batches), ``shuffle`` (the shuffled side route).

    Args:
        cell: the arm.
        key: of the seed.

    Returns:
        ``test_r2``, ``test_loss``, ``train_loss``, ``grad_norm``, ``weight_norm``,
        ``stabilizer_share``, ``level_r2`` at the end; ``diverged_at``, the first step
        whose loss was not finite (NaN if none was); curves; and ``check.*`` at the
        start.
    """
    settings: Settings = cell.settings
    problem = _problem(settings, key)
    model, optimizer = MLP(settings.model), settings.optimizer.build()
    first = (problem.data.train_x, problem.train_level, True)
    variables = initialize(model, stream(key, "init"), *first)
    variables.pop("intermediates", None)
    start = TrainingState(
        variables, optimizer.init(variables["params"]), jnp.int32(0), jnp.int32(-1)
    )
    step = _step(settings, model, optimizer, problem, stream(key, "order"))

    def stretch(state: TrainingState, _):
        state, _ = jax.lax.scan(step, state, None, settings.record_every)
        found = _evaluate(model, state.variables, problem)
        return state, (state.step, found)

    records, rest = divmod(settings.steps, settings.record_every)
    end, (steps, recorded) = jax.lax.scan(stretch, start, None, records)
    if rest or not records:
        end, _ = jax.lax.scan(step, end, None, rest)
        final = _evaluate(model, end.variables, problem)
    else:
        final = {name: values[-1] for name, values in recorded.items()}
    curves = {
        f"curve.{name}": Curve(steps, recorded[name])
        for name in ("train_loss", "test_r2", "grad_norm")
    }
    diverged = jnp.where(end.diverged_at < 0, jnp.nan, end.diverged_at)
    return {
        **final,
        **_diagnose(settings, model, end.variables, problem),
        "diverged_at": diverged,
        **curves,
        **_checks(settings, model, start.variables, problem),
    }


def _problem(settings: Settings, key: Array) -> Problem:
    """Split, and the level: the mean over features of the scaled raw input."""
    parts = split(settings.task, stream(key, "data"))
    levels = [parts.train_x.mean(1), parts.test_x.mean(1)]
    if settings.model.side_route_shuffled:
        keys = jax.random.split(stream(key, "shuffle"))
        levels = [
            jax.random.permutation(k, v) for k, v in zip(keys, levels, strict=True)
        ]
    return Problem(parts, *levels)


def _loss(model: MLP, variables, x: Array, level: Array, y: Array, train: bool):
    """Mean squared error, predictions, and the updated statistics."""
    prediction, changed = model.apply(
        variables, x, level, train, mutable=["batch_stats"]
    )
    return jnp.mean((prediction - y) ** 2), (prediction, changed)


def _step(settings: Settings, model: MLP, optimizer, problem: Problem, order: Array):
    """One optimizer step, as ``lax.scan`` wants it."""
    n, size = settings.task.train, settings.batch_size
    parts = (problem.data.train_x, problem.train_level, problem.data.train_y)

    def step(state: TrainingState, _):
        batch = parts
        if size is not None and size < n:
            epoch, place = jnp.divmod(state.step, n // size)
            shuffled = jax.random.permutation(jax.random.fold_in(order, epoch), n)
            chosen = jax.lax.dynamic_slice(shuffled, (place * size,), (size,))
            batch = tuple(part[chosen] for part in parts)

        def loss(params):
            x, level, y = batch
            return _loss(
                model, {**state.variables, "params": params}, x, level, y, True
            )

        (value, (_, changed)), gradient = jax.value_and_grad(loss, has_aux=True)(
            state.variables["params"]
        )
        update, inner = optimizer.update(
            gradient, state.optimizer, state.variables["params"]
        )
        params = optax.apply_updates(state.variables["params"], update)
        variables = {**state.variables, **changed, "params": params}
        bad = ~jnp.isfinite(value) & (state.diverged_at < 0)
        diverged_at = jnp.where(bad, state.step, state.diverged_at)
        return TrainingState(variables, inner, state.step + 1, diverged_at), None

    return step


def _evaluate(model: MLP, variables, problem: Problem) -> dict[str, Any]:
    """Losses, R² and norms with the current parameters, on the whole of each part."""
    data = problem.data

    def train_loss(params):
        current = {**variables, "params": params}
        x, level, y = data.train_x, problem.train_level, data.train_y
        return _loss(model, current, x, level, y, True)[0]

    loss, gradient = jax.value_and_grad(train_loss)(variables["params"])
    test_loss, (prediction, _) = _loss(
        model, variables, data.test_x, problem.test_level, data.test_y, False
    )
    return {
        "test_r2": metrics.r2(prediction, data.test_y),
        "test_loss": test_loss,
        "train_loss": loss,
        "grad_norm": metrics.norm(gradient),
        "weight_norm": metrics.norm(variables["params"]),
    }


def _taps(model: MLP, variables, x: Array, level: Array) -> dict[str, Array]:
    """What the model sows: input and output of the first norm, input of the head."""
    kinds = ["intermediates", "batch_stats"]
    changed: Any = model.apply(variables, x, level, True, mutable=kinds)[1]
    return {name: values[0] for name, values in changed["intermediates"].items()}


def _diagnose(settings: Settings, model: MLP, variables, problem: Problem):
    """Diagnostics of the trained model."""
    data = problem.data
    train = _taps(model, variables, data.train_x, problem.train_level)
    test = _taps(model, variables, data.test_x, problem.test_level)
    return {
        "stabilizer_share": metrics.mean_stabilizer_share(
            settings.model.norm, train.get("norm_input")
        ),
        "level_r2": metrics.linear_probe(
            train["head_input"],
            data.train_x.mean(1),
            test["head_input"],
            data.test_x.mean(1),
        ),
    }


def _checks(settings: Settings, model: MLP, variables, problem: Problem):
    """What the manipulation checks need, measured before the first step."""
    data = problem.data
    taps = _taps(model, variables, data.train_x, problem.train_level)
    found: dict[str, Any] = {
        f"check.data {len(data.train_y)}": jnp.dot(
            data.train_y, jnp.arange(1.0, len(data.train_y) + 1)
        ),
        "check.examples": len(data.train_y),
        "check.side_level": metrics.correlation(
            problem.train_level, data.train_x.mean(1)
        ),
    }
    for name, value in digests(variables).items():
        found[f"check.init.{name}"] = value
    if "norm_output" in taps and settings.model.norm is not None:
        found |= interventions.norm_checks(
            settings.model.norm.spec, taps["norm_input"], taps["norm_output"]
        )
    return found
