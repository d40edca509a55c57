"""The checker over the whole inventory: every structure, mask and dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from cases import CASES
from frames import Case, inputs

from normjax.operators import Diagonal
from normjax.verify import check_jacobian, checks


def checked(case: Case, dtype: str):
    """Checks of a case at κ = 10; its parameters are left out, as the checker does."""
    with jax.enable_x64(True):
        x = jnp.asarray(inputs(case, 1, kappa=10.0)[0], dtype)
        passed = case.arguments(x.dtype)
        passed.pop("params", None)
        if "reference" in passed:
            passed["blend_with"] = passed.pop("reference")
        return check_jacobian(case.spec, x, **passed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_every_case_passes(name: str, dtype: str):
    found = checked(CASES[name], dtype)
    assert len(found) >= 4
    wrong = [check for check in found if not check.ok]
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_case_refutes_another_epsilon(name: str, monkeypatch):
    """The operator of a layer with twice the divisor: no structure hides it."""
    right = checks.input_jacobian

    def halved(spec, x, **given):
        J = right(spec, x, **given)
        return Diagonal(jnp.full(J.shape, 0.5, J.dtype)) @ J

    monkeypatch.setattr(checks, "input_jacobian", halved)
    wrong = {check.name for check in checked(CASES[name], "float32") if not check.ok}
    assert "operator = plain reference" in wrong
    assert "value = plain reference" not in wrong
