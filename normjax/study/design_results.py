"""What a decomposition, a factorial, a grid and a tuning say, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from normjax.study import effects
from normjax.study.inference import Paired, holm, pair

Values = Callable[[str, str], Mapping[int, float]]


@dataclass(frozen=True)
class Term:
    """A number for each seed, against zero.

    Attributes:
        label: the properties or factors that it is of.
        paired: the number, with its t interval.
        p: Holm-adjusted over the design; None where nothing is tested.
    """

    label: str
    paired: Paired
    p: float | None = None


@dataclass(frozen=True)
class Share:
    """What one property has of the difference of two arms.

    Attributes:
        label: the property.
        shapley: its mean gain over all orders of changing them; they sum to the whole.
        first: its gain where nothing else is changed yet.
        last: its gain where everything else is changed already.
    """

    label: str
    shapley: Paired
    first: Paired
    last: Paired


@dataclass(frozen=True)
class Decomposition:
    """The difference of two arms, shared out among the properties that differ.

    Attributes:
        arm: the arm.
        parent: what it is from.
        total: arm − parent.
        shares: of each property.
        interactions: of each pair: what two changes do beyond their sum.
    """

    arm: str
    parent: str
    total: Paired
    shares: tuple[Share, ...]
    interactions: tuple[Term, ...]


@dataclass(frozen=True)
class Dose:
    """One point of a grid.

    Attributes:
        values: of the keys, in their order.
        arm: that has them.
        mean: of the outcome.
        change: against the baseline; None for the baseline itself.
    """

    values: tuple[Any, ...]
    arm: str
    mean: Paired
    change: Paired | None


@dataclass(frozen=True)
class TunedArm:
    """One arm over the values of the tuned setting.

    Attributes:
        arm: the declared arm.
        scores: mean of the selection metric at each value; None if a seed diverged.
        shared: the arm at the value that is best for the baseline.
        best: the arm at its own best value.
    """

    arm: str
    scores: tuple[float | None, ...]
    shared: str
    best: str


@dataclass(frozen=True)
class Tuning:
    """What was tuned, by what, and what came out.

    Attributes:
        key: the setting.
        values: tried.
        select: the metric that chose.
        rows: of each arm, the baseline first.
    """

    key: str
    values: tuple[Any, ...]
    select: str
    rows: tuple[TunedArm, ...]


@dataclass(frozen=True)
class Designed:
    """What the designs of a study say.

    Attributes:
        decompositions: of each arm with ``decompose``.
        factorial: every main effect and interaction.
        doses: the points of the grid.
        tuning: of the declared arms.
    """

    decompositions: tuple[Decomposition, ...] = ()
    factorial: tuple[Term, ...] = ()
    doses: tuple[Dose, ...] = ()
    tuning: Tuning | None = None


def judge_designs(plan: Mapping[str, Any], values: Values) -> Designed:
    """Judge the designs of a run on its primary outcome.

    Args:
        plan: as ``plan.json`` holds it.
        values: ``values(arm, metric)`` gives the values by seed.

    Returns:
        ``Designed``; empty for a study without designs.
    """
    designs, outcomes = plan.get("designs") or {}, plan["outcomes"]
    if not designs or outcomes is None:
        return Designed()
    metric = outcomes["primary"]
    grid, tune = designs.get("grid"), designs.get("tune")
    return Designed(
        tuple(
            share_out(about, metric, values)
            for about in designs.get("decompositions", ())
        ),
        _factorial(designs["factorial"], metric, values)
        if "factorial" in designs
        else (),
        tuple(_doses(grid, metric, values)) if grid else (),
        choose(tune, values) if tune else None,
    )


def _game(
    lattice: Sequence[str], metric: str, values: Values
) -> tuple[list[int], np.ndarray]:
    """Seeds, and every combination's outcome; a seed lost anywhere is lost whole."""
    found = [values(arm, metric) for arm in lattice]
    seeds = sorted(set().union(*found))
    game = np.array([[v.get(s, np.nan) for s in seeds] for v in found], np.float64)
    return seeds, np.where(np.isfinite(game).all(axis=0), game, np.nan)


