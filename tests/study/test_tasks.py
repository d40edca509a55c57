"""Auto MPG: the data as the study wants them, and a split that tests honestly."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from normjax.study.cells import fingerprint
from normjax.study.tasks import TASKS, TaskSettings, auto_mpg, split
from normjax.study.validation import InvalidError, parse

pytestmark = pytest.mark.jax_defaults


def test_auto_mpg_is_392_complete_cars():
    task = auto_mpg()
    assert task.inputs.shape == (392, 4)
    assert task.targets.shape == (392,)
    assert np.isfinite(task.inputs).all()
    assert np.isfinite(task.targets).all()
    assert len(task.features) == 4


def test_features_and_target_are_logs_of_the_table():
    from mlxtend.data import autompg_data

    table, mileage = autompg_data()
    task = auto_mpg()
    np.testing.assert_allclose(np.exp(task.inputs[:, :3]), table[:, 1:4], rtol=1e-12)
    np.testing.assert_allclose(np.exp(-task.inputs[:, 3]), table[:, 4], rtol=1e-12)
    np.testing.assert_allclose(np.exp(task.targets), mileage, rtol=1e-12)


def test_every_feature_grows_with_the_car():
    """So that their mean is its size: all correlate with each other and the target."""
    task = auto_mpg()
    among = np.corrcoef(np.column_stack([task.inputs, task.targets]), rowvar=False)
    assert (among[:4, :4] > 0.4).all()
    assert (among[4, :4] < -0.4).all()


def test_the_digest_is_that_of_the_data():
    task = auto_mpg()
    assert task.digest == fingerprint(task.inputs, task.targets)
    assert TASKS["auto_mpg"]() is task


def test_a_split_uses_every_car_once():
    task, parts = auto_mpg(), split(TaskSettings(train=300), jax.random.key(0))
    assert parts.train_x.shape == (300, 4)
    assert parts.test_x.shape == (92, 4)
    targets = np.concatenate([parts.train_y, parts.test_y]).astype(np.float64)
    order = np.argsort(np.asarray(task.targets))
    # Scaling is increasing, so the sorted targets are those of the table, scaled.
    scaled = np.sort(targets)
    slope, _ = np.polyfit(task.targets[order], scaled, 1)
    line = scaled[0] + slope * (task.targets[order] - task.targets[order][0])
    np.testing.assert_allclose(scaled, line, atol=1e-5)


def test_scaling_is_by_the_training_part_only():
    parts = split(TaskSettings(train=40), jax.random.key(1))
    np.testing.assert_allclose(parts.train_x.mean(0), 0, atol=2e-6)
    np.testing.assert_allclose(parts.train_x.std(0), 1, rtol=1e-5)
    np.testing.assert_allclose(parts.train_y.mean(), 0, atol=2e-6)
    np.testing.assert_allclose(parts.train_y.std(), 1, rtol=1e-5)
    assert (np.abs(parts.test_x.mean(0)) > 1e-3).all()
    assert abs(float(parts.test_y.std()) - 1) > 1e-3


def test_features_stay_with_their_target():
    task, parts = auto_mpg(), split(TaskSettings(train=200), jax.random.key(2))
    raw = np.corrcoef(task.inputs[:, 2], task.targets)[0, 1]
    x, y = (np.concatenate(p) for p in zip(parts[:2], parts[2:], strict=True))
    np.testing.assert_allclose(np.corrcoef(x[:, 2], y)[0, 1], raw, rtol=1e-5)


def test_a_split_depends_on_its_key_alone():
    settings = TaskSettings(train=40)
    first, again = (split(settings, jax.random.key(3)) for _ in range(2))
    other = split(settings, jax.random.key(4))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first.train_y, other.train_y)


@pytest.mark.parametrize("train", [-1, 0, 1, 391, 392, 1000])
def test_both_parts_have_room(train: int):
    match = rf"\Aexpected 2 to 390, so that there is a test part, got {train}\Z"
    with pytest.raises(InvalidError, match=match):
        parse(TaskSettings, {"train": train})


def test_the_smallest_and_the_largest_part():
    for train in (2, 390):
        parts = split(parse(TaskSettings, {"train": train}), jax.random.key(0))
        assert parts.train_x.shape[0] == train
        assert parts.test_y.shape[0] == 392 - train


def test_only_known_tasks():
    with pytest.raises(InvalidError, match=r"\Aexpected 'auto_mpg', got 'mnist'\Z"):
        parse(TaskSettings, {"name": "mnist"})
