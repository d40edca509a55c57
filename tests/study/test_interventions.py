"""Each manipulation check holds on the right arm and fails on a planted wrong one."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.study.interventions import TRAINING, check_arm, norm_checks

pytestmark = pytest.mark.jax_defaults

SEEDS = 3
INPUTS = [
    jnp.asarray(np.random.default_rng(seed).normal(0.7, 1.5, (16, 6)), jnp.float32)
    for seed in range(SEEDS)
]


def measured(declared: nj.NormSpec, actual: nj.NormSpec) -> dict[str, np.ndarray]:
    """Checks over seeds of a layer that is declared as one and acts as another."""
    found = [norm_checks(declared, x, nj.normalize(actual, x)) for x in INPUTS]
    return {name: np.array([seed[name] for seed in found]) for name in found[0]}


def verdicts(name: str, after: Any, values: dict[str, np.ndarray]) -> list[bool]:
    change = {"name": name, "before": None, "after": after}
    found = check_arm("it", [change], values, {}, TRAINING)
    assert all(check.arm == "it" for check in found)
    return [check.ok for check in found]


CENTRED, PLAIN = nj.layer_norm(), nj.layer_norm(center=False)


def test_center():
    name = "model.norm.center"
    assert verdicts(name, True, measured(CENTRED, CENTRED)) == [True]
    assert verdicts(name, False, measured(PLAIN, PLAIN)) == [True]
    assert verdicts(name, True, measured(CENTRED, PLAIN)) == [False]
    assert verdicts(name, False, measured(PLAIN, CENTRED)) == [False]


def test_one_seed_that_is_wrong_is_enough():
    values = measured(CENTRED, CENTRED)
    values["check.norm_mean"] = values["check.norm_mean"] + np.array([0, 0, 0.3])
    assert verdicts("model.norm.center", True, values) == [False]


DIVIDE = ("std", "rms", "l2", "none")


@pytest.mark.parametrize("actual", DIVIDE)
@pytest.mark.parametrize("declared", DIVIDE)
@pytest.mark.parametrize("center", [True, False])
def test_divide(declared: str, actual: str, center: bool):
    def spec(divide: str) -> nj.NormSpec:
        return nj.layer_norm(center=center, divide=divide)

    values = measured(spec(declared), spec(actual))
    assert verdicts("model.norm.divide", declared, values) == [declared == actual]


@pytest.mark.parametrize(
    "fields",
    [
        {"epsilon": 0.5},
        {"ddof": 1},
        {"epsilon": 0.5, "epsilon_placement": "outside_sqrt"},
        {"epsilon": 4.0, "epsilon_placement": "floor_var"},
        {"epsilon": 1.5, "epsilon_placement": "floor_std"},
        {"pattern": "[b] c"},
    ],
)
@pytest.mark.parametrize("divide", ["std", "rms", "l2"])
def test_the_size_is_predicted_for_every_placement(divide: str, fields: dict):
    spec = nj.layer_norm(divide=divide).replace(**fields)
    assert verdicts("model.norm.divide", divide, measured(spec, spec)) == [True]
    other = measured(spec, spec.replace(epsilon=spec.epsilon * 20 + 1))
    assert verdicts("model.norm.divide", divide, other) == [False]


def test_the_numbers_are_those_of_numpy():
    x = INPUTS[0]
    found = norm_checks(nj.layer_norm(divide="none", center=False), x, x)
    wide = np.asarray(x, np.float64)
    largest = np.abs(wide.mean(1)).max() / np.sqrt((wide**2).mean())
    np.testing.assert_allclose(found["check.norm_mean"], largest, rtol=1e-5)
    twice = norm_checks(nj.layer_norm(divide="none", center=False), x, 2 * x + 1)
    rms = np.sqrt(((2 * wide + 1) ** 2).mean(1) / (wide**2).mean(1))
    np.testing.assert_allclose(twice["check.norm_std"], 2, rtol=1e-5)
    np.testing.assert_allclose(twice["check.norm_rms"], rms.mean(), rtol=1e-5)
    spec = nj.layer_norm(epsilon=0.5)
    share = (0.5 / (wide.var(1) + 0.5)).mean()
    found = norm_checks(spec, x, nj.normalize(spec, x))
    np.testing.assert_allclose(found["check.norm_share"], share, rtol=1e-5)


def test_present():
    name, there = "model.norm.present", {"check.norm_mean": np.zeros(SEEDS)}
    assert verdicts(name, True, there) == [True]
    assert verdicts(name, False, {}) == [True]
    assert verdicts(name, True, {}) == [False]
    assert verdicts(name, False, there) == [False]


@pytest.mark.parametrize("part", ["affine", "running"])
def test_the_presence_of_a_part_is_not_that_of_the_norm(part: str):
    there = {"check.norm_mean": np.zeros(SEEDS)}
    assert verdicts(f"model.norm.{part}.present", False, there) == []


def side_route(there: bool, r: float = 1.0) -> dict[str, np.ndarray]:
    leaf = {"check.init.side_route/kernel 1x1": np.ones(SEEDS)} if there else {}
    return {**leaf, "check.side_level": np.full(SEEDS, r)}


def test_side_route():
    name = "model.side_route"
    assert verdicts(name, "mean", side_route(True)) == [True, True]
    assert verdicts(name, "none", side_route(False)) == [True]
    assert verdicts(name, "mean", side_route(False)) == [False, True]
    assert verdicts(name, "none", side_route(True)) == [False]
    assert verdicts(name, "mean", side_route(True, r=0.98)) == [True, False]


def test_shuffled():
    name = "model.side_route_shuffled"

    def route(*r: float, examples: float = 300.0) -> dict[str, np.ndarray]:
        many = np.full(len(r), examples)
        return {"check.side_level": np.array(r), "check.examples": many}

    assert verdicts(name, True, route(0.1, -0.2, 0.05)) == [True]
    assert verdicts(name, False, route(1.0, 1.0)) == [True]
    assert verdicts(name, True, route(1.0, 1.0)) == [False]
    assert verdicts(name, True, route(0.0, 0.0, 0.35)) == [False]
    assert verdicts(name, True, route(0.0, 0.0, 0.35, examples=60.0)) == [True]
    assert verdicts(name, True, route(0.2, 0.25, 0.2)) == [False]  # a common bias
    assert verdicts(name, False, route(0.1, -0.2, 0.05)) == [False]


def start(**changes: float) -> dict[str, np.ndarray]:
    values = {"data 40": 5.0, "init.hidden_0/kernel 4x4": 0.25, "norm_mean": 9.0}
    values |= {name.replace("__", "/"): value for name, value in changes.items()}
    return {f"check.{k}": np.array([v, 2 * v, 3 * v]) for k, v in values.items()}


def test_an_arm_starts_where_its_parent_starts():
    (found,) = check_arm("it", [], start(), start(norm_mean=0.0), TRAINING)
    assert found.ok
    assert found.predicted == "all 2"
    assert found.measured == "2 of 2 identical in every seed"


@pytest.mark.parametrize("name", ["data 40", "init.hidden_0/kernel 4x4"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_another_start_is_seen_in_any_seed(name: str, seed: int):
    values = start()
    step = 1e-4 if name.startswith("data") else 1e-15
    values[f"check.{name}"][seed] *= 1 + step
    (found,) = check_arm("it", [], values, start(), TRAINING)
    assert not found.ok
    assert found.measured == "1 of 2 identical in every seed"


def test_the_data_are_compared_up_to_the_rounding_of_their_sum():
    values = start()
    values["check.data 40"] *= 1 + 1e-7
    (found,) = check_arm("it", [], values, start(), TRAINING)
    assert found.ok


def test_only_leaves_of_equal_path_and_shape_and_equal_data_are_compared():
    values = start()
    values["check.init.hidden_0/kernel 4x8"] = values.pop(
        "check.init.hidden_0/kernel 4x4"
    )
    values["check.data 20"] = values.pop("check.data 40") + 1
    assert check_arm("it", [], values, start(), TRAINING) == []


def test_what_was_measured_is_written_as_a_range():
    values = {"check.norm_mean": np.array([1e-7, 3e-7, 2e-7])}
    changes = [{"name": "norm.center", "before": False, "after": True}]
    (found,) = check_arm("it", changes, values, {}, TRAINING)
    assert found.measured == "1e-07 to 3e-07"
    assert (found.predicted, found.ok) == ("< 1e-4", True)


def test_a_property_without_a_check_has_none():
    changes = [{"name": "steps", "before": 4, "after": 5}]
    assert check_arm("it", changes, {}, {}, TRAINING) == []


def test_the_longest_end_of_a_name_decides():
    def mine(_after, _values):
        yield "mine", "", np.array([1.0]), True

    registry = {"b.center": mine, **TRAINING}
    changes = [{"name": "a.b.center", "before": None, "after": True}]
    (found,) = check_arm("it", changes, {}, {}, registry)
    assert found.name == "mine"
