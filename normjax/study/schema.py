"""The keys of a study's YAML file, and the settings that experiments build on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
)
from pydantic import model_validator as _validator
from pydantic_core import PydanticCustomError

from normjax.presets import PRESET_KEYS, PRESETS
from normjax.records import check_field, suggest
from normjax.spec import NormSpec
from normjax.study.document import Document, Location

_NAME = r"^[A-Za-z][A-Za-z0-9_-]*$"
_SIDE = r"\s*([A-Za-z][\w-]*)\.([A-Za-z]\w*)\s*"
_STATEMENT = re.compile(f"{_SIDE}(<|>|=){_SIDE}")


class Settings(BaseModel):
    """Base of an experiment's settings: unknown keys are refused, values are not cast.

    Example:
        >>> class Mine(Settings):
        ...     steps: int = 100
        >>> Mine(steps=3).steps
        3
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )


class NormSetting(BaseModel):
    """A normalization layer in a model: a preset or pattern, a place, and fields.

    ``{preset: layer_norm, at: input, divide: rms}``; ``running: {decay: 0.9}`` and
    ``affine: null`` reach into the parts. Presets take their own ``groups``,
    ``ghosts``, ``axes``, ``channels`` and ``scale``.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    preset: str | None = None
    at: str = "input"
    _spec: NormSpec = PrivateAttr()

    @_validator(mode="after")
    def _build(self) -> NormSetting:
        fields = dict(self.model_extra or {})
        if (self.preset is None) == ("pattern" not in fields):
            raise problem("preset", "give a preset or a pattern, and not both")
        if self.preset is None:
            base = _try(
                "pattern",
                lambda: NormSpec.from_dict({"pattern": fields.pop("pattern")}),
            )
        else:
            preset = PRESETS.get(self.preset)
            if preset is None:
                hint = suggest(self.preset, list(PRESETS))
                raise problem("preset", f"there is no preset {self.preset!r}{hint}")
            own = {k: fields.pop(k) for k in PRESET_KEYS if k in fields}
            base = _try(next(iter(own), "preset"), lambda: preset(**own))
        for key, value in fields.items():
            base = _try(
                key, lambda base=base, key=key, value=value: _with(base, key, value)
            )
        self._spec = base
        return self

    @property
    def spec(self) -> NormSpec:
        """The declared layer."""
        return self._spec


def problem(key: str, message: str) -> PydanticCustomError:
    """What a validator raises about one key (dotted) of its model."""
    return PydanticCustomError("norm", "{text}", {"text": message, "key": key})


def _try(key: str, build) -> NormSpec:
    try:
        return build()
    except (ValueError, TypeError) as error:
        raise problem(key, str(error)) from None


def _with(spec: NormSpec, key: str, value: Any) -> NormSpec:
    """One field set; a mapping changes parts of a part that is there."""
    check_field(NormSpec, key)
    if isinstance(value, Mapping):
        if getattr(spec, key) is not None:
            value = {f"{key}.{inner}": v for inner, v in value.items()}
            spec = spec.replace(**value)
            return NormSpec.from_dict(spec.to_dict())
        return NormSpec.from_dict({**spec.to_dict(), key: value})
    value = tuple(value) if isinstance(value, list) else value
    return NormSpec.from_dict(spec.replace(**{key: value}).to_dict())


class Seeds(Settings):
    """How many seeds, and how many of them share one program."""

    count: int = Field(default=10, ge=2)
    block: int = Field(default=16, ge=1)
    first: int = Field(default=0, ge=0)


class Arm(Settings):
    """A difference from another arm: exactly one property, unless ``confounded``."""

    from_: str = Field(default="baseline", alias="from")
    set: dict[str, Any]
    role: Literal["treatment", "negative_control", "positive_control"] = "treatment"
    confounded: bool = False


class Outcomes(Settings):
    """What is judged, and what is reported beside it."""

    primary: str
    better: Literal["higher", "lower"] = "higher"
    equivalent_within: float | None = Field(default=None, gt=0)
    diagnostics: list[str] = []


class Hypothesis(Settings):
    """A comparison that is declared, and hashed, before the first cell runs.

    ``arm.outcome < arm.outcome`` by ``at_least`` (0 if not said), ``>`` likewise, or
    ``=`` ``within`` a margin.
    """

    id: str = Field(pattern=_NAME)
    statement: str
    at_least: float | None = Field(default=None, ge=0)
    within: float | None = Field(default=None, gt=0)
    required: bool = False

    @_validator(mode="after")
    def _margins(self) -> Hypothesis:
        relation = self.sides[1]
        if relation == "=" and (self.within is None or self.at_least is not None):
            raise problem("statement", "'=' needs within: and takes no at_least:")
        if relation != "=" and self.within is not None:
            raise problem("within", f"'{relation}' takes at_least:, not within:")
        return self

    @property
    def sides(self) -> tuple[tuple[str, str], str, tuple[str, str]]:
        """((arm, outcome), relation, (arm, outcome))."""
        match = _STATEMENT.fullmatch(self.statement)
        if match is None:
            raise problem(
                "statement",
                f"got {self.statement!r}, expected arm.outcome (<|>|=) arm.outcome",
            )
        arm, outcome, relation, other, other_outcome = match.groups()
        return (arm, outcome), relation, (other, other_outcome)


class Study(Settings):
    """A whole study; ``settings`` are validated by the experiment's own schema."""

    study: str = Field(pattern=_NAME)
    question: str
    experiment: str
    settings: dict[str, Any] = {}
    seeds: Seeds | None = None
    arms: dict[Annotated[str, StringConstraints(pattern=_NAME)], Arm] = {}
    outcomes: Outcomes | None = None
    hypotheses: list[Hypothesis] = []
    smoke: dict[str, Any] = {}


