"""Stored statistics of whole models: recalibrated, frozen, kept, merged."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from normed_models import KEY, Mixed, MixedNnx, batch, linen

import normjax as nj
from normjax.layers.surgery import (
    merge_statistics,
    norm_inputs,
    recalibrate,
    replace_norms,
    restore,
    snapshot,
)

pytestmark = pytest.mark.jax_defaults

OFFSET = 1e4
# Batches of two sizes whose means differ by more than their own spread.
BATCHES = [
    batch(seed, (size, 4), OFFSET + 20 * seed) for seed, size in enumerate((6, 6, 3, 6))
]


def pooled(inputs: list[Any], ddof: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of all rows, in NumPy's float64."""
    rows = np.concatenate([np.asarray(x, np.float64).reshape(-1, 4) for x in inputs])
    return rows.mean(0), rows.var(0, ddof=ddof)


def averaged(inputs: list[Any]) -> np.ndarray:
    """The planted error: the average of the batches' variances."""
    return np.mean([np.asarray(x, np.float64).var(0) for x in inputs], axis=0)


def close(found: Any, mean: np.ndarray, variance: np.ndarray) -> None:
    """A mean to its rounding, or that of sums of deviations; a variance to some sums.

    The offset is 400 standard deviations, which the mean's two parts keep out of it.
    """
    unit, std = 2.0**-24, np.sqrt(variance)
    np.testing.assert_allclose(
        found["mean"], mean, rtol=2 * unit, atol=8 * unit * max(std)
    )
    np.testing.assert_allclose(found["var"], variance, rtol=64 * unit)


