"""The table of invariances: the paper's rows, its prediction at ε, planted errors."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from commands import Call
from commands import normjax as normjax

import normjax as nj
from normjax import functional
from normjax.verify import invariance, invariance_markdown, invariances

pytestmark = pytest.mark.jax_defaults
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
CHANGES = (
    "weight matrix re-scaling",
    "weight matrix re-centering",
    "weight vector re-scaling",
    "dataset re-scaling",
    "dataset re-centering",
    "single case re-scaling",
)
# arXiv:1607.06450, table 1.
PAPER = {
    "batch norm": (True, False, True, True, True, False),
    "weight norm": (True, False, True, False, False, False),
    "layer norm": (True, True, False, True, False, True),
}


@pytest.fixture(scope="module")
def found():
    return invariances()


def cell(found, layer: str, change: str) -> invariance.Invariance:
    (one,) = [c for c in found if (c.layer, c.change) == (layer, change)]
    return one


def test_every_cell_is_decided_and_as_predicted(found):
    assert not [one for one in found if not one.ok]
    assert len(found) == len(invariance.ROWS) * len(CHANGES)
    for one in found:
        assert one.exact <= 1e-14 or one.exact > 0.1  # far from both thresholds


@pytest.mark.parametrize("layer", PAPER)
def test_the_rows_of_the_paper(found, layer):
    cells = [cell(found, layer, change).holds for change in CHANGES]
    assert tuple(cells) == PAPER[layer]


def test_epsilon_costs_what_the_closed_form_says(found):
    """By hand: batch norm of a times its input is a √(v + ε)/√(a² v + ε)."""
    w, x, _ = invariance.changes()
    v = (x @ w).var((0, 1))
    loss = np.max(np.abs(3 * np.sqrt(v + 1e-5) / np.sqrt(9 * v + 1e-5) - 1))
    one = cell(found, "batch norm", "dataset re-scaling")
    assert one.stabilized == pytest.approx(loss, rel=1e-6)
    for one in found:
        if one.claimed:
            assert one.stabilized == pytest.approx(one.predicted, rel=1e-6, abs=1e-13)
            assert (one.predicted == 0) == ("re-centering" in one.change)


def test_group_norm_survives_weight_re_centering_at_one_position_only():
    w, x, table = invariance.changes(sizes=(8, 1, 6, 8))
    name = "weight matrix re-centering"
    one = invariance.invariance_of("group norm", name, w, x, table[name])
    assert one.ok
    assert one.holds
    w, x, table = invariance.changes(sizes=(8, 2, 6, 8))
    one = invariance.invariance_of("group norm", name, w, x, table[name])
    assert one.ok
    assert one.holds is False


def measured(layer: str, change: str) -> invariance.Invariance:
    """One cell, of the table's kernel and data."""
    w, x, table = invariance.changes()
    return invariance.invariance_of(layer, change, w, x, table[change])


def patched(monkeypatch, change) -> None:
    """``normalize`` of other specs or with other outputs, inside the checker only."""
    right = functional.normalize

    def normalize(spec, x, **given):
        return change(right, spec, x, **given)

    monkeypatch.setattr(functional, "normalize", normalize)


@pytest.mark.parametrize(
    ("layer", "fields", "flipped"),
    [
        ("batch norm", {"center": False}, "dataset re-centering"),
        ("batch norm", {"divide": "none"}, "dataset re-scaling"),
        ("layer norm", {"divide": "rms"}, "weight matrix re-centering"),
        ("weight standardization", {"divide": "none"}, "weight vector re-scaling"),
    ],
    ids=str,
)
def test_a_norm_without_the_invariance_flips_the_cell(
    monkeypatch, layer, fields, flipped
):
    patched(monkeypatch, lambda f, s, x, **g: f(s.replace(**fields), x, **g))
    one = measured(layer, flipped)
    assert one.holds is not one.claimed
    assert not one.ok


def test_what_is_neither_kept_nor_visibly_broken_fails(monkeypatch):
    patched(monkeypatch, lambda f, s, x, **g: f(s, x, **g) + 1e-6 * x)
    one = measured("layer norm", "dataset re-scaling")
    assert one.holds is None
    assert not one.ok
    assert "| ? |" in invariance_markdown((one,))


@pytest.mark.parametrize(
    "wrong", [lambda right: 1 + 0 * right, lambda right: 1 / right]
)
def test_a_wrong_prediction_is_caught(monkeypatch, wrong):
    """Forgetting ε, or its sign."""
    right = invariance.stabilized_scale
    monkeypatch.setattr(
        invariance, "stabilized_scale", lambda *args: wrong(right(*args))
    )
    for layer in ("batch norm", "weight standardization"):
        for change in CHANGES:
            one = measured(layer, change)
            changed_by_epsilon = one.claimed and "re-scaling" in change
            assert one.ok is not changed_by_epsilon


def test_the_command_names_a_wrong_cell_and_fails(monkeypatch, normjax: Call):
    monkeypatch.setattr(invariance, "stabilized_scale", lambda *_: 1.0)
    monkeypatch.setattr(invariance, "ROWS", {"RMS norm": invariance.ROWS["RMS norm"]})
    done = normjax("verify", "--invariance")
    assert done.code == 1
    assert done.out.count("failed: Invariance(layer='RMS norm'") == 3


def test_the_readme_has_the_output_of_the_command(found, normjax: Call):
    (text,) = re.findall(
        r"<!-- invariance -->\n(.*?)\n<!-- end of invariance", README, re.DOTALL
    )
    assert text == invariance_markdown(found), "put `normjax verify --invariance` there"
    assert normjax("verify", "--invariance") == (0, text + "\n", "")


def test_it_takes_no_layer(normjax: Call):
    done = normjax("verify", "layer_norm", "--invariance")
    message = "--invariance takes no layer and no other option\n"
    assert done == (2, "", message)


def test_the_records_are_public():
    assert nj.verify.Invariance is invariance.Invariance