class InvalidError(Exception):
    """Data that does not fit a model: the path of the first problem, and what it is."""

    def __init__(self, location: Location, message: str):
        """Keep both, for whoever knows where the data came from."""
        super().__init__(message)
        self.location, self.message = location, message


def parse(kind: type[BaseModel], data: Any) -> Any:
    """An instance of a model.

    Args:
        kind: a pydantic model.
        data: plain data.

    Returns:
        An instance of ``kind``.

    Raises:
        InvalidError: for the first problem.
    """
    try:
        return kind.model_validate(data, by_alias=True)
    except ValidationError as error:
        # A key that is missing beside an unknown one is a typing error.
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        location, message = explain(first, kind)
        raise InvalidError(location, message) from None


def validate(
    kind: type[BaseModel], data: Any, document: Document, at: Location = ()
) -> Any:
    """An instance of a model, with errors that say where they stand.

    Args:
        kind: a pydantic model.
        data: plain data from the document.
        document: for the places.
        at: path of ``data`` in the document.

    Returns:
        An instance of ``kind``.

    Raises:
        ConfigError: for the first problem: file, line, column, key, what was got and
            what is expected.
    """
    try:
        return parse(kind, data)
    except InvalidError as error:
        raise document.error((*at, *error.location), error.message) from None


def explain(error: Mapping[str, Any], kind: type[BaseModel]) -> tuple[Location, str]:
    """The path and a message of one pydantic error."""
    location = tuple(part for part in error["loc"] if part != "[key]")
    context = error.get("ctx", {})
    value = error.get("input")
    if "key" in context:
        return (*location, *context["key"].split(".")), context["text"]
    if error["type"] == "extra_forbidden":
        known = _known(kind, location[:-1])
        return location, f"there is no such key{suggest(str(location[-1]), known)}"
    if error["type"] == "missing":
        return location, "is missing"
    expected = _EXPECTED.get(error["type"])
    if expected is None:
        return location, f"{error['msg']}, got {_shown(value)}"
    if context.get("pattern") == _NAME:
        expected = "a letter, then letters, digits, '_' and '-'"
    text = f"expected {expected.format(**context)}, got {_shown(value)}"
    if error["type"] == "int_type" and isinstance(value, float) and value.is_integer():
        text += f"; write {value:.0f}"
    if error["type"] == "string_type" and isinstance(value, bool | int | float):
        text += "; put it in quotes"
    if error["type"] == "model_type" and isinstance(value, str) and value in PRESETS:
        text += f"; write {{preset: {value}}}"
    return location, text


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "literal_error": "{expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "too_short": "{min_length} or more items",
    "string_pattern_mismatch": "text that matches {pattern}",
}


def _known(kind: type[BaseModel], location: Location) -> list[str]:
    """Keys of the model at a path, as far as the annotations tell."""
    parts = iter(location)
    for part in parts:
        inner = kind.model_fields.get(str(part))
        models = [] if inner is None else _models(inner.annotation)
        if inner is None or not models:
            return []
        kind = models[0]
        if getattr(inner.annotation, "__origin__", None) in (dict, list):
            next(parts, None)  # the name or number of an item
    return [field.alias or name for name, field in kind.model_fields.items()]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    arguments = getattr(annotation, "__args__", ())
    return [model for argument in arguments for model in _models(argument)]


def _shown(value: Any) -> str:
    words = {"True": "true", "False": "false", "None": "null"}  # as YAML has them
    text = words.get(repr(value), repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def canonical(value: Any) -> Any:
    """Plain, ordered data of settings and specs, for hashes and for JSON."""
    if isinstance(value, NormSetting):
        return {"at": value.at, **value.spec.to_dict()}
    if isinstance(value, BaseModel):
        return {
            name: canonical(getattr(value, name)) for name in type(value).model_fields
        }
    if isinstance(value, Mapping):
        return {str(key): canonical(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    return float(value) if isinstance(value, np.floating) else value
