"""Every claim of the cards, measured; the README's table is the generated one."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import Call, table
from commands import normjax as normjax
from small import refuse

import normjax as nj
from normjax.family import FAMILY, card, claims, markdown
from normjax.mixture import Mixture
from normjax.presets import PRESETS
from normjax.traits import Properties

pytestmark = pytest.mark.jax_defaults

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SMALL: dict[str, Any] = {
    "group_norm": nj.group_norm(groups=2),
    "ghost_batch_norm": nj.ghost_batch_norm(ghosts=2),
    "weight_standardization": nj.weight_standardization("h i"),
}
LAYERS = {name: SMALL.get(name, member.layer) for name, member in FAMILY.items()}
SHAPE = (4, 3, 6)
every = pytest.mark.parametrize("name", FAMILY)


def test_the_family_has_every_preset_and_what_is_outside_the_map():
    others = {"blended_batch_norm", "switchable_norm", "dynamic_tanh"}
    assert set(FAMILY) == set(PRESETS) | others
    for name, preset in PRESETS.items():
        assert FAMILY[name].layer == preset()
        assert FAMILY[name].call.startswith(f"nj.{name}(")


@every
def test_a_member_is_what_its_call_makes(name: str):
    member = FAMILY[name]
    calls = re.split(r"(?<=\)), (?=nj\.)", member.call)
    if name == "dynamic_tanh":
        assert member.layer is nj.dynamic_tanh
        return
    layer, *others = (eval(call, {"nj": nj}) for call in calls)
    assert layer == member.layer
    assert all(isinstance(other, nj.NormSpec) for other in others)
    assert re.search(r"\d{4}, arXiv:\d{4}\.\d{5}|a half of layer norm", member.source)


def test_the_readme_has_the_generated_table():
    (found,) = re.findall(r"<!-- family -->\n(.*?)\n<!-- end of", README, re.DOTALL)
    assert found == markdown(), "put the output of `normjax spec --markdown` there"
    assert all(f"| `{name}` |" in found for name in FAMILY)


def function(layer: Any, epsilon: float = 1e-12):
    """The layer as a function of x, and the shapes of its parameters."""
    if layer is nj.dynamic_tanh:
        params = nj.init_dynamic_tanh(SHAPE[-1], alpha=0.7)
        return lambda x: nj.dynamic_tanh(x, params), params
    if isinstance(layer, Mixture):
        specs = tuple(spec.replace(epsilon=epsilon) for spec in layer.specs)
        mixture = Mixture(specs, layer.affine)
        params = nj.mixture.init(mixture, SHAPE)
        logits = {k: jnp.arange(3.0)[:: (1 if "mean" in k else -1)] for k in params}
        return lambda x: nj.mixture.normalize(mixture, x, params | {
            k: v for k, v in logits.items() if "logits" in k
        }), params  # fmt: skip
    spec = layer.replace(epsilon=epsilon)
    given: dict[str, Any] = {}
    if spec.statistics != "input":
        row = jnp.arange(float(SHAPE[-1]))
        given = {"reference": nj.Statistics(row / 5 - 1, 1 + row)}
    return lambda x: nj.normalize(spec, x, **given), nj.init(spec, SHAPE)


def measured(layer: Any) -> dict[str, Any]:
    """What a layer removes and couples, whether J is symmetric, its parameters."""
    x = jnp.asarray(np.random.default_rng(3).normal(0.4, 1.0, SHAPE), jnp.float32)
    call, params = function(layer)
    y, J = call(x), np.asarray(jax.jacfwd(call)(x), np.float64)
    scale = np.abs(J).max()
    blocks = np.abs(J).max((1, 2, 4, 5))
    matrix = J.reshape(x.size, x.size)
    removes = {"offset": call(x + 3), "scale": call(4 * x)}
    close = {k: np.allclose(v, y, rtol=0, atol=2e-5) for k, v in removes.items()}
    return {
        "removes": tuple(name for name, equal in close.items() if equal),
        "couples_examples": bool(
            (blocks - np.diag(np.diag(blocks))).max() > 1e-6 * scale
        ),
        "symmetric_jacobian": bool(np.abs(matrix - matrix.T).max() < 1e-5 * scale),
        "parameters": tuple(params),
    }


def claimed(properties: Properties) -> dict[str, Any]:
    facts = {k: getattr(properties, k) for k in measured(nj.layer_norm())}
    return facts | {"parameters": tuple(p.split()[0] for p in facts["parameters"])}


@every
def test_what_a_card_claims_is_measured(name: str):
    found, expected = measured(LAYERS[name]), claimed(claims(LAYERS[name]))
    if name == "weight_standardization":  # a kernel has no examples
        assert not expected.pop("couples_examples")
        del found["couples_examples"]
    assert found == expected


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("scale_only", {"removes": ("offset", "scale")}),
        ("dynamic_tanh", {"removes": ("scale",)}),
        ("switchable_norm", {"couples_examples": False}),
        ("switchable_norm", {"symmetric_jacobian": True}),
        ("blended_batch_norm", {"removes": ("offset", "scale")}),
        ("rms_norm", {"parameters": ("scale over c", "bias over c")}),
    ],
)
def test_a_card_that_lies_is_caught(name: str, lie: dict[str, Any]):
    assert measured(LAYERS[name]) != claimed(replace(claims(LAYERS[name]), **lie))


STORING = [name for name in FAMILY if claims(FAMILY[name].layer).stores]


def test_what_stores_are_the_batch_norms():
    assert STORING == [
        "batch_norm", "batch_renorm", "blended_batch_norm", "ghost_batch_norm",
        "switchable_norm",
    ]  # fmt: skip
    for name in FAMILY:
        assert claims(FAMILY[name].layer).train_differs == (name in STORING)


@pytest.mark.parametrize("name", STORING[:-1])
def test_train_stored_and_frozen(name: str):
    """Stored statistics couple nothing, remove nothing, and differ from training."""
    spec = LAYERS[name]
    x = jnp.asarray(np.random.default_rng(3).normal(0.4, 1.0, SHAPE), jnp.float32)
    moments = nj.moments(spec, x)
    state = nj.running.update(spec, nj.running.init(spec, SHAPE), moments)
    stored = nj.running.read(spec, state)

    def frozen(x):
        return nj.normalize(spec, x, moments=stored)

    J = np.asarray(jax.jacfwd(frozen)(x)).reshape(x.size, x.size)
    np.testing.assert_array_equal(J, np.diag(np.diag(J)))
    assert not np.allclose(frozen(x + 3), frozen(x))
    assert not np.allclose(frozen(x), function(spec)[0](x), atol=1e-2)
    rows = dict(card(spec))
    assert rows["stored"].endswith("no example is coupled")
    assert rows["frozen"] == "training with the stored ones, which no update changes"


def test_group_norm_and_its_two_ends():
    """As the card's note says; the other way round is visibly wrong."""
    x = jnp.asarray(np.random.default_rng(3).normal(0.4, 1.0, SHAPE), jnp.float32)
    one, many = (nj.normalize(nj.group_norm(g), x) for g in (1, 6))
    layer = nj.normalize(nj.layer_norm("h c"), x)
    instance = nj.normalize(nj.instance_norm(), x)
    np.testing.assert_allclose(one, layer, atol=1e-6)
    np.testing.assert_allclose(many, instance, atol=1e-6)
    assert np.abs(one - instance).max() > 0.1
    assert np.abs(many - layer).max() > 0.1
    (note,) = (text for word, text in card(*group()) if word == "note")
    assert note.startswith("one group is layer norm over all axes but the first, as")
    assert note.endswith("texts that state it the other way round are wrong")


