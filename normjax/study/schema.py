"""The keys of a study's YAML file, and the settings that experiments build on."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic import model_validator as _validator
from pydantic_core import PydanticCustomError

NAME = r"^[A-Za-z][A-Za-z0-9_-]*$"
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


def problem(key: str, message: str) -> PydanticCustomError:
    """What a validator raises about one key (dotted) of its model."""
    return PydanticCustomError("norm", "{text}", {"text": message, "key": key})


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

    id: str = Field(pattern=NAME)
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

    study: str = Field(pattern=NAME)
    question: str
    experiment: str
    settings: dict[str, Any] = {}
    seeds: Seeds | None = None
    arms: dict[Annotated[str, StringConstraints(pattern=NAME)], Arm] = {}
    outcomes: Outcomes | None = None
    hypotheses: list[Hypothesis] = []
    smoke: dict[str, Any] = {}
