"""Arms that a design asks for: combinations of properties, grids, tuned settings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from normjax.study.arms import BASELINE, PlannedArm
from normjax.study.decomposition import decompose
from normjax.study.document import Document, Location, put
from normjax.study.experiment import Experiment
from normjax.study.generated import MOST, Builder, RefusedError, bits, members
from normjax.study.schema import Study, Tune
from normjax.study.validation import canonical


def expand(
    study: Study,
    document: Document,
    experiment: Experiment,
    arms: dict[str, PlannedArm],
) -> tuple[dict[str, PlannedArm], dict[str, Any]]:
    """Add the arms that the designs of a study ask for.

    Args:
        study: the study.
        document: for the places.
        experiment: whose schema the settings have.
        arms: the declared ones.

    Returns:
        All arms, and what each design consists of, as plain data for the plan. The
        arms of k properties or factors stand in a list of 2^k names: bit i of the
        place says whether the i-th is changed.

    Raises:
        ConfigError: for the first combination that cannot be built.
    """
    builder, designs = Builder(document, experiment, arms), {}
    if study.tune is not None:
        designs["tune"] = _tune(builder, study.tune, list(arms))
    decompositions = [
        decompose(builder, name, arm.decompose)
        for name, arm in study.arms.items()
        if arm.decompose
    ]
    if decompositions:
        designs["decompositions"] = decompositions
    if study.factorial:
        designs["factorial"] = _factorial(builder, study)
    if study.grid:
        designs["grid"] = _grid(builder, study)
    return builder.arms, designs


def _put(builder: Builder, raw: Any, key: str, value: Any, at: Location) -> Any:
    try:
        return put(raw, key, value)
    except KeyError as error:
        text = f"{key}: {error.args[0]} is no mapping in {BASELINE!r}: set it whole"
        raise builder.document.error(at, text) from None


def _built(builder: Builder, raw: Any, what: str, at: Location) -> Any:
    try:
        return builder.settings(raw)
    except RefusedError as error:
        raise builder.document.error(at, f"{what}: {error}") from None


def _factorial(builder: Builder, study: Study) -> dict[str, Any]:
    """Every combination of factors; each changes one property of the baseline."""
    at: Location = ("factorial",)
    names = list(study.factorial)
    if not 2 <= len(names) <= MOST:
        text = f"expected 2 to {MOST} factors, got {len(names)}"
        raise builder.document.error(at, text)
    base = builder.arms[BASELINE].cell.settings
    lattice, changed = [BASELINE], {}
    for mask in range(1, 2 ** len(names)):
        chosen = members(names, mask)
        title, raw, here = "+".join(chosen), dict(study.settings), at
        if len(chosen) == 1:
            here = (*at, title)
        for factor in chosen:
            for key, value in study.factorial[factor].items():
                raw = _put(builder, raw, key, value, here)
        settings = _built(builder, raw, title, here)
        if len(chosen) == 1:
            found = builder.changes(base, settings)
            if len(found) != 1:
                named = ", ".join(c.name for c in found) or "nothing"
                text = f"expected a factor to change one property, it changes {named}"
                raise builder.document.error(here, text)
            changed[title] = found[0]
        lattice.append(title)
        parents = [lattice[mask ^ (1 << i)] for i in bits(mask)]
        builder.add(title, settings, parents, "factorial", here)
    factors = {
        name: {
            "name": c.name,
            "before": canonical(c.before),
            "after": canonical(c.after),
        }
        for name, c in changed.items()
    }
    return {"factors": factors, "lattice": lattice}


def _grid(builder: Builder, study: Study) -> dict[str, Any]:
    """Every combination of values; the one that the baseline has is the baseline."""
    keys, points, made = list(study.grid), [], [BASELINE]
    for values in itertools.product(*study.grid.values()):
        at: Location = ("grid",) if len(keys) > 1 else ("grid", keys[0])
        name = ",".join(
            f"{key}={shown(value, builder.document, ('grid', key))}"
            for key, value in zip(keys, values, strict=True)
        )
        raw = dict(study.settings)
        for key, value in zip(keys, values, strict=True):
            raw = _put(builder, raw, key, value, at)
        settings = _built(builder, raw, name, at)
        if not builder.changes(builder.arms[BASELINE].cell.settings, settings):
            name = BASELINE
        else:
            builder.add(name, settings, made, "grid", at)
            made.append(name)
        points.append({"values": list(values), "arm": name})
    return {"keys": keys, "points": points}


def _tune(builder: Builder, tune: Tune, arms: Sequence[str]) -> dict[str, Any]:
    """Every arm at each value; where an arm has the value already it is that arm."""
    found: dict[str, list[str]] = {}
    short = tune.key.rsplit(".", 1)[-1]
    for arm in arms:
        found[arm], settings = [], builder.arms[arm].cell.settings
        for index, value in enumerate(tune.values):
            at: Location = ("tune", "values", index)
            name = f"{arm}@{short}={shown(value, builder.document, at)}"
            raw = _put(builder, canonical(settings), tune.key, value, at)
            tuned = _built(builder, raw, name, at)
            if builder.changes(settings, tuned):
                builder.add(name, tuned, [arm], "tuning", at)
            else:
                name = arm
            found[arm].append(name)
    return {**canonical(tune), "arms": found}


def shown(value: Any, document: Document, at: Location) -> str:
    """A value as it stands in the name of an arm: 1e-3, rms, null, 64-64.

    Raises:
        ConfigError: for a mapping without a preset, which has no short name.

    Example:
        >>> from normjax.study.document import Document
        >>> [shown(v, Document("d", {}), ()) for v in (0.001, 0.5, 16, None, [8, 8])]
        ['1e-3', '0.5', '16', 'null', '8-8']
    """
    if isinstance(value, Mapping) and "preset" in value:
        return str(value["preset"])
    if isinstance(value, list) and value:
        return "-".join(shown(item, document, at) for item in value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        plain = f"{value:g}"
        mantissa, _, exponent = f"{value:e}".partition("e")
        raised = f"{float(mantissa):g}e{int(exponent)}"
        return min(plain, raised, key=len) if "e" not in plain else raised
    if isinstance(value, str | int):
        return str(value)
    text = f"got {value!r}, expected a number, a word, null, a list or a preset"
    raise document.error(at, text)