def group():
    return FAMILY["group_norm"].layer, FAMILY["group_norm"]


def test_notes_of_other_cards():
    """Cancelled modulation, the bound on logits, and renorm as inference."""
    x = jnp.asarray(np.random.default_rng(3).normal(0.4, 1.0, SHAPE), jnp.float32)
    spec = nj.layer_norm(epsilon=0.0)
    twice = nj.normalize(spec, 3 * nj.normalize(spec, x) - 2)
    np.testing.assert_allclose(twice, nj.normalize(spec, x), atol=1e-5)
    q = nj.normalize(nj.qk_norm(), 100 * x)
    logits = jnp.einsum("bqd,bkd->bqk", q, q) / np.sqrt(6)
    assert float(jnp.abs(logits).max()) <= np.sqrt(6) * (1 + 1e-6)
    stored = nj.Statistics(jnp.full(6, 0.2), jnp.full(6, 1.5))
    train = nj.normalize(nj.batch_renorm(), x, reference=stored)
    infer = nj.normalize(nj.batch_renorm(), x, moments=stored)
    np.testing.assert_allclose(train, infer, atol=1e-5)
    moved = nj.normalize(nj.batch_renorm(), x.at[0].add(0.1), reference=stored)
    np.testing.assert_allclose(moved[1:], train[1:], atol=1e-5)
    start = nj.batch_renorm(r_max=1.0, d_max=0.0)
    begun = nj.normalize(start, x, reference=stored)
    np.testing.assert_allclose(begun, nj.normalize(nj.batch_norm(), x), atol=1e-6)
    ends: list[tuple[float, dict[str, Any]]] = [(1.0, {}), (0.0, {"moments": stored})]
    for share, given in ends:
        shares: Any = {"mean_weight": share, "variance_weight": share}
        blend = nj.batch_norm(statistics="blend", **shares)
        mixed = nj.normalize(blend, x, reference=stored)
        np.testing.assert_allclose(
            mixed, nj.normalize(nj.batch_norm(), x, **given), atol=1e-6
        )
    kernel = jnp.ones((1, 1, 1, 5))
    assert not nj.normalize(nj.weight_standardization(), kernel).any()


