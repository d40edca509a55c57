from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from strategies import FIELDS, specs

import normjax as nj
from normjax.pattern import Pattern
from normjax.spec import Affine, NormSpec, Precision, Running

quick = settings(deadline=None, derandomize=True, max_examples=200)
BATCH = nj.batch_norm()
GROUPS = NormSpec("b [...] (g [c])", sizes={"g": 2}, affine="(g c)")
LEAVES = [".epsilon", ".mean_weight", ".variance_weight", ".r_max", ".d_max"]
X = np.random.default_rng(0).normal(size=(4, 6))
EPSILONS = [0.0, 1e-5, 0.1, 1.0]


def test_the_drawn_fields_are_all_fields():
    assert list(FIELDS) == [field.name for field in dataclasses.fields(NormSpec)]


@quick
@given(specs())
def test_repr_is_the_constructor(spec: NormSpec):
    assert eval(repr(spec), dict(vars(nj))) == spec


@quick
@given(specs())
def test_plain_data_and_back_through_json(spec: NormSpec):
    plain = spec.to_dict()
    assert list(plain) == [field.name for field in dataclasses.fields(NormSpec)]
    assert NormSpec.from_dict(plain) == spec
    assert NormSpec.from_dict(json.loads(json.dumps(plain))) == spec


@quick
@given(specs())
def test_equal_specs_hash_equal(spec: NormSpec):
    again = NormSpec(
        **{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    )
    assert again is not spec
    assert again == spec
    assert hash(again) == hash(spec)


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "axis_names"])
def test_every_field_is_part_of_equality(name: str):
    base = NormSpec("[b] h (g [c])")
    for value in FIELDS[name]:
        assert base.replace(**{name: value}) != base


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({"pattern": "b[h]  (g [c])"}, {}),
        ({"affine": "c"}, {"affine": Affine("c")}),
        ({"sizes": {"g": 3, "c": 2}}, {"sizes": (("c", 2), ("g", 3))}),
        ({"sizes": [["g", 3], ["c", 2]]}, {"sizes": (("c", 2), ("g", 3))}),
        ({"detach": "mean"}, {"detach": ("mean",)}),
        ({"running": Running(initial=(0, 1))}, {"running": Running()}),
    ],
)
def test_shorthand(fields: dict[str, Any], full: dict[str, Any]):
    short = NormSpec(**{"pattern": "b [h] (g [c])", **fields})
    assert short == NormSpec("b [h] (g [c])", **full)
    for name, value in full.items():
        assert getattr(short, name) == value
    assert short.parsed == Pattern.parse("b [h] (g [c])")


@pytest.mark.parametrize(
    ("spec", "changes", "expected"),
    [
        (BATCH, {"running.decay": 0.5}, BATCH.replace(running=Running(0.5))),
        (
            BATCH,
            {"affine.scale": False},
            BATCH.replace(affine=Affine("c", scale=False)),
        ),
        (
            BATCH,
            {"precision.algorithm": "two_pass", "precision.output": "float32"},
            BATCH.replace(precision=Precision(algorithm="two_pass", output="float32")),
        ),
        (GROUPS, {"sizes.g": 3}, GROUPS.replace(sizes={"g": 3})),
        (GROUPS, {"sizes.c": 3}, GROUPS.replace(sizes={"g": 2, "c": 3})),
        (BATCH, {"affine": None, "running": None}, NormSpec("[...] c")),
    ],
)
def test_replace_with_dotted_names(spec, changes, expected):
    changed = spec.replace(**changes)
    assert changed == expected
    assert changed != spec
    assert changed.replace(**{name: getattr(spec, name) for name in FIELDS}) == spec


def plain_batch_norm(epsilon: float) -> np.ndarray:
    return (X - X.mean(0)) / np.sqrt(X.var(0) + epsilon)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "leaves"),
    [(nj.layer_norm(), LEAVES), (BATCH, [*LEAVES, ".running.decay"])],
)
def test_the_leaves_are_what_a_study_varies(spec: NormSpec, leaves: list[str]):
    paths = jax.tree_util.tree_flatten_with_path(spec)[0]
    assert [jax.tree_util.keystr(path) for path, _ in paths] == leaves