def sample(label: str, seeds: Sequence[int], numbers: Any) -> Paired:
    """Numbers by seed against zero."""
    zeros = dict.fromkeys(seeds, 0.0)
    return pair("0", label, zeros, dict(zip(seeds, map(float, numbers), strict=True)))


def share_out(about: Mapping[str, Any], metric: str, values: Values) -> Decomposition:
    """Share the difference of two arms out among the properties that differ.

    Args:
        about: arm, parent, players and lattice, as the plan has them.
        metric: the outcome.
        values: by arm and metric.

    Returns:
        The ``Decomposition``; per seed its Shapley values sum to the difference.
    """
    seeds, game = _game(about["lattice"], metric, values)
    names, last = about["players"], len(game) - 1
    phi = effects.shapley(game)
    shares = (
        Share(
            name,
            sample(name, seeds, phi[i]),
            sample(name, seeds, game[1 << i] - game[0]),
            sample(name, seeds, game[last] - game[last ^ 1 << i]),
        )
        for i, name in enumerate(names)
    )
    pairs = (
        Term(label, sample(label, seeds, numbers))
        for (i, j), numbers in effects.interactions(game).items()
        for label in [f"{names[i]} × {names[j]}"]
    )
    return Decomposition(
        about["arm"],
        about["parent"],
        sample(about["arm"], seeds, game[last] - game[0]),
        tuple(shares),
        tuple(pairs),
    )


def _factorial(
    about: Mapping[str, Any], metric: str, values: Values
) -> tuple[Term, ...]:
    """Every main effect and interaction, corrected together by Holm's method."""
    seeds, game = _game(about["lattice"], metric, values)
    names = list(about["factors"])
    terms = [
        (label, sample(label, seeds, numbers))
        for chosen, numbers in effects.contrasts(game).items()
        for label in [" × ".join(names[i] for i in chosen)]
    ]
    p = holm([1.0 if paired.p is None else paired.p for _, paired in terms])
    return tuple(Term(*term, p) for term, p in zip(terms, p, strict=True))


def _doses(about: Mapping[str, Any], metric: str, values: Values):
    base = values("baseline", metric)
    for point in about["points"]:
        arm, found = point["arm"], values(point["arm"], metric)
        change = None
        if arm != "baseline":
            change = pair(f"baseline.{metric}", f"{arm}.{metric}", base, found)
        mean = sample(arm, list(found), list(found.values()))
        yield Dose(tuple(point["values"]), arm, mean, change)


def choose(about: Mapping[str, Any], values: Values) -> Tuning:
    """The best value of a tuned setting: for the baseline, and for each arm.

    Best is the mean of the selection metric over seeds. A value at which a seed
    diverged comes after all at which none did; of equals the first is taken.

    Args:
        about: the tuning, as the plan has it.
        values: by arm and metric.

    Returns:
        The ``Tuning``.
    """
    sign = 1.0 if about["better"] == "lower" else -1.0
    places, scores = {}, {}
    for arm, variants in about["arms"].items():
        ranks = []
        for variant in variants:
            found = np.array(list(values(variant, about["select"]).values()), float)
            good = found[np.isfinite(found)]
            mean = float(good.mean()) if good.size else np.inf * sign
            ranks.append((len(found) - len(good), sign * mean))
        places[arm] = min(range(len(ranks)), key=ranks.__getitem__)
        scores[arm] = tuple(None if lost else sign * m for lost, m in ranks)
    shared = places["baseline"]
    return Tuning(
        about["key"],
        tuple(about["values"]),
        about["select"],
        tuple(
            TunedArm(arm, scores[arm], variants[shared], variants[places[arm]])
            for arm, variants in about["arms"].items()
        ),
    )