def test_card_and_claims_refuse_what_is_no_layer():
    with refuse("layer is 'layer_norm', expected a NormSpec, a Mixture or nj.dyn"):
        claims("layer_norm")  # type: ignore[arg-type]
    words = [word for word, _ in card(nj.layer_norm())]
    assert "is" not in words
    assert words.count("degenerates") == 3


@every
def test_the_command_shows_the_card(normjax: Call, name: str):
    done = normjax("spec", name)
    assert (done.code, done.err) == (0, "")
    member = FAMILY[name]
    rows = [tuple(row) for row in table(done.out)[1:]]
    assert rows == card(member.layer, member)
    title = done.out.splitlines()[0]
    assert title == (
        member.call if inspect.isfunction(member.layer) else repr(member.layer)
    )


def test_the_command_prints_the_table(normjax: Call):
    assert normjax("spec", "--markdown").out == markdown() + "\n"


def test_set_takes_the_family_s_words_off_the_card(normjax: Call):
    done = normjax("spec", "group_norm", "--set", "groups=4")
    words = [row[0] for row in table(done.out)[1:]]
    assert not {"is", "source", "note"} & set(words)
    scale = normjax("spec", "qk_norm", "--set", "scale=h").out
    assert "NormSpec('... h [d]'" in scale
    assert normjax("diff", "batch_norm", "blended_batch_norm").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["spec", "dynamic_tanh", "--set", "epsilon=1"],
            "dynamic_tanh is no NormSpec, but nj.dynamic_tanh(x, params): it has",
        ),
        (["diff", "batch_norm", "switchable_norm"], "switchable_norm is no NormSpec"),
        (
            ["spec", "switchable"],
            "there is no preset 'switchable'; did you mean 'switch",
        ),
        (["spec"], "name a layer, or say --markdown"),
    ],
)
def test_wrong_input_is_status_2(normjax: Call, arguments: list[str], message: str):
    done = normjax(*arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
