"""Arms: resolved settings, each one property away from the arm that it is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normjax.layout import Layout
from normjax.records import suggest
from normjax.study.cells import Cell
from normjax.study.document import ConfigError, Document, Location, put
from normjax.study.experiment import Experiment
from normjax.study.norm_setting import NormSetting
from normjax.study.schema import Arm, Study
from normjax.study.validation import InvalidError, parse, validate
from normjax.traits import diff

BASELINE = "baseline"


@dataclass(frozen=True)
class Change:
    """One property in which an arm differs from the arm that it is from."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class PlannedArm:
    """An arm with resolved settings.

    Attributes:
        name: of the arm.
        parent: the arm that it differs from; None for the baseline.
        cell: what ``measure`` gets.
        changes: the properties that differ; exactly one unless ``confounded``.
        role: treatment, negative or positive control; of a generated arm the design
            that it belongs to (decomposition, factorial, grid, tuning).
        confounded: whether it changes several properties on purpose.
    """

    name: str
    parent: str | None
    cell: Cell
    changes: tuple[Change, ...] = ()
    role: str = "treatment"
    confounded: bool = False


def resolve_arms(
    study: Study, document: Document, experiment: Experiment
) -> dict[str, PlannedArm]:
    """Resolve every arm after the one that it is from."""
    if BASELINE in study.arms:
        raise document.error(
            ("arms", BASELINE), "is the reserved name of the settings without changes"
        )
    settings = validate(experiment.settings, study.settings, document, ("settings",))
    for path, message in misfits(settings, experiment.shapes(settings)):
        raise document.error(("settings", *path.split(".")), message)
    raw: dict[str, dict[str, Any]] = {BASELINE: dict(study.settings)}
    arms = {BASELINE: PlannedArm(BASELINE, None, Cell(BASELINE, settings))}
    waiting = dict(study.arms)
    while waiting:
        ready = [name for name, arm in waiting.items() if arm.from_ in arms]
        if not ready:
            raise _lost(waiting, study, document)
        for name in ready:
            arm = waiting.pop(name)
            raw[name] = _changed(raw[arm.from_], name, arm, arms[arm.from_], document)
            arms[name] = _resolve(
                name, arm, raw[name], arms[arm.from_], document, experiment
            )
    return {BASELINE: arms[BASELINE], **{name: arms[name] for name in study.arms}}


def _lost(waiting: Mapping[str, Arm], study: Study, document: Document) -> ConfigError:
    """An arm that is from nothing, or from itself by a circle."""
    for name, arm in waiting.items():
        if arm.from_ not in study.arms:
            hint = suggest(arm.from_, [BASELINE, *study.arms])
            text = f"there is no arm {arm.from_!r}{hint}"
            return document.error(("arms", name, "from"), text)
    name = next(iter(waiting))
    text = f"a circle of {', '.join(waiting)}: none is from {BASELINE}"
    return document.error(("arms", name, "from"), text)


def _changed(
    base: dict[str, Any], name: str, arm: Arm, parent: PlannedArm, document: Document
) -> dict[str, Any]:
    """The raw settings of an arm; a path through what its parent lacks is refused."""
    for key, value in arm.set.items():
        at = ("arms", name, "set", key)
        absent = _null(parent.cell.settings, key.split(".")[:-1])
        if absent:
            text = f"{absent} is null in {parent.name!r}; start from an arm that has it"
            raise document.error(at, text)
        try:
            base = put(base, key, value)
        except KeyError as error:
            text = f"{error.args[0]} is no mapping in {parent.name!r}: set it whole"
            raise document.error(at, text) from None
    return base


def _null(settings: Any, parents: list[str]) -> str | None:
    """The first of the parents of a path that is null in resolved settings."""
    value = settings
    for i, part in enumerate(parents, 1):
        value = value.spec if isinstance(value, NormSetting) else value
        if not hasattr(value, part):
            return None
        value = getattr(value, part)
        if value is None:
            return ".".join(parents[:i])
    return None


def misfits(settings: Any, shapes: Mapping[str, tuple[int, ...]]):
    """Norms that cannot be bound to their input: the path, and what is wrong.

    Args:
        settings: resolved.
        shapes: input shape of each norm, by path.

    Yields:
        Path and message.
    """
    for path, shape in shapes.items():
        norm = settings
        for part in path.split("."):
            norm = getattr(norm, part, None)
        if isinstance(norm, NormSetting):
            try:
                layout = Layout.bind(norm.spec.parsed, shape, norm.spec.sizes)
                if norm.spec.affine is not None:
                    layout.parameter(norm.spec.affine.axes)
            except ValueError as error:
                yield path, str(error)


def _resolve(
    name: str,
    arm: Arm,
    raw: dict[str, Any],
    parent: PlannedArm,
    document: Document,
    experiment: Experiment,
) -> PlannedArm:
    """Validate an arm's settings and hold it to one property."""
    at = ("arms", name, "set")
    try:
        settings = parse(experiment.settings, raw)
    except InvalidError as error:
        raise _refused(arm, at, error.location, error.message, document) from None
    shapes = experiment.shapes(settings)
    for path, message in misfits(settings, shapes):
        raise _refused(arm, at, tuple(path.split(".")), message, document)
    old = parent.cell.settings
    changes = differences(old, settings, experiment.shapes(old), shapes)
    names = ", ".join(change.name for change in changes)
    if not changes:
        raise document.error(at, f"changes nothing of {parent.name!r}")
    several = arm.confounded or bool(arm.decompose)
    if len(changes) > 1 and not several:
        text = (
            f"changes {len(changes)} properties of {parent.name!r}: {names}; change "
            "one, say decompose: true to have them told apart, or confounded: true"
        )
        raise document.error(at, text)
    return PlannedArm(
        name, parent.name, Cell(name, settings), changes, arm.role, several
    )


