"""The keys of a config: each mistake is one line that says where, what and the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from studies import refused, write

from normjax.study.document import read_yaml
from normjax.study.plan import make_plan
from normjax.study.schema import Hypothesis, Settings, Study
from normjax.study.training import Settings as Training
from normjax.study.validation import InvalidError, canonical, parse, validate

pytestmark = pytest.mark.jax_defaults

HEAD = "study: s\nquestion: q?\nexperiment: training\n"
GOOD = f"{HEAD}seeds: {{count: 2}}\n"
HYPOTHESIS = f"{GOOD}hypotheses:\n  - "


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# The text after the head, and the message after "c.yaml:".
BROKEN = {
    "key of the study": (
        "setings: {}\n",
        "4:1: setings: there is no such key; did you mean 'settings'?",
    ),
    "key that is like none": (
        "x: {}\n",
        "4:1: x: there is no such key; expected one of study, question, experiment, "
        "settings, seeds, arms, factorial, grid, tune, outcomes, hypotheses, smoke",
    ),
    "key of the settings": (
        "settings:\n  stepz: 4\n",
        "5:3: settings.stepz: there is no such key; did you mean 'steps'?",
    ),
    "key of the model": (
        "settings:\n  model: {wdths: [4]}\n",
        "5:11: settings.model.wdths: there is no such key; did you mean 'widths'?",
    ),
    "key of an arm": (
        "arms:\n  a: {set: {steps: 4}, form: baseline}\n",
        "5:24: arms.a.form: there is no such key; did you mean 'from'?",
    ),
    "key in place of a required one": (
        "arms:\n  a: {sett: {steps: 4}}\n",
        "5:7: arms.a.sett: there is no such key; did you mean 'set'?",
    ),
    "key of a hypothesis": (
        "hypotheses:\n  - {id: H1, statemnt: a.b < c.d}\n",
        "5:14: hypotheses.0.statemnt: there is no such key; did you mean 'statement'?",
    ),
    "text for a whole number": (
        "settings:\n  steps: four\n",
        "5:3: settings.steps: expected a whole number, got 'four'",
    ),
    "exponent for a whole number": (
        "settings:\n  steps: 1e3\n",
        "5:3: settings.steps: expected a whole number, got 1000.0; write 1000",
    ),
    "half for a whole number": (
        "settings: {steps: 4.5}\n",
        "4:12: settings.steps: expected a whole number, got 4.5",
    ),
    "bool for a whole number": (
        "settings: {steps: true}\n",
        "4:12: settings.steps: expected a whole number, got true",
    ),
    "bool for a number": (
        "settings:\n  optimizer: {learning_rate: true}\n",
        "5:15: settings.optimizer.learning_rate: expected a number, got true",
    ),
    "text for a number": (
        "settings:\n  optimizer: {learning_rate: fast}\n",
        "5:15: settings.optimizer.learning_rate: expected a number, got 'fast'",
    ),
    "number that is none": (
        "settings:\n  optimizer: {learning_rate: .nan}\n",
        "5:15: settings.optimizer.learning_rate: expected a finite number, got nan",
    ),
    "infinite number": (
        "hypotheses:\n  - {id: H1, statement: a.b < c.d, at_least: .inf}\n",
        "5:36: hypotheses.0.at_least: expected a finite number, got inf",
    ),
    "number below its bound": (
        "settings:\n  optimizer: {learning_rate: -0.1}\n",
        "5:15: settings.optimizer.learning_rate: expected more than 0, got -0.1",
    ),
    "number above its bound": (
        "settings:\n  optimizer: {momentum: 1}\n",
        "5:15: settings.optimizer.momentum: expected less than 1, got 1",
    ),
    "count below its bound": (
        "settings: {steps: 0}\n",
        "4:12: settings.steps: expected 1 or more, got 0",
    ),
    "choice": (
        "settings:\n  optimizer: {name: sdg}\n",
        "5:15: settings.optimizer.name: expected 'sgd', 'adam' or 'adamw', got 'sdg'",
    ),
    "text for a bool": (
        "settings:\n  model: {side_route: mean, side_route_shuffled: off}\n",
        "5:29: settings.model.side_route_shuffled: expected true or false, got 'off'",
    ),
    "number for a list": (
        "settings:\n  model: {widths: 4}\n",
        "5:11: settings.model.widths: expected a list, got 4",
    ),
    "empty list": (
        "settings:\n  model: {widths: []}\n",
        "5:11: settings.model.widths: expected 1 or more items, got []",
    ),
    "item of a list": (
        "settings:\n  model: {widths: [4, a]}\n",
        "5:23: settings.model.widths.1: expected a whole number, got 'a'",
    ),
    "item below its bound": (
        "settings:\n  model: {widths: [4, 0]}\n",
        "5:23: settings.model.widths.1: expected 1 or more, got 0",
    ),
    "number for a mapping": (
        "seeds: 5\n",
        "4:1: seeds: expected a mapping of keys, got 5",
    ),
    "null for an arm": (
        "arms:\n  a:\n",
        "5:3: arms.a: expected a mapping of keys, got null",
    ),
    "one seed": (
        "seeds: {count: 1}\n",
        "4:9: seeds.count: expected 2 or more, got 1",
    ),
    "role": (
        "arms:\n  a: {set: {steps: 4}, role: ctrl}\n",
        "5:24: arms.a.role: expected 'treatment', 'negative_control' or "
        "'positive_control', got 'ctrl'",
    ),
    "name of an arm": (
        "arms:\n  a b: {set: {steps: 4}}\n",
        "5:3: arms.a b: expected a letter, then letters, digits, '_' and '-', got "
        "'a b'",
    ),
    "missing part of an arm": (
        "arms:\n  a: {role: treatment}\n",
        "5:3: arms.a.set: is missing",
    ),
    "direction": (
        "outcomes: {primary: test_r2, better: up}\n",
        "4:30: outcomes.better: expected 'higher' or 'lower', got 'up'",
    ),
    "training part": (
        "settings:\n  task: {train: 400}\n",
        "5:10: settings.task.train: expected 2 to 390, so that there is a test part, "
        "got 400",
    ),
    "batch": (
        "settings: {task: {train: 40}, batch_size: 41}\n",
        "4:31: settings.batch_size: expected at most task.train, 40, got 41",
    ),
    "shuffled nothing": (
        "settings:\n  model: {side_route_shuffled: true}\n",
        "5:11: settings.model.side_route_shuffled: there is no side route to shuffle: "
        "set side_route: mean",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_line_says_where_what_was_got_and_what_is_expected(name: str):
    text, message = BROKEN[name]
    with refused(f"c.yaml:{message}"):
        make_plan(write(Path(), HEAD + text, "c.yaml"))


STATEMENTS = {
    "{id: H1, statement: a.b <= c.d}": (
        "6:14: hypotheses.0.statement: got 'a.b <= c.d', expected arm.outcome (<|>|=) "
        "arm.outcome"
    ),
    "{id: H1, statement: a < c}": (
        "6:14: hypotheses.0.statement: got 'a < c', expected arm.outcome (<|>|=) "
        "arm.outcome"
    ),
    "{id: H1, statement: a.b < c.d < e.f}": (
        "6:14: hypotheses.0.statement: got 'a.b < c.d < e.f', expected arm.outcome "
        "(<|>|=) arm.outcome"
    ),
    "{id: H1, statement: a.b = c.d}": (
        "6:14: hypotheses.0.statement: '=' needs within: and takes no at_least:"
    ),
    "{id: H1, statement: a.b = c.d, at_least: 1, within: 1}": (
        "6:14: hypotheses.0.statement: '=' needs within: and takes no at_least:"
    ),
    "{id: H1, statement: a.b < c.d, within: 0.1}": (
        "6:36: hypotheses.0.within: '<' takes at_least:, not within:"
    ),
    "{id: H1, statement: a.b < c.d, at_least: -0.1}": (
        "6:36: hypotheses.0.at_least: expected 0 or more, got -0.1"
    ),
    "{id: H1, statement: a.b = c.d, within: 0}": (
        "6:36: hypotheses.0.within: expected more than 0, got 0"
    ),
    "{statement: a.b < c.d}": "6:5: hypotheses.0.id: is missing",
}


@pytest.mark.parametrize("hypothesis", STATEMENTS)
def test_a_hypothesis_that_is_wrong(hypothesis: str):
    path = write(Path(), HYPOTHESIS + hypothesis + "\n", "c.yaml")
    with refused(f"c.yaml:{STATEMENTS[hypothesis]}"):
        validate(Study, read_yaml(path).data, read_yaml(path))


@pytest.mark.parametrize("relation", ["<", ">", "="])
@pytest.mark.parametrize("space", ["", " ", "   "])
def test_statements_are_read(relation: str, space: str):
    text = f"a-1.b_2{space}{relation}{space}baseline.loss"
    within = 0.1 if relation == "=" else None
    found = Hypothesis(id="H1", statement=text, within=within).sides
    assert found == (("a-1", "b_2"), relation, ("baseline", "loss"))


def test_settings_are_strict_and_frozen():
    class Mine(Settings):
        steps: int = 100
        name: str = "a"

    with pytest.raises(InvalidError, match=r"\Aexpected a whole number, got '3'\Z"):
        parse(Mine, {"steps": "3"})
    with pytest.raises(InvalidError, match=r"\Aexpected text, got true; put it in qu"):
        parse(Mine, {"name": True})
    with pytest.raises(ValueError, match=r"frozen"):
        Mine().steps = 4


def test_canonical_settings_are_plain_ordered_and_complete():
    norm = {"preset": "batch_norm", "at": "hidden"}
    settings = parse(Training, {"model": {"norm": norm}, "steps": 7})
    found = canonical(settings)
    assert found["steps"] == 7
    assert found["batch_size"] is None
    assert found["model"]["norm"]["running"]["decay"] == 0.99
    assert list(found) == list(Training.model_fields)
    assert json.loads(json.dumps(found)) == found
