"""Models that are broken in one known way, and healthy ones, are told apart."""

from __future__ import annotations

import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import Call
from commands import normjax as normjax
from flax import nnx

import normjax as nj

pytestmark = pytest.mark.jax_defaults

X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
AXES, MODES, DENOMINATORS, DERIVATIVE, PRECISION, COUPLING, CONFIGURATION = (
    nj.diagnosis.STEPS
)


class Net(nn.Module):
    """Two norms and a switch; options break it."""

    momentum: float = 0.9
    always: bool | None = None
    shared: bool = False
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x, train: bool):
        average = not train if self.always is None else self.always
        x = nn.Dense(8, name="first")(x)
        norm = nn.BatchNorm(
            average, momentum=self.momentum, epsilon=self.epsilon, name="bn"
        )
        x = nn.relu(norm(x))
        if self.shared:
            x = norm(nn.Dense(8)(x))
        x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(x))
        return nn.LayerNorm(name="ln")(x)


def trained(model: Any, x: Any = X) -> Any:
    """Variables after enough updates; scale and bias are moved."""
    variables: Any = model.init(jax.random.key(0), x, train=False)
    for name in ("bn", "ln"):
        scale = variables["params"][name]["scale"]
        variables["params"][name]["scale"] = scale * 1.1

    def step(_, variables):
        rngs = {"dropout": jax.random.key(1)}
        _, new = model.apply(variables, x, True, rngs=rngs, mutable=["batch_stats"])
        return {**variables, **new}

    return jax.jit(lambda v: jax.lax.fori_loop(0, 50, step, v))(variables)


def above_notes(found: Any) -> list[tuple[str, str, str]]:
    return [
        (each.severity, each.step, each.path)
        for each in found.findings
        if each.severity != "note"
    ]


def without_updates() -> Any:
    variables = trained(Net())
    fresh = Net().init(jax.random.key(0), X, train=False)["batch_stats"]
    return Net(), {**variables, "batch_stats": fresh}, X


def other_data() -> Any:
    return Net(), trained(Net(), X * 3 + 5), X


def negative_variance() -> Any:
    variables = trained(Net())
    stats = variables["batch_stats"]["bn"]
    stats["var"] = stats["var"].at[2].set(-1e-6)
    return Net(), variables, X


def dead_channel() -> Any:
    variables = trained(Net())
    first = variables["params"]["first"]
    first["kernel"] = first["kernel"].at[:, 3].set(0)
    stats = variables["batch_stats"]["bn"]
    stats["var"] = stats["var"].at[3].set(0)
    return Net(), variables, X


def small_scale() -> Any:
    return Net(), trained(Net(), X * 1e-4), X * 1e-4


def far_offset() -> Any:
    x = X + 1e4
    model = nn.LayerNorm()
    return model, model.init(jax.random.key(0), x), x


def overflow() -> Any:
    model = nn.RMSNorm(force_float32_reductions=False)
    return model, model.init(jax.random.key(0), X), X * 300


def half_statistics() -> Any:
    model = nn.BatchNorm(param_dtype=jnp.bfloat16, force_float32_reductions=False)
    return model, None, X