def _refused(
    arm: Arm, at: Location, location: Location, message: str, document: Document
) -> ConfigError:
    """An error in an arm's settings, at the key that set them."""
    for key in arm.set:
        parts = tuple(key.split("."))
        if tuple(map(str, location[: len(parts)])) == parts:
            return document.error((*at, key, *location[len(parts) :]), message)
    message = f"{'.'.join(map(str, location))}: {message}"
    return document.error((*at, *list(arm.set)[:1]), message)


def differences(
    first: Any,
    second: Any,
    first_shapes: Mapping[str, tuple[int, ...]],
    second_shapes: Mapping[str, tuple[int, ...]],
) -> tuple[Change, ...]:
    """Every property in which two resolved settings differ.

    Norms are compared field by field, with their axes bound to the shapes; whether
    there is one at all is the one property ``<path>.present``.

    Args:
        first: settings.
        second: settings of the same schema.
        first_shapes: input shape of each norm in ``first``, by path.
        second_shapes: the same for ``second``.

    Returns:
        The changes, by dotted name.
    """
    found = []
    for path, before, after in _leaves("", first, second):
        if isinstance(before, NormSetting) and isinstance(after, NormSetting):
            if before.at != after.at:
                found.append(Change(f"{path}.at", before.at, after.at))
            shape = first_shapes.get(path)
            same = shape is not None and shape == second_shapes.get(path)
            declared = diff(before.spec, after.spec, shape if same else None)
            found += [
                Change(f"{path}.{d.name}", d.first, d.second)
                for d in declared
                if d.declared
            ]
        elif isinstance(before, NormSetting) or isinstance(after, NormSetting):
            found.append(
                Change(f"{path}.present", before is not None, after is not None)
            )
        elif before != after:
            found.append(Change(path, before, after))
    return tuple(found)


def _leaves(path: str, first: Any, second: Any):
    """Pairs of values at equal paths; norms are leaves."""
    fields = getattr(type(first), "model_fields", None)
    norms = isinstance(first, NormSetting) or isinstance(second, NormSetting)
    if norms or fields is None or type(first) is not type(second):
        yield path, first, second
        return
    for name in fields:
        inner = f"{path}.{name}" if path else name
        yield from _leaves(inner, getattr(first, name), getattr(second, name))


def check_statements(
    study: Study, document: Document, arms: Mapping[str, PlannedArm], measured: Any
) -> None:
    """Outcomes and hypotheses speak of arms and metrics that there are, on seeds.

    Args:
        study: the study.
        document: for the places.
        arms: by name.
        measured: ``measured(arm)`` gives the metrics of an arm; True where there is one
            number for each seed, False for a curve, None for no value.

    Raises:
        ConfigError: for the first that does not.
    """
    declared = [
        k for k in ("outcomes", "hypotheses", "factorial", "tune") if getattr(study, k)
    ]
    declared += ["arms" for arm in study.arms.values() if arm.decompose][:1]
    if not declared:
        return
    if study.seeds is None:
        text = "are judged over seeds, and there are none: add seeds: {count: 10}"
        raise document.error(declared[:1], text)
    if study.outcomes is not None:
        names = [(("primary",), study.outcomes.primary)]
        names += [
            (("diagnostics", i), n) for i, n in enumerate(study.outcomes.diagnostics)
        ]
        for at, name in names:
            _check_metric(BASELINE, name, measured, document, ("outcomes", *at))
    elif declared != ["hypotheses"]:
        text = "are judged on an outcome: add outcomes: {primary: a metric}"
        raise document.error([d for d in declared if d != "hypotheses"][:1], text)
    if study.tune is not None:
        at, name = ("tune", "select"), study.tune.select
        _check_metric(BASELINE, name, measured, document, at)
        if study.outcomes is not None and name == study.outcomes.primary:
            text = f"{name!r} is what is judged: choose by another metric (train_loss)"
            raise document.error(at, text)
    seen: set[str] = set()
    for index, hypothesis in enumerate(study.hypotheses):
        at = ("hypotheses", index)
        if hypothesis.id in seen:
            raise document.error((*at, "id"), f"{hypothesis.id!r} stands here twice")
        seen.add(hypothesis.id)
        at = (*at, "statement")
        for arm, outcome in hypothesis.sides[::2]:
            if arm not in arms:
                text = f"there is no arm {arm!r}{suggest(arm, list(arms))}"
                raise document.error(at, text)
            _check_metric(arm, outcome, measured, document, at)
            if measured(arm)[outcome] is None:
                raise document.error(at, f"{outcome!r} has no value in arm {arm!r}")


def _check_metric(
    arm: str, name: str, measured: Any, document: Document, at: Location
) -> None:
    found = measured(arm)
    if name not in found:
        numbers = [n for n, scalar in found.items() if scalar is not False]
        known = [n for n in numbers if "." not in n]
        raise document.error(at, f"there is no metric {name!r}{suggest(name, known)}")
    if found[name] is False:
        raise document.error(at, f"{name!r} is a curve, expected one number per seed")
