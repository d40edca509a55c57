"""The keys of a study's YAML file, and the settings that experiments build on."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic import model_validator as _validator
from pydantic_core import PydanticCustomError

NAME = r"^[A-Za-z][A-Za-z0-9_-]*$"
# Generated arms are named by what they are: swap+center, model.norm.epsilon=1e-3.
_SIDE = r"\s*([A-Za-z][\w.+=,@-]*)\.([A-Za-z]\w*)\s*"
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


class Leaf:
    """Marks a field whose value is a number in the program, and no part of its form.

    Arms that differ in such fields alone share one compiled program: inside ``measure``
    the value is traced, so nothing may branch on it in Python.
    """


def problem(key: str, message: str) -> PydanticCustomError:
    """What a validator raises about one key (dotted) of its model."""
    return PydanticCustomError("norm", "{text}", {"text": message, "key": key})


class Seeds(Settings):
    """How many seeds, and how many of them share one program."""

    count: int = Field(default=10, ge=2, description="How many.")
    block: int = Field(
        default=16, ge=1, description="How many run, and are stored, together."
    )
    first: int = Field(default=0, ge=0, description="The first one.")


class Arm(Settings):
    """A difference from another arm: exactly one property, unless it says otherwise.

    ``decompose: true`` is for an arm that changes several properties on purpose, such
    as a swap of presets: every combination of them is run as well (at most 5, 2^5
    arms, ``swap+center+divide``), and the difference is shared out exactly.
    """

    from_: str = Field(
        default="baseline", alias="from", description="The arm that it differs from."
    )
    set: dict[str, Any] = Field(
        description="Settings that it changes: dotted key of the settings, and value."
    )
    role: Literal["treatment", "negative_control", "positive_control"] = Field(
        default="treatment",
        description="A negative control should change nothing, a positive one must.",
    )
    confounded: bool = Field(
        default=False,
        description="It changes several properties on purpose; the report names all.",
    )
    decompose: bool | list[str | list[str]] = Field(
        default=False,
        description="Run every combination of the properties that it changes, and "
        "share the difference out. A list names them and groups those that only make "
        "sense together: [[pattern, running], epsilon].",
    )


class Tune(Settings):
    """Every declared arm at each value of one setting, paired over the same seeds.

    The result is reported at the value that is best for the baseline, and at each
    arm's own best. Best is the least mean of ``select`` (the largest with ``better:
    higher``), which must not be the outcome that is judged.
    """

    key: str = Field(description="The setting, dotted: optimizer.learning_rate.")
    values: list[Any] = Field(min_length=2, description="Its values.")
    select: str = Field(description="The metric that chooses: train_loss or val_loss.")
    better: Literal["higher", "lower"] = Field(
        default="lower", description="Which direction of the metric is good."
    )


class Outcomes(Settings):
    """What is judged, and what is reported beside it."""

    primary: str = Field(description="The metric that is judged.")
    better: Literal["higher", "lower"] = Field(
        default="higher", description="Which direction of the metric is good."
    )
    equivalent_within: float | None = Field(
        default=None,
        gt=0,
        description="Two arms whose difference lies within it count as equivalent.",
    )
    diverged: float | None = Field(
        default=None,
        description="What a seed that diverged scores on the primary metric. Without "
        "it, a sign test of the lost seeds decides first, then the complete pairs.",
    )
    diagnostics: list[str] = Field(
        default=[], description="Metrics reported beside it, without a verdict."
    )


class Hypothesis(Settings):
    """A comparison that is declared, and hashed, before the first cell runs.

    ``arm.outcome < arm.outcome`` by ``at_least`` (0 if not said), ``>`` likewise, or
    ``=`` ``within`` a margin.
    """

    id: str = Field(pattern=NAME, description="A name of your own: H1.")
    statement: str = Field(
        description="arm.outcome (<|>|=) arm.outcome; generated arms by their names."
    )
    at_least: float | None = Field(
        default=None, ge=0, description="By how much, for < and >; 0 if not said."
    )
    within: float | None = Field(
        default=None, gt=0, description="Margin of equivalence, for =."
    )
    required: bool = Field(
        default=False, description="The run ends with status 1 if it is not supported."
    )

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


_Name = Annotated[str, StringConstraints(pattern=NAME)]


class Study(Settings):
    """A whole study; ``settings`` are validated by the experiment's own schema."""

    study: str = Field(pattern=NAME, description="Its name; runs/<name> is written.")
    question: str = Field(description="What it asks, in one sentence.")
    experiment: str = Field(
        description="training, or the path of a script beside the config."
    )
    settings: dict[str, Any] = Field(
        default={}, description="The baseline; validated by the experiment's schema."
    )
    seeds: Seeds | None = Field(
        default=None, description="Left out where nothing is random."
    )
    arms: dict[_Name, Arm] = Field(
        default={}, description="By name, each one property away from another arm."
    )
    factorial: dict[_Name, dict[str, Any]] = Field(
        default={},
        description="Factors that are on or off, each by a name and one setting that "
        "it changes: {wide: {model.widths: [64]}, long: {steps: 800}}. Every "
        "combination is run (at most 5 factors), and every main effect and "
        "interaction tested.",
    )
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        default={},
        description="Values of settings, by dotted key; every combination is run. One "
        "key gives a dose-response table.",
    )
    tune: Tune | None = Field(
        default=None, description="Every declared arm at each value of one setting."
    )
    outcomes: Outcomes | None = Field(default=None, description="What is judged.")
    hypotheses: list[Hypothesis] = Field(
        default=[], description="Declared, and hashed, before the first cell runs."
    )
    smoke: dict[str, Any] = Field(
        default={},
        description="Overrides for run --smoke: dotted key of this file, and value.",
    )
