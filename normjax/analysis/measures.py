"""What is measured, and from where on it is worth a look: declared, with the reason."""

from __future__ import annotations

from typing import NamedTuple

from normjax.spec import NormSpec

DTYPES = ("float32", "bfloat16", "float16")
# An error of a tenth of x̂'s own size changes which entry is the largest of a group.
RISK = 0.1
# ρ = ε/(v + ε) reaches one half where ε is as large as the variance.
STABILIZED = 0.5
# A companion moves the output as far as the example's own input does.
PULL = 1.0
# Ten fair shares of a batch's coupling, and never less than three quarters of it.
LEVERAGE, MOST_OF_IT = 10.0, 0.75
# 8° apart: 2 % of the squared length differs. Of 16 unrelated numbers one pair in 10¹²
# is that near; of fewer, chance alone makes such pairs, and none is flagged.
LIKENESS, FEWEST_VALUES = 0.99, 16


class Measure(NamedTuple):
    """One number of every group, or of every example."""

    name: str
    label: str
    meaning: str


class Flag(NamedTuple):
    """From where on a number is worth a look.

    Attributes:
        name: of the flag.
        measure: the number that is listed with each row.
        meaning: what it says, with the threshold.
        reason: why the threshold is where it is.
        highest: whether the largest numbers are the worst ones.
    """

    name: str
    measure: str
    meaning: str
    reason: str
    highest: bool = True


def group_measures() -> tuple[Measure, ...]:
    """The numbers of every group, in the order of the page."""
    errors = [
        Measure(
            f"rounding_{dtype}",
            f"error of x̂ when x is stored in {dtype}",
            "bound on the error relative to x̂, whatever computes afterwards",
        )
        for dtype in DTYPES
    ]
    lost = [
        Measure(
            f"cancellation_{dtype}",
            f"error of E[x²] − E[x]² in {dtype}",
            "relative error of a one-pass variance; from 1 on no digit is left",
        )
        for dtype in DTYPES
    ]
    return (
        Measure(
            "share",
            "stabilizer share ρ",
            "ε/(v + ε): 0: the scale of x is lost, 1: it passes",
        ),
        Measure("radial", "radial gain ρ/s", "how far a change of size moves x̂"),
        Measure("tangential", "tangential gain 1/s", "how far all else moves x̂"),
        Measure(
            "condition", "condition of ∂x̂/∂x", "largest over smallest nonzero gain"
        ),
        Measure("distance", "distance to zero variance", "‖x − m‖, or ‖x‖ without m"),
        Measure("kappa", "κ = |mean|/std", "how far an offset hides the group"),
        *errors,
        *lost,
    )


EXAMPLE_MEASURES = (
    Measure(
        "pull",
        "pull of the strongest companion",
        "how far it moves an example's output, over the example's own input",
    ),
    Measure(
        "leverage",
        "leverage on the companions",
        "share of the batch's coupling that goes out from one example; 1 is fair",
    ),
    Measure(
        "gap",
        "gap to the nearest companion",
        "distance of the standardized examples at unit length; 0: the same, √2: "
        "unrelated",
    ),
)


def group_flags(spec: NormSpec) -> tuple[Flag, ...]:
    """The flags of groups; a layer that divides by nothing has no stabilizer."""
    flags = [
        Flag(
            "not_finite",
            "bad",
            "entries that are NaN or infinite; left out of every distribution",
            "one such entry makes the whole group NaN",
        ),
        Flag(
            "no_variance",
            "largest",
            "distance to zero variance = 0; listed with the largest |x|",
            "nothing but ε is left to divide by, and noise is amplified",
        ),
    ]
    if spec.divide != "none":
        flags.append(
            Flag(
                "stabilized",
                "share",
                f"stabilizer share ρ ≥ {STABILIZED}",
                "ε is at least as large as the variance, and decides the size of x̂",
            )
        )
    for dtype in DTYPES:
        flags.append(
            Flag(
                f"rounding_{dtype}",
                f"rounding_{dtype}",
                f"error bound of x̂ ≥ {RISK} when x is stored in {dtype}",
                "an error of a tenth of x̂ changes which entry of a group is largest",
            )
        )
    for dtype in DTYPES:
        flags.append(
            Flag(
                f"cancellation_{dtype}",
                f"cancellation_{dtype}",
                f"relative error of E[x²] − E[x]² in {dtype} ≥ {RISK}",
                "the gain 1/s is then wrong by 5 % and more",
            )
        )
    return tuple(flags)


EXAMPLE_FLAGS = (
    Flag(
        "not_finite_example",
        "bad",
        "entries that are NaN or infinite",
        "one such entry makes its group NaN for all companions",
    ),
    Flag(
        "repeated",
        "gap",
        "equal to an earlier companion, bit for bit",
        "an example that counts twice pulls the statistics towards itself",
    ),
    Flag(
        "alike",
        "gap",
        f"cosine with the nearest companion ≥ {LIKENESS}, and not equal to it",
        "8° apart; unrelated examples of 16 values or more never come that near",
        highest=False,
    ),
    Flag(
        "pulled",
        "pull",
        f"pull of one companion ≥ {PULL:g}",
        "the companion moves the output as far as the example's own input does",
    ),
    Flag(
        "dominant",
        "leverage",
        f"leverage > {LEVERAGE:g} fair shares (or {MOST_OF_IT:.0%} of the coupling)",
        "what the batch does to an example is then mostly one other example",
    ),
)