def test_first_norms_hold_the_moments_of_all_data_at_a_large_offset():
    model, variables = linen(Mixed(), BATCHES[0], train=False)
    before = jax.tree.map(np.asarray, variables)
    new = recalibrate(model, variables, iter(BATCHES), train=False)
    jax.tree.map(np.testing.assert_array_equal, variables, before)
    mean, variance = pooled(BATCHES)
    close(new["batch_stats"]["first"], mean, variance)
    with pytest.raises(AssertionError):
        close(new["batch_stats"]["first"], mean, averaged(BATCHES))
    jax.tree.map(np.testing.assert_array_equal, new["params"], variables["params"])


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_every_norm_holds_the_moments_of_its_inputs_under_batch_statistics(framework):
    batches = [batch(seed, (6, 4), 3.0 * seed) for seed in range(3)]
    model: Any = MixedNnx(rngs=nnx.Rngs(0))
    variables, mode = None, {}
    if framework == "linen":
        model, variables = linen(Mixed(), batches[0], train=False)
        mode = {"train": True}
    model_eval: dict[str, Any] = {"train": False} if mode else {}
    found = snapshot(recalibrate(model, variables, batches, **model_eval))
    seen = [norm_inputs(model, variables, x, **mode) for x in batches]
    for path, stats in found.items():
        mean, variance = pooled([each[path].calls[0].x for each in seen])
        # Jitted and eager layers before it round apart, by some units each.
        np.testing.assert_allclose(stats["mean"], mean, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(stats["var"], variance, rtol=1e-4)
        if "count" in stats:
            assert stats["count"].tolist() == [3] * 4


def test_the_order_of_the_batches_matters_to_rounding_alone():
    model: Any = MixedNnx(rngs=nnx.Rngs(0))
    first, second = (
        snapshot(recalibrate(model, None, batches))["first"]
        for batches in (BATCHES, BATCHES[::-1])
    )
    close(
        first,
        np.asarray(second["mean"], np.float64),
        np.asarray(second["var"], np.float64),
    )
    assert model.first.mean.get_value().tolist() == [0.0] * 4


def test_ddof_debias_masks_and_instances_are_the_specs():
    spec = nj.batch_norm(
        running=nj.Running(decay=0.5, ddof=1, debias=True, initial=(0, 0))
    )
    layer = nj.nnx.Norm(spec, (6, 4))
    new = recalibrate(layer, None, BATCHES)
    state = nj.running.State(
        *(getattr(new, n).get_value() for n in ("mean", "var", "count"))
    )
    read = nj.running.read(spec, state)
    mean, variance = pooled(BATCHES, ddof=1)
    close({"mean": read.mean, "var": read.variance}, mean, variance)
    # Ghosts share stored statistics, and batches of other sizes have other ghosts.
    ghost = nj.ghost_batch_norm(ghosts=3)
    new = recalibrate(nj.nnx.Norm(ghost, (6, 4)), None, BATCHES)
    close(snapshot(new)[""], *pooled(BATCHES))

    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            return nn.BatchNorm(use_running_average=True, name="norm")(x, mask=mask)

    x = batch(shape=(2, 3, 4)).at[0, 2].set(jnp.nan)
    mask = jnp.ones((2, 3, 1), bool).at[0, 2].set(False)
    model = Masked()
    new = recalibrate(model, model.init(KEY, x, mask), [(x, mask), (x, mask)])
    valid = np.asarray(x)[np.asarray(mask)[..., 0]]
    close(new["batch_stats"]["norm"], *pooled([valid]))


def test_a_shared_layer_pools_its_calls_and_stacked_ones_are_refused():
    class Shared(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = nn.BatchNorm(use_running_average=False, name="norm")
            return norm(norm(x) * 3 + 5)

    model, variables = linen(Shared(), BATCHES[0])
    new = recalibrate(model, variables, BATCHES[:1])
    calls = norm_inputs(model, variables, BATCHES[0])["norm"].calls
    mean, variance = pooled([call.x for call in calls])
    np.testing.assert_allclose(new["batch_stats"]["norm"]["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(new["batch_stats"]["norm"]["var"], variance, rtol=1e-4)

    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.BatchNorm(use_running_average=False, name="norm")(x), None

    scan = nn.scan(
        Step, length=2, variable_axes={"params": 0, "batch_stats": 0},
        split_rngs={"params": True},
    )()  # fmt: skip
    variables = scan.init(KEY, BATCHES[0], None)
    with pytest.raises(
        ValueError, match=r"norm stores a mean of shape \(2, 4\).*nn.scan"
    ):
        recalibrate(scan, variables, [(BATCHES[0], None)])


def test_recalibration_mends_what_swapped_data_broke():
    """N89: statistics of other data, computed again."""
    model = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
    x = jnp.array([[10.0], [12.0]])
    model.eval()
    np.testing.assert_allclose(model(x).ravel(), [10.0, 12.0], rtol=1e-5)
    np.testing.assert_allclose(
        recalibrate(model, None, [x])(x).ravel(), [-1, 1], rtol=1e-5
    )


def test_a_snapshot_is_put_back_and_belongs_to_its_model():
    model = MixedNnx(rngs=nnx.Rngs(0))
    before = snapshot(model)
    y = model(BATCHES[0])
    del y
    after = snapshot(model)
    assert float(after["first"]["mean"][0]) > 0
    back = restore(model, before)
    jax.tree.map(np.testing.assert_array_equal, snapshot(back), before)
    jax.tree.map(np.testing.assert_array_equal, snapshot(model), after)
    _, variables = linen(Mixed(), BATCHES[0], train=False)
    held = snapshot(variables)
    assert sorted(held) == ["first", "norm", "ours"]
    jax.tree.map(np.testing.assert_array_equal, restore(variables, held), variables)
    with pytest.raises(ValueError, match=r"snapshot has nothing for norm/count"):
        restore(
            variables, {path: each for path, each in held.items() if path != "norm"}
        )
    wide = {**held, "first": {name: jnp.ones(5) for name in held["first"]}}
    with pytest.raises(ValueError, match=r"shape \(5,\) for first/mean, .*\(4,\)"):
        restore(variables, wide)


def test_pooled_is_the_law_of_total_variance_and_average_is_not():
    parts = [
        batch(seed, (size, 4), OFFSET + 3 * seed) for seed, size in enumerate((4, 12))
    ]
    shots = []
    for part in parts:
        mean, var = (jnp.asarray(value, jnp.float32) for value in pooled([part]))
        shots.append({"bn": {"mean": mean, "var": var, "count": jnp.full(4, 2)}})
    mean, variance = pooled(parts)
    found = merge_statistics(shots, counts=[4, 12])["bn"]
    # Stored means near 1e4 are rounded to 2**-11, and differ by about 3.
    np.testing.assert_allclose(found["mean"], mean, rtol=2.0**-23)
    np.testing.assert_allclose(found["var"], variance, rtol=2.0**-9)
    assert found["count"].tolist() == [4] * 4
    average = merge_statistics(shots, "average", [4, 12])["bn"]
    expected = (4 * pooled(parts[:1])[1] + 12 * pooled(parts[1:])[1]) / 16
    np.testing.assert_allclose(average["var"], expected, rtol=1e-6)
    np.testing.assert_array_equal(average["mean"], found["mean"])
    assert float(jnp.min(found["var"] / average["var"])) > 1.005
    copied = merge_statistics(shots, "copy")
    jax.tree.map(np.testing.assert_array_equal, copied, shots[1])


def test_wrong_input_gets_one_line():
    model, variables = linen(Mixed(), BATCHES[0], train=False)
    with pytest.raises(ValueError, match="got no batches"):
        recalibrate(model, variables, [], train=False)
    with pytest.raises(ValueError, match=r"ours misses mean, var in 'batch_stats'"):
        recalibrate(model, {"params": variables["params"]}, BATCHES, train=False)
    norm = nn.BatchNorm(use_running_average=True, use_scale=False, use_bias=False)
    with pytest.raises(
        ValueError, match=r"BatchNorm has no mean, var in 'batch_stats'"
    ):
        recalibrate(norm, {}, BATCHES)
    dense = nn.Dense(3)
    with pytest.raises(ValueError, match=r"no norm of Dense stores statistics"):
        recalibrate(dense, dense.init(KEY, BATCHES[0]), BATCHES)
    mixture = nj.nnx.MixtureNorm(nj.mixture.switchable_norm(), (6, 2, 4))
    with pytest.raises(ValueError, match="MixtureNorm, which cannot be replaced"):
        recalibrate(mixture, None, [batch(shape=(6, 2, 4))])
    with pytest.raises(ValueError, match="no stored statistics"):
        snapshot(nnx.LayerNorm(4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"got a list, expected an nnx model or the"):
        snapshot([])
    shots = [snapshot(variables)] * 2
    with pytest.raises(ValueError, match="did you mean 'pooled'"):
        merge_statistics(shots, "pool")
    with pytest.raises(ValueError, match="got no snapshots"):
        merge_statistics([])
    with pytest.raises(ValueError, match="got 2 snapshots and 1 counts"):
        merge_statistics(shots, counts=[1])
    with pytest.raises(ValueError, match=r"0 and 1 differ: only one has first/mean"):
        merge_statistics(
            [shots[0], {"norm": shots[1]["norm"], "ours": shots[1]["ours"]}]
        )
    with pytest.raises(ValueError, match=r"ema/x is neither mean, var nor count"):
        merge_statistics([{"ema": {"x": jnp.ones(1)}}])
    assert merge_statistics([{"ema": {"x": jnp.ones(1)}}], "copy")


def test_statistics_in_half_precision_are_widened_and_data_may_be_narrow():
    layer = nn.BatchNorm(use_running_average=True)
    x = batch(shape=(6, 4), dtype=jnp.bfloat16)
    variables: Any = layer.init(KEY, x)
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), variables)
    new = recalibrate(layer, narrow, [x, 2 * x])
    assert new["batch_stats"]["mean"].dtype == jnp.float32
    close(new["batch_stats"], *pooled([x, 2 * x]))


def test_recalibrate_after_surgery():
    model: Any = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    frozen, _ = replace_norms(model, lambda *_: "freeze")
    new = recalibrate(frozen, None, BATCHES)
    close(snapshot(new)[""], *pooled(BATCHES))
    new.train()
    expected = nj.normalize(
        nj.batch_norm(), BATCHES[0],
        moments=nj.Statistics(new.mean.get_value(), new.var.get_value()),
    )  # fmt: skip
    np.testing.assert_allclose(new(BATCHES[0]), expected, rtol=1e-5, atol=1e-5)
