"""``normjax audit``: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Call, table
from commands import normjax as normjax

pytestmark = pytest.mark.jax_defaults

LAYERS = """
import jax.numpy as jnp

def norm(x, ddof=0, eps=1e-5):
    wide = x.astype(jnp.float32)
    v = wide.var(-1, ddof=ddof, keepdims=True)
    y = (wide - wide.mean(-1, keepdims=True)) / jnp.sqrt(v + eps)
    return y.astype(x.dtype)

def wrong(x):
    return norm(x, ddof=1)

def l1(x):
    return x / (jnp.abs(x).mean(-1, keepdims=True) + 1e-6)

def tanh(x):
    return jnp.tanh(0.7 * x)
"""


@pytest.fixture(autouse=True)
def _own_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_layers.py").write_text(LAYERS)
    monkeypatch.syspath_prepend(tmp_path)


def audit(normjax: Call, name: str, *options: str):
    return normjax("audit", f"own_layers:{name}", "--shape", "3,6", *options)


def test_the_report_has_one_line_for_each_finding(normjax: Call):
    done = audit(normjax, "norm")
    assert (done.code, done.err) == (0, "")
    head, *rows = table(done.out)
    assert head[:3] == ["normjax audit", "norm", "input (3,6) float32"]
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["grouping"] == [
        "axis 0 kept | axis 1 reduced; examples independent", "certain",
    ]  # fmt: skip
    assert by_name["formula"] == ["y = w (x − mean) / √(var + eps) + b", "certain"]
    assert by_name["epsilon"] == ["1e-05 (inside the root)", "certain"]
    assert by_name["ddof"] == ["0", "certain"]
    assert by_name["spec"] == ["NormSpec('b [c]')"]


def test_a_defect_is_marked_and_is_status_1(normjax: Call):
    done = audit(normjax, "wrong")
    assert done.code == 1
    rows = {row[0]: row[1:] for row in table(done.out)}
    assert rows["ddof"] == ["1", "certain", "!"]
    assert rows["spec"] == ["NormSpec('b [c]', ddof=1)"]
    assert "1 warning (!): ddof; --explain NAME shows the evidence" in done.out


def test_what_no_spec_expresses_has_a_nearest_one(normjax: Call):
    done = audit(normjax, "l1")
    rows = {row[0]: row[1:] for row in table(done.out)}
    assert rows["spec"] == ["none reproduces it"]
    assert rows["nearest"][0].startswith("NormSpec('b [c]', center=False, divide='rms'")
    assert rows["differs"] == ["divides by mean_abs, not by rms"]


def test_no_normalization_is_one_line(normjax: Call):
    done = audit(normjax, "tanh")
    assert done.code == 0
    _, line = done.out.splitlines()
    assert line.startswith("not a normalization: element-wise: DyT: tanh(0.7 x) (")


def test_json_holds_every_number(normjax: Call):
    done = audit(normjax, "wrong", "--json", "--seed", "3")
    assert done.code == 1
    found = json.loads(done.out)
    assert (found["seed"], found["shape"], found["spec"]["ddof"]) == (3, [3, 6], 1)
    findings = {finding["name"]: finding for finding in found["findings"]}
    assert findings["ddof"]["defect"] is True
    assert findings["epsilon"]["facts"]["epsilon"] == 1e-5
    assert findings["formula"]["facts"]["threshold"] > 0


def test_against_prints_only_what_differs(normjax: Call):
    same = audit(normjax, "norm", "--against", "b [c]")
    assert (same.code, same.out) == (0, "no difference\n")
    done = audit(normjax, "wrong", "--against", "b [c]")
    assert done.code == 1
    assert table(done.out) == [["property", "wrong", "b [c]"], ["ddof", "1", "0"]]
    other = audit(normjax, "tanh", "--against", "b [c]")
    assert other.code == 1
    assert other.out.startswith("not a normalization: element-wise")


def test_explain_shows_the_evidence_and_the_numbers(normjax: Call):
    done = audit(normjax, "wrong", "--explain", "epsilon")
    assert done.code == 1
    first, evidence, *rows = done.out.splitlines()
    assert first == "epsilon: 1e-05 (inside the root) (certain)"
    assert evidence.startswith("measured ")
    assert {row[0] for row in table("\n".join(rows))} >= {"misfit", "placement"}


def test_a_budget_ends_the_audit_with_what_is_known(normjax: Call):
    done = audit(normjax, "norm", "--max-calls", "5")
    assert done.code == 0
    assert "stopped after 5 calls: what comes later was not asked" in done.out


def test_a_quick_audit_says_what_it_did_not_ask(normjax: Call):
    done = audit(normjax, "wrong", "--quick", "--json")
    found, whole = (
        json.loads(each.out) for each in (done, audit(normjax, "wrong", "--json"))
    )
    names = [finding["name"] for finding in found["findings"]]
    assert names == ["grouping", "formula", "epsilon", "ddof", "affine", "variance"]
    assert found["calls"] < whole["calls"]
    unasked = [finding["name"] for finding in whole["findings"]][len(names) :]
    assert {"application", "half types", "batch", "derivative"} == set(unasked)
    assert "half types, mask, stored statistics" in found["open"][-1]
    assert not any("quick" in text for text in whole["open"])


WRONG = {
    "no module": (["gone:norm"], "gone:norm: there is no module 'gone'"),
    "no name": (["own_layers:nrm"], "own_layers has no 'nrm'; did you mean 'norm'?"),
    "no colon": (["own_layers"], "expected MODULE:NAME"),
    "shape": (["own_layers:norm", "--shape", "3,x"], "--shape got '3,x', expected"),
    "empty shape": (["own_layers:norm", "--shape", "0,4"], "shape is (0, 4), expected"),
    "dtype": (["own_layers:norm", "--dtype", "int8"], "dtype is 'int8', expected"),
    "spec": (["own_layers:norm", "--against", "layernorm"], "mean 'layer_norm'"),
    "finding": (
        ["own_layers:norm", "--explain", "eps"],
        "--explain: there is no finding 'eps'; there are grouping, formula, epsilon",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line_and_status_2(normjax: Call, name: str):
    arguments, message = WRONG[name]
    done = normjax("audit", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1