BROKEN: dict[str, tuple[Any, tuple[str, str, str], dict[str, Any]]] = {
    "never updated": (without_updates, ("error", MODES, "bn"), {}),
    "other data": (other_data, ("error", MODES, "bn"), {}),
    "negative variance": (negative_variance, ("error", MODES, "bn"), {}),
    "batch in evaluation": (
        lambda: (Net(always=False), trained(Net(always=False)), X),
        ("error", MODES, "bn"), {},
    ),
    "frozen in training": (
        lambda: (Net(always=True), trained(Net()), X), ("warning", MODES, "bn"), {},
    ),
    "shared": (
        lambda: (Net(shared=True), trained(Net(shared=True)), X),
        ("warning", MODES, "bn"), {},
    ),
    "dead channel": (dead_channel, ("warning", DENOMINATORS, "bn"), {}),
    "epsilon decides": (small_scale, ("warning", DENOMINATORS, "bn"), {}),
    "one example": (lambda: (Net(), trained(Net()), X[:1]),
                    ("error", DENOMINATORS, "bn"), {}),
    "one element": (
        lambda: (nn.GroupNorm(6), nn.GroupNorm(6).init(jax.random.key(0), X), X),
        ("error", DENOMINATORS, ""), {},
    ),
    "offset": (far_offset, ("error", PRECISION, ""), {}),
    "offset in bfloat16": (
        lambda: (nj.linen.LayerNorm(), None, X + 100), ("warning", PRECISION, ""), {},
    ),
    "overflow in float16": (
        overflow, ("error", PRECISION, ""), {"deployment_dtype": "float16"},
    ),
    "narrow statistics": (
        half_statistics, ("warning", PRECISION, ""), {},
    ),
    "over the examples": (
        lambda: (nn.LayerNorm(reduction_axes=(0, 1)), None, X),
        ("error", COUPLING, ""), {},
    ),
    "momentum of PyTorch": (
        lambda: (Net(momentum=0.1), trained(Net(momentum=0.1)), X),
        ("warning", CONFIGURATION, "bn"), {},
    ),
    "no epsilon": (
        lambda: (Net(epsilon=1e-9), trained(Net()), X),
        ("warning", CONFIGURATION, "bn"), {"deployment_dtype": "float16"},
    ),
    "decay on norms": (
        lambda: (Net(), trained(Net()), X),
        ("warning", CONFIGURATION, "bn"), {"optimizer": optax.adamw(1e-3)},
    ),
    "decay on norms of nnx": (
        lambda: perceptron(nnx),
        ("warning", CONFIGURATION, "bn"), {"optimizer": optax.adamw(1e-3)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_found_at_its_layer_and_step(name: str):
    make, expected, more = BROKEN[name]
    model, variables, x = make()
    found = nj.diagnose(model, variables, x, **more)
    assert expected in above_notes(found), found.findings
    assert not found.ok


class Perceptron(nnx.Module):
    def __init__(self, library: Any, rngs: nnx.Rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.bn = library.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.ln = library.LayerNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.ln(self.dropout(nnx.relu(self.bn(self.first(x)))))


def perceptron(library: Any) -> Any:
    model = Perceptron(library, nnx.Rngs(0))
    for _ in range(50):
        model(jnp.asarray(X))
    return model, None, X


HEALTHY = {
    "trained": lambda: (Net(), trained(Net()), X),
    "untrained": lambda: (Net(), None, X),
    "nnx": lambda: perceptron(nnx),
    "drop-ins": lambda: perceptron(nj.nnx),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_has_notes_at_most(name: str):
    found = nj.diagnose(*HEALTHY[name]())
    assert above_notes(found) == []
    assert found.ok
    assert len(found.layers) >= 2


def test_decay_on_all_but_norms_is_no_finding():
    model, variables = Net(), trained(Net())
    others = nj.surgery.norm_parameters(model, variables, X, train=False).others
    optimizer = optax.adamw(1e-3, mask=others)
    assert above_notes(nj.diagnose(model, variables, X, optimizer=optimizer)) == []


def test_the_model_and_its_state_stay():
    model, _, x = perceptron(nnx)
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)))
    nj.diagnose(model, None, x)
    after = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones,), "model is a ufunc|model is a function"),
        ((Net(),), "batch is None"),
        ((Net(), None, {"x": X, "labels": X}), "batch has 'labels'"),
        ((Net(), 3, X), "variables is a int"),
        ((nn.Dense(3), None, X), "called no norm layer"),
    ],
)
def test_wrong_input_is_one_clear_line(arguments: Any, message: str):
    with pytest.raises(ValueError, match=message):
        nj.diagnose(*arguments)


FACTORY = """
import flax.linen as nn
def make():
    return nn.LayerNorm()
"""


def test_the_command(normjax: Call, tmp_path):
    (tmp_path / "broken_model.py").write_text(FACTORY)
    np.save("far.npy", X + 1e4)
    np.savez("near.npz", x=X)
    done = normjax("diagnose", "broken_model:make", "--batch", "far.npy",
                   "--json", "f.json")  # fmt: skip
    assert (done.code, done.err) == (1, "")
    assert "the result is wrong in float32" in done.out
    assert "1 norm layers: 1 errors, 0 warnings, 0 notes" in done.out
    (finding,) = json.loads((tmp_path / "f.json").read_text())["findings"]
    assert (finding["severity"], finding["step"]) == ("error", PRECISION)
    assert normjax("diagnose", "broken_model:make", "--batch", "near.npz").code == 0
    done = normjax(
        "diagnose", "broken_model:make", "--batch", "near.npz", "--mask", "valid"
    )
    assert done.code == 2
    assert "mask is 'valid', expected an argument of the batch (x)" in done.err
    for target, batch, message in (
        ("broken_model", "far.npy", "expected MODULE:FACTORY"),
        ("broken_model:none", "far.npy", "has no function 'none'"),
        ("no_such_module:make", "far.npy", "there is no module"),
        ("broken_model:make", "none.npy", "there is no file none.npy"),
    ):
        done = normjax("diagnose", target, "--batch", batch)
        assert done.code == 2
        assert message in done.err
