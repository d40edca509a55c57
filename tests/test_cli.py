"""The command line: what it prints, exit statuses 0, 1 and 2, and no traceback."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from commands import Call, Done, process, table
from commands import normjax as normjax

import normjax as nj
from normjax import cli, verify
from normjax.presets import PRESETS
from normjax.verify import Check, check_jacobian

pytestmark = pytest.mark.jax_defaults


def test_spec_shows_the_card_of_a_preset(normjax: Call):
    done = normjax("spec", "batch_norm")
    assert (done.code, done.err) == (0, "")
    first, *rows = done.out.splitlines()
    assert first == "NormSpec('[...] c', affine='c', running=Running())"
    card = table("\n".join(rows))
    assert ["formula", "(x - m) / √(σ² + ε)"] in card
    assert ["removes", "offset, scale"] in card
    assert ["couples examples", "yes"] in card
    assert ["parameters", "scale over c, bias over c"] in card
    assert ["stores", "mean, variance"] in card
    assert [row[0] for row in card if row[0] in ("train", "stored", "frozen")] == [
        "train", "stored", "frozen",
    ]  # fmt: skip
    assert ["Jacobian", "symmetric"] in card
    assert sum(row[0] == "degenerates" for row in card) == 5


def test_brackets_of_patterns_are_printed(normjax: Call):
    """Rich would take [h w] for a style and drop it."""
    done = normjax("spec", "b [h w] c", "--set", "epsilon=1e-3", "--set", "divide=rms")
    assert done.code == 0
    assert done.out.startswith("NormSpec('b [h w] c', divide='rms', epsilon=0.001)\n")
    assert "[bold" not in done.out
    assert "b [red] c" in normjax("spec", "b [red] c").out
    done = normjax("diff", "[bold] c", "... [c]")
    assert ["pattern", "[bold] c", "... [c]", "declared"] in table(done.out)
    assert "pattern 'b c' has no brackets" in normjax("spec", "b c").err
    assert "b [h w c\n    ^" in normjax("spec", "b [h w c").err


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["groups=4"], "sizes={'g': 4}"),
        (["center=false", "divide=rms"], "center=False, divide='rms'"),
        (["affine=null"], "NormSpec('b [...] (g [c])', sizes={'g': 32})"),
        (["divide=none"], "divide='none'"),
        (["affine.bias=false"], "affine=Affine('(g c)', bias=False)"),
        (["channels=first"], "NormSpec('b (g [c]) [...]'"),
        (["epsilon=1e-3"], "epsilon=0.001"),
        (["ddof=1"], "ddof=1"),
    ],
)
def test_set_changes_fields_and_a_presets_own_keys(normjax: Call, options, shown):
    arguments = [part for text in options for part in ("--set", text)]
    done = normjax("spec", "group_norm", *arguments)
    assert done.code == 0
    assert shown in done.out.splitlines()[0]


def test_diff_names_every_property_that_a_swap_changes(normjax: Call):
    done = normjax("diff", "batch_norm", "layer_norm")
    assert (done.code, done.err) == (0, "")
    header, *rows = table(done.out)
    assert header == ["property", "batch_norm", "layer_norm"]
    expected = nj.diff(nj.batch_norm(), nj.layer_norm())
    assert [(row[0], row[-1]) for row in rows] == [
        (d.name, "declared" if d.declared else "follows") for d in expected
    ]
    assert rows[0] == ["pattern", "[...] c", "... [c]", "declared"]
    assert rows[1] == ["running.present", "yes", "no", "declared"]
    names = {row[0] for row in rows}
    assert {"couples_examples", "stores", "train_differs", "statistics"} <= names


def test_diff_with_a_shape_compares_meanings(normjax: Call):
    one = ("b [h] c", "n [w] d")
    assert normjax("diff", *one, "--shape", "2,3,4").out == "no difference\n"
    rows = table(normjax("diff", *one).out)[1:]
    assert [row[0] for row in rows if row[-1] == "declared"] == ["pattern"]
    assert normjax("diff", "layer_norm", "layer_norm").out == "no difference\n"


WRONG = {
    "unknown preset": (
        ["spec", "layernorm"],
        "there is no preset 'layernorm'; did you mean 'layer_norm'?",
    ),
    "pattern": (
        ["spec", "b [h w c"],
        "pattern: '[' is never closed: add ']'\n  b [h w c\n    ^",
    ),
    "field": (
        ["spec", "layer_norm", "--set", "centre=false"],
        "NormSpec has no field 'centre'; did you mean 'center'?",
    ),
    "value": (
        ["spec", "layer_norm", "--set", "center=yes"],
        "center is 'yes', expected True or False",
    ),
    "no value": (
        ["spec", "layer_norm", "--set", "epsilon"],
        "--set got 'epsilon', expected FIELD=VALUE",
    ),
    "part that is not there": (
        ["spec", "layer_norm", "--set", "running.decay=0.5"],
        "running.decay cannot be set, since running is None: set running as a whole",
    ),
    "keys of presets on a pattern": (
        ["spec", "b [c]", "--set", "groups=2"],
        "there is no preset 'b [c]'; expected one of " + ", ".join(PRESETS),
    ),
    "shape": (
        ["diff", "layer_norm", "rms_norm", "--shape", "8,x"],
        "--shape got '8,x', expected numbers like 8,5,16",
    ),
    "shape that does not fit": (
        ["diff", "layer_norm", "group_norm", "--shape", "8,5"],
        "pattern 'b [...] (g [c])': g=32 does not divide dimension 1 of size 5",
    ),
    "preset to verify": (
        ["verify", "layer_nrm"],
        "there is no preset 'layer_nrm'; did you mean 'layer_norm'?",
    ),
    "config": (["run", "gone.yaml"], "gone.yaml: there is no such file"),
    "run": (["report", "gone"], "gone holds no finished run: plan.json is missing"),
    "two modes": (
        ["run", "gone.yaml", "--resume", "--force"],
        "--resume and --force exclude each other",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_message_and_status_2(normjax: Call, name: str):
    arguments, message = WRONG[name]
    assert normjax(*arguments) == Done(2, "", message + "\n")


@pytest.mark.parametrize(
    "arguments", [["spec"], ["nonsense"], ["run", "a.yaml", "--seeds", "four"]]
)
def test_wrong_usage_is_status_2_too(normjax: Call, arguments: list[str]):
    done = normjax(*arguments)
    assert done.code == 2
    assert "Usage:" in done.err


def evidence(spec: nj.NormSpec, **_: Any) -> tuple[Check, ...]:
    """A small real check in place of the long suite."""
    return check_jacobian(spec, jnp.asarray([[1.0, 2.0, 4.0], [0.5, -1.0, 3.0]]))


def test_verify_prints_measured_against_predicted(normjax: Call, monkeypatch):
    monkeypatch.setattr(verify, "check_spec", evidence)
    done = normjax("verify", "layer_norm", "b [c]", "--set", "epsilon=1e-3")
    assert done.code == 0
    count = len(evidence(nj.layer_norm())) + len(evidence(nj.NormSpec("b [c]")))
    header, *rows, last = table(done.out)
    assert header == ["fact", "on", "measured", "predicted", "error", "tolerance"]
    assert [row[0] for row in rows] == ["held"] * count
    assert last[0].startswith(f"{count} of {count} held on jax ")


def test_a_check_that_fails_is_status_1(normjax: Call, monkeypatch):
    def planted(spec: nj.NormSpec, **_: Any) -> tuple[Check, ...]:
        first, *others = evidence(spec)
        return (replace(first, error=1.0), *others)

    monkeypatch.setattr(verify, "check_spec", planted)
    done = normjax("verify", "layer_norm")
    assert done.code == 1
    rows = table(done.out)
    assert [row[0] for row in rows[1:-1]].count("failed") == 1
    count = len(rows) - 2
    assert rows[-1][0].startswith(f"{count - 1} of {count} held on jax ")


def test_verify_without_a_spec_checks_the_facts(normjax: Call, monkeypatch):
    facts = [replace(check, name=f"fact {i}")
             for i, check in enumerate(evidence(nj.layer_norm())[:2])]  # fmt: skip
    monkeypatch.setattr(verify, "check_facts", lambda: facts)
    done = normjax("verify")
    assert done.code == 0
    assert [row[1] for row in table(done.out)[1:-1]] == ["fact 0", "fact 1"]


def test_the_core_commands_need_no_extra(tmp_path: Path):
    extras = sorted(cli.EXTRAS - {"pydantic", "pydantic_core"})  # typer has these
    hide = f"import sys; sys.modules |= dict.fromkeys({extras})"
    done = process(hide, "diff", "layer_norm", "rms_norm", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "affine.bias" in done.out


def test_a_mistake_of_ours_keeps_its_traceback(tmp_path: Path):
    code = "import normjax.cli.layers as c; c.resolve = lambda *_: 1 / 0"
    done = process(code, "spec", "layer_norm", folder=tmp_path)
    assert done.code == 1
    assert "ZeroDivisionError" in done.err