@quick
@given(specs())
def test_only_leaves_may_differ_between_equal_structures(spec: NormSpec):
    varied = spec.replace(epsilon=7.0, r_max=1.5)
    assert jax.tree.structure(varied) == jax.tree.structure(spec)
    assert jax.tree.map(lambda a, _: a, spec, varied) == spec
    other = spec.replace(center=not spec.center)
    assert jax.tree.structure(other) != jax.tree.structure(spec)


@pytest.mark.parametrize("placeholder", [None, object(), np.ones(3), "leaf"])
def test_placeholders_pass_the_constructor(placeholder: object):
    filled = jax.tree.map(lambda _: placeholder, BATCH)
    assert filled.epsilon is placeholder
    assert filled.running.decay is placeholder
    assert filled.pattern == BATCH.pattern


def test_an_epsilon_sweep_is_a_vmap_over_a_replaced_leaf():
    sweep = jax.vmap(lambda e: nj.normalize(BATCH.replace(epsilon=e), jnp.array(X)))
    close(sweep(jnp.array(EPSILONS)), np.stack([*map(plain_batch_norm, EPSILONS)]))


def test_in_axes_may_be_a_spec():
    axes = jax.tree.map(lambda _: None, BATCH).replace(epsilon=0)
    many = BATCH.replace(epsilon=jnp.array(EPSILONS))
    found = jax.vmap(nj.normalize, in_axes=(axes, None))(many, jnp.array(X))
    close(found, np.stack([*map(plain_batch_norm, EPSILONS)]))


def test_vmap_over_every_leaf_of_stacked_specs():
    wide = BATCH.replace(precision=Precision("float64"))
    specs = [wide.replace(**{"running.decay": d, "epsilon": d}) for d in (0.0, 0.5)]
    stacked = jax.tree.map(lambda *leaves: jnp.array(leaves), *specs)
    x = jnp.array(X)

    def both(spec: NormSpec):
        state = nj.running.init(spec, x.shape)
        new = nj.running.update(spec, state, nj.moments(spec, x))
        return nj.normalize(spec, x), new.mean

    y, mean = jax.vmap(both)(stacked)
    close(y, np.stack([plain_batch_norm(0.0), plain_batch_norm(0.5)]))
    close(mean, np.stack([X.mean(0), X.mean(0) / 2]))


def test_a_gradient_flows_into_a_leaf():
    def loss(spec: NormSpec):
        return jnp.sum(nj.normalize(spec, jnp.array(X)) ** 2)

    gradient = jax.grad(loss)(BATCH.replace(epsilon=0.1))
    variance = X.var(0)
    close(gradient.epsilon, -len(X) * np.sum(variance / (variance + 0.1) ** 2))
    assert gradient.running.decay == 0


def test_a_sweep_over_leaves_compiles_once():
    traces = []

    @jax.jit
    def layer(spec: NormSpec, x: jax.Array):
        traces.append(spec)
        return nj.normalize(spec, x)

    for epsilon in EPSILONS:
        spec = BATCH.replace(**{"epsilon": epsilon, "running.decay": epsilon})
        close(layer(spec, jnp.array(X)), plain_batch_norm(epsilon))
    assert len(traces) == 1
    layer(BATCH.replace(ddof=1), jnp.array(X))
    assert len(traces) == 2


def test_a_spec_of_numbers_may_be_a_static_argument():
    traces = []

    def layer(x: jax.Array, spec: NormSpec):
        traces.append(spec)
        return nj.normalize(spec, x)

    compiled = jax.jit(layer, static_argnames="spec")
    for spec in (BATCH, nj.batch_norm(), BATCH.replace(epsilon=0.5)):
        close(compiled(jnp.array(X), spec=spec), plain_batch_norm(spec.epsilon))
    assert traces == [BATCH, BATCH.replace(epsilon=0.5)]
