"""Two runs side by side: what differs in what was declared, and in what was found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normjax.study.document import ConfigError
from normjax.study.inference import Paired, pair
from normjax.study.store import Results, load

ABSENT = "absent"
# Without these, equal seeds draw other numbers.
DRAWS = ("random_generator", "data")


@dataclass(frozen=True)
class KeyDifference:
    """One declared or recorded value that two runs do not share.

    Attributes:
        key: dotted, as in the config: ``settings.optimizer.learning_rate``.
        first: in the first run; ``"absent"`` where it has no such key.
        second: in the second run.
    """

    key: str
    first: Any
    second: Any


@dataclass(frozen=True)
class EffectPair:
    """The effect of an arm against its parent, in both runs.

    Attributes:
        arm: the arm.
        parent: what it is from.
        metric: what is compared.
        at: shared or best settings, where arms were tuned; None else.
        first: the paired difference in the first run.
        second: in the second run.
        change: second − first, seed by seed; None where seeds do not pair.
        verdicts: of both.
    """

    arm: str
    parent: str
    metric: str
    at: str | None
    first: Paired
    second: Paired
    change: Paired | None
    verdicts: tuple[str | None, str | None]


@dataclass(frozen=True)
class Comparison:
    """Everything in which two runs differ.

    Attributes:
        config: values of the resolved config.
        sources: data, versions, device, commit.
        hypotheses: by id, both verdicts; only those that both declare alike.
        same_hypotheses: whether both declared the same before they ran.
        seeds: how many both have, only the first, only the second.
        pairs: whether equal seeds drew equal numbers, so that effects pair.
        effects: of the contrasts that both judge.
        only_first: contrasts of the first run that the second lacks.
        only_second: contrasts of the second run that the first lacks.
    """

    config: tuple[KeyDifference, ...]
    sources: tuple[KeyDifference, ...]
    hypotheses: Mapping[str, tuple[str, str]]
    same_hypotheses: bool
    seeds: tuple[int, int, int]
    pairs: bool
    effects: tuple[EffectPair, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]


def load_judged(run: str | Path) -> tuple[Results, dict[str, Any]]:
    """A finished run and its analysis.

    Args:
        run: the run directory.

    Returns:
        Its ``Results`` and the content of ``analysis.json``.

    Raises:
        ConfigError: if there is no finished, analysed run.
    """
    results = load(run)
    path = results.folder / "analysis.json"
    if not path.is_file():
        text = f"{run} holds no finished run: analysis.json is missing"
        raise ConfigError(text)
    return results, json.loads(path.read_text(encoding="utf-8"))


def compare(first: str | Path, second: str | Path) -> Comparison:
    """Compare two finished runs.

    The difference of two effects is taken seed by seed, with Student's t interval,
    where both runs have at least two common seeds, the same random generator and the
    same data.

    Args:
        first: a run directory.
        second: another one.

    Returns:
        The ``Comparison``.

    Raises:
        ConfigError: if one of them holds no finished, analysed run.
    """
    (one, judged_one), (two, judged_two) = load_judged(first), load_judged(second)
    seeds = [_seeds(results) for results in (one, two)]
    common = seeds[0] & seeds[1]
    same = all(one.provenance.get(k) == two.provenance.get(k) for k in DRAWS)
    pairs = same and len(common) > 1
    ours, theirs = _contrasts(judged_one), _contrasts(judged_two)
    effects = (
        _effect(key, (one, ours[key]), (two, theirs[key]), pairs)
        for key in ours
        if key in theirs
    )
    return Comparison(
        tuple(_config(one.plan, two.plan)),
        tuple(_differences(_sources(one.provenance), _sources(two.provenance))),
        _verdicts(judged_one, judged_two),
        one.plan["hypotheses_hash"] == two.plan["hypotheses_hash"],
        (len(common), len(seeds[0] - common), len(seeds[1] - common)),
        pairs,
        tuple(effects),
        tuple(_described(key) for key in ours if key not in theirs),
        tuple(_described(key) for key in theirs if key not in ours),
    )


def _seeds(results: Results) -> set[int]:
    return {seed for block in results.plan["blocks"] for seed in block["seeds"]}


def _config(first: Mapping[str, Any], second: Mapping[str, Any]):
    """What a user would change in the one config to get the other.

    Settings of arms are those of the baseline with changes; where an arm only follows
    the baseline, nothing is said of it.
    """
    yield from _differences(_declared(first), _declared(second))
    arms = first["arms"], second["arms"]
    base = list(_differences(*(a["baseline"]["settings"] for a in arms)))
    for change in base:
        yield KeyDifference(f"settings.{change.key}", change.first, change.second)
    for name in dict.fromkeys((*arms[0], *arms[1])):
        if name not in arms[0] or name not in arms[1]:
            there = tuple("present" if name in a else ABSENT for a in arms)
            yield KeyDifference(f"arms.{name}", *there)
            continue
        one, two = arms[0][name], arms[1][name]
        for key in ("from", "role", "confounded"):
            if one[key] != two[key]:
                yield KeyDifference(f"arms.{name}.{key}", one[key], two[key])
        if name == "baseline":
            continue
        for change in _differences(one["settings"], two["settings"]):
            if change not in base:
                key = f"arms.{name}.settings.{change.key}"
                yield KeyDifference(key, change.first, change.second)


def _declared(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config beside settings and arms."""
    names = ("study", "question", "experiment", "engine", "seeds", "outcomes")
    hypotheses = {
        h["id"]: {k: v for k, v in h.items() if k not in ("id", "sides")}
        for h in plan["hypotheses"]
    }
    return {name: plan[name] for name in names} | {"hypotheses": hypotheses}


