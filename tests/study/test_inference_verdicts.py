"""Verdicts on declared hypotheses, corrected together by Holm's method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from samples import REPEATS, binomial_range, by_seed, draws

from normjax.study import inference
from normjax.study.inference import described, holm, judge, pair

pytestmark = pytest.mark.jax_defaults


def hypothesis(relation: str, **margins: float) -> dict[str, Any]:
    return {
        "id": "H1",
        "statement": f"a.x {relation} b.x",
        "sides": [["a", "x"], relation, ["b", "x"]],
        "at_least": margins.get("at_least"),
        "within": margins.get("within"),
        "required": False,
    }


def verdict(relation: str, shift: float, **margins: float) -> str:
    """On arms where b − a is ``shift`` in the mean, with a small noise."""
    first = np.random.default_rng(3).normal(5, 2, 10)
    noise = np.linspace(-0.1, 0.1, 10)
    values = {"a": by_seed(first), "b": by_seed(first + shift + noise)}
    (found,) = judge(
        [hypothesis(relation, **margins)], lambda arm, _outcome: values[arm]
    )
    return found.verdict


CASES = [
    ("<", 1.0, {}, "supported"),
    ("<", -1.0, {}, "contradicted"),
    ("<", 0.0, {}, "undecided"),
    (">", -1.0, {}, "supported"),
    (">", 1.0, {}, "contradicted"),
    (">", 0.0, {}, "undecided"),
    ("<", 1.0, {"at_least": 0.5}, "supported"),
    ("<", 0.3, {"at_least": 0.5}, "contradicted"),
    ("<", 0.5, {"at_least": 0.5}, "undecided"),
    (">", -1.0, {"at_least": 0.5}, "supported"),
    (">", -0.3, {"at_least": 0.5}, "contradicted"),
    (">", -0.5, {"at_least": 0.5}, "undecided"),
    (">", 1.0, {"at_least": 0.5}, "contradicted"),
    ("=", 0.0, {"within": 0.5}, "supported"),
    ("=", 0.3, {"within": 0.5}, "supported"),
    ("=", -0.3, {"within": 0.5}, "supported"),
    ("=", 1.0, {"within": 0.5}, "contradicted"),
    ("=", -1.0, {"within": 0.5}, "contradicted"),
    ("=", 0.5, {"within": 0.5}, "undecided"),
    ("=", -0.5, {"within": 0.5}, "undecided"),
]


@pytest.mark.parametrize(("relation", "shift", "margins", "expected"), CASES)
def test_verdicts(relation: str, shift: float, margins: Mapping, expected: str):
    assert verdict(relation, shift, **margins) == expected


PLANTS = {
    "a swapped sign": lambda a, b, x, y: PAIR(a, b, y, x),
    "no pairing": lambda a, b, x, y: PAIR(a, b, x, by_seed(sorted(y.values()))),
    "a zero": lambda a, b, x, y: PAIR(a, b, x, x | dict.fromkeys(y, 0.0)),
}
PAIR = pair


@pytest.mark.parametrize("name", PLANTS)
def test_planted_errors_are_seen_by_these_verdicts(name: str, monkeypatch):
    monkeypatch.setattr(inference, "pair", PLANTS[name])
    wrong = [c for c in CASES if verdict(c[0], c[1], **c[2]) != c[3]]
    assert len(wrong) >= len(CASES) / 4


def test_a_difference_beyond_a_margin_is_tested_on_both_sides():
    first, second = draws(6, shift=0.9)
    values = {"a": first, "b": second}
    found = judge([hypothesis("=", within=0.2)], lambda arm, _: values[arm])[0]
    paired = pair("a", "b", first, second)
    assert found.p_against == pytest.approx(2 * paired.above(0.2))
    assert found.p_for == pytest.approx(paired.below(0.2))
    assert paired.above(-0.2) < paired.below(0.2)


def test_judging_needs_values():
    for relation, margins in (("<", {}), ("=", {"within": 1.0})):
        (found,) = judge([hypothesis(relation, **margins)], lambda *_: {})
        assert found.verdict == "undecided"
        assert (found.p_for, found.p_against) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("relation", "difference", "margins", "expected"),
    [
        ("<", 1.0, {}, "supported"),
        ("<", 0.0, {}, "undecided"),
        ("<", 0.5, {"at_least": 0.5}, "undecided"),
        (">", 1.0, {}, "contradicted"),
        ("=", 0.0, {"within": 0.1}, "supported"),
        ("=", 1.0, {"within": 0.1}, "contradicted"),
    ],
)
def test_arms_without_variance_are_judged(relation, difference, margins, expected):
    values = {"a": by_seed([1.0] * 4), "b": by_seed([1.0 + difference] * 4)}
    (found,) = judge([hypothesis(relation, **margins)], lambda arm, _: values[arm])
    assert found.verdict == expected


def test_holm_by_hand():
    assert holm([]) == []
    assert holm([0.2]) == [0.2]
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6, 0.9]) == [1.0, 1.0, 1.0]
    assert holm([0.02, 0.02]) == [0.04, 0.04]


def test_holm_is_monotone_between_raw_and_bonferroni():
    random = np.random.default_rng(0)
    for _ in range(50):
        p = random.random(6) ** 3
        found = np.array(holm(list(p)))
        assert (found >= p).all()
        assert (found <= np.minimum(1, 6 * p) + 1e-15).all()
        assert (np.diff(found[np.argsort(p)]) >= 0).all()
        # Permuting the hypotheses permutes the adjusted values.
        order = random.permutation(6)
        np.testing.assert_allclose(holm(list(p[order])), found[order])


def test_holm_holds_over_all_declared_hypotheses():
    """A p of 0.03 supports one hypothesis alone, and not beside three others."""
    first, second = draws(4, shift=0.8)
    p = pair("a", "b", first, second).above(0.0)
    assert 0.0125 < p < 0.05
    values = {"a": first, "b": second}
    alone = judge([hypothesis("<")], lambda arm, _: values[arm])
    assert alone[0].verdict == "supported"
    assert alone[0].p_for == pytest.approx(p)
    others = [{**hypothesis("<"), "sides": [["c", "x"], "<", ["c", "x"]]}] * 3
    values["c"] = first
    four = judge([hypothesis("<"), *others], lambda arm, _: values[arm])
    assert four[0].p_for == pytest.approx(4 * p)
    assert four[0].verdict == "undecided"


def test_a_family_of_true_nulls_is_rarely_rejected():
    """Four hypotheses of equal arms: at most 5 % of runs support any."""
    wrong = 0
    for repeat in range(REPEATS):
        values = {}
        for k in range(4):
            values[f"a{k}"], values[f"b{k}"] = draws(10_000 + 4 * repeat + k, n=6)
        statements = [
            {**hypothesis("<"), "sides": [[f"a{k}", "x"], "<", [f"b{k}", "x"]]}
            for k in range(4)
        ]
        found = judge(statements, lambda arm, _, values=values: values[arm])
        wrong += any(v.verdict == "supported" for v in found)
    low, high = binomial_range(0.05)
    assert low <= wrong <= high


def test_the_statement_is_written_with_its_margin():
    assert described(hypothesis("<")) == "a.x < b.x"
    assert described(hypothesis("<", at_least=0.25)) == "a.x < b.x by at least 0.25"
    assert described(hypothesis("<", at_least=0.0)) == "a.x < b.x"
    assert described(hypothesis("=", within=0.05)) == "a.x = b.x within 0.05"


def test_a_verdict_carries_what_was_declared():
    first, second = draws(3, 1.0)
    values = {"a": first, "b": second}
    declared = {**hypothesis(">", at_least=0.1), "required": True, "id": "H9"}
    (found,) = judge([declared], lambda arm, _: values[arm])
    assert (found.id, found.required) == ("H9", True)
    assert found.statement == "a.x > b.x by at least 0.1"
    assert (found.paired.first, found.paired.second) == ("a.x", "b.x")
    assert found.paired.mean == pytest.approx(
        np.mean([second[s] - first[s] for s in first])
    )
