"""The finite facts hold, and each notices when the mathematics is changed."""

from __future__ import annotations

import pytest

from normjax import functional, running
from normjax.verify import check_facts, facts


@pytest.fixture(scope="module")
def found():
    return check_facts()


def test_every_fact_holds(found):
    assert not [check for check in found if not check.ok]


def test_every_fact_states_its_inputs_convention_and_tolerance(found):
    for check in found:
        assert "ε=" in check.subject or "decay" in check.subject
        assert 0 < check.tolerance <= 1e-4
        assert check.reason


@pytest.mark.parametrize(
    "part",
    [
        "offset is removed",
        "N(a x) = a c/√(a²σ²+ε)",
        "a negative scale flips the sign",
        "jvp of normalize = operator",
        "vjp of normalize = operator",
        "operator = central differences",
        "operator = 50 digits",
        "J 1 = 0",
        "J c = (ε/s³) c",
        "J t = t/s",
        "J = P/S(0) at σ²=0",
        "BN(0; {0,2}) = -b/√(b²+4ε)",
        "BN(0; {0,-2}) = -b/√(b²+4ε)",
        "training uses mean 2.5",
        "inference uses mean 0.25",
        "±1.3416",
    ],
)
def test_every_fact_of_the_article_is_there(found, part):
    assert any(part in check.name for check in found)


def broken(function) -> set[str]:
    result = function()
    checks = [result] if isinstance(result, facts.Check) else result
    return {check.name for check in checks if not check.ok}


def use(monkeypatch, **changes):
    right = functional.normalize
    monkeypatch.setattr(
        functional,
        "normalize",
        lambda spec, x, *a, **k: right(spec.replace(**changes), x, *a, **k),
    )


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (facts.shift_invariance, {"center": False}),
        (facts.scale_response, {"epsilon": 2e-5}),
        (facts.eigen_relations, {"detach": "variance"}),
        (facts.constant_group, {"epsilon": 2e-5}),
        (facts.two_examples, {"ddof": 1}),
        (facts.train_and_stored, {"epsilon": 1e-3}),
        (facts.large_offset, {"precision.algorithm": "two_pass"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.usefixtures("jax_switches")
def test_a_changed_layer_is_noticed(monkeypatch, function, changes):
    assert not broken(function)
    use(monkeypatch, **changes)
    assert broken(function)


def test_a_wrong_ddof_in_storage_is_noticed(monkeypatch):
    right = running.update

    def update(spec, state, moments):
        return right(spec.replace(**{"running.ddof": 0}), state, moments)

    monkeypatch.setattr(running, "update", update)
    assert broken(facts.train_and_stored) == {
        "inference uses mean 0.25, variance 1.0667"
    }
