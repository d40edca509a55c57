from __future__ import annotations

import numpy as np
import pytest
from numpy_layers import KNOWN, Known

import normjax as nj
from normjax.auditing import Audit

pytestmark = pytest.mark.jax_defaults
AUDITS: dict[tuple[str, int], Audit] = {}


def audited(name: str, seed: int = 0) -> tuple[Known, Audit]:
    known = KNOWN[name]
    if (name, seed) not in AUDITS:
        AUDITS[name, seed] = nj.audit(
            known.layer, shape=known.shape, dtype=known.dtype, seed=seed
        )
    return known, AUDITS[name, seed]


@pytest.mark.parametrize("name", KNOWN)
def test_every_part_of_the_formula_is_found(name: str):
    known, found = audited(name)
    assert found.kind is None
    expected = known.axes.split()
    assert found["grouping"].facts["axes"] == (expected * 3 if expected == ["irregular"]
                                               else expected)  # fmt: skip
    formula = found["formula"].facts
    assert (formula["measure"], formula["center"], formula["power"]) == (
        known.measure, bool(known.alpha), known.power,
    )  # fmt: skip
    epsilon = found["epsilon"].facts
    assert epsilon["placement"] == known.placement
    # Read to 2e-7 in float32 and 1e-14 in float64 (then rounded); half types see ε to a
    # few percent, and a number without a round neighbor keeps the spread of the fit.
    near = {"float64": 1e-12, "float32": 2e-6}.get(np.dtype(known.dtype).name, 0.03)
    assert epsilon["epsilon"] == pytest.approx(known.epsilon, rel=near, abs=0)
    assert found["ddof"].facts["divisor"] == known.divisor
    affine = found["affine"].facts
    assert (affine["scale_axes"], affine["bias_axes"]) == (known.gain, known.bias)
    # NumPy squares float16 in float16, which the audit says of most of these layers.
    defects = {defect.name for defect in found.defects} - {"half types"}
    assert defects == set(known.defects)


@pytest.mark.parametrize("name", KNOWN)
def test_the_spec_reproduces_it_or_is_none(name: str):
    known, found = audited(name)
    if known.spec:
        assert found.spec is not None, found.differs
        assert (found.nearest, found.differs) == (None, ())
    else:
        assert found.spec is None
        assert found.differs
        assert found["grouping"].defect == (found.nearest is None)