def _sources(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was computed from and with; not when, nor how it was called."""
    left_out = ("started", "command")
    return {k: v for k, v in provenance.items() if k not in left_out}


def _differences(first: Any, second: Any, key: str = "") -> Iterator[KeyDifference]:
    """Dotted keys whose values differ; lists are values."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in dict.fromkeys((*first, *second)):
            inner = f"{key}.{name}" if key else str(name)
            values = first.get(name, ABSENT), second.get(name, ABSENT)
            yield from _differences(*values, inner)
    elif first != second:
        yield KeyDifference(key, first, second)


def _contrasts(analysis: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    names = ("arm", "parent", "metric", "at")
    return {tuple(c.get(n) or "" for n in names): c for c in analysis["contrasts"]}


def _described(key: tuple[str, ...]) -> str:
    arm, parent, metric, at = key
    return f"{arm} − {parent}, {metric}" + (f" at {at}" if at else "")


def _effect(key: tuple[str, ...], first: Any, second: Any, pairs: bool) -> EffectPair:
    (one, contrast_one), (two, contrast_two) = first, second
    sides = (
        _by_seed(one, contrast_one["paired"]),
        _by_seed(two, contrast_two["paired"]),
    )
    arm, parent, metric, at = key
    return EffectPair(
        arm,
        parent,
        metric,
        at or None,
        Paired(**contrast_one["paired"]),
        Paired(**contrast_two["paired"]),
        pair("first", "second", *_common(*sides)) if pairs else None,
        (contrast_one["verdict"], contrast_two["verdict"]),
    )


def _by_seed(results: Results, paired: Mapping[str, Any]) -> dict[int, float]:
    """The difference of each seed that both sides have; NaN where one is lost."""
    before, after = (
        results.values(*paired[side].rsplit(".", 1)) for side in ("first", "second")
    )
    return {seed: after[seed] - before[seed] for seed in before if seed in after}


def _common(first: Mapping[int, float], second: Mapping[int, float]):
    """Both without the seeds that only one run ran: these are not lost."""
    shared = [seed for seed in first if seed in second]
    return {s: first[s] for s in shared}, {s: second[s] for s in shared}


def _verdicts(first: Mapping[str, Any], second: Mapping[str, Any]):
    """Both verdicts on each hypothesis that reads the same in both."""
    ours, theirs = (
        {v["id"]: (v["statement"], v["verdict"]) for v in judged["verdicts"]}
        for judged in (first, second)
    )
    return {
        name: (ours[name][1], theirs[name][1])
        for name in ours
        if name in theirs and ours[name][0] == theirs[name][0]
    }
