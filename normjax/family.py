"""The family: every normalization by name, its card, and the README's table.

A card says what a layer removes, couples and stores, its parameters, and where it
degenerates. ``verify`` and the tests measure what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from normjax import functional, presets
from normjax.mixture import Mixture, switchable_norm, used_logits
from normjax.spec import NormSpec
from normjax.traits import Properties, properties

Layer = NormSpec | Mixture | Callable[..., Any]


@dataclass(frozen=True)
class Member:
    """One normalization.

    Attributes:
        call: how it is made.
        layer: what that gives.
        what: what it is, in a line.
        source: the paper.
        note: what else its card says.
    """

    call: str
    layer: Layer
    what: str
    source: str
    note: str = ""


_BLEND = {"statistics": "blend", "mean_weight": 0.5, "variance_weight": 0.5}
FAMILY: dict[str, Member] = {
    "batch_norm": Member(
        "nj.batch_norm()",
        presets.batch_norm(),
        "each channel over examples and positions",
        "Ioffe, Szegedy 2015, arXiv:1502.03167",
    ),
    "batch_renorm": Member(
        "nj.batch_renorm()",
        presets.batch_renorm(),
        "batch norm corrected to stored statistics, the correction without gradient",
        "Ioffe 2017, arXiv:1702.03275",
        "start with r_max=1, d_max=0, which is batch norm, and raise both; unclipped, "
        "training computes what inference with the reference does, and examples are "
        "coupled by the gradient alone",
    ),
    "blended_batch_norm": Member(
        'nj.batch_norm(statistics="blend", mean_weight=0.5, variance_weight=0.5)',
        presets.batch_norm(**_BLEND),
        "batch norm whose statistics are mixed with given ones",
        "Schneider et al. 2020, arXiv:2006.16971",
        "mean_weight and variance_weight are the batch's shares: 1 is batch norm, 0 "
        "the reference",
    ),
    "ghost_batch_norm": Member(
        "nj.ghost_batch_norm(ghosts=4)",
        presets.ghost_batch_norm(),
        "batch norm of consecutive parts of the batch",
        "Hoffer, Hubara, Soudry 2017, arXiv:1705.08741",
    ),
    "layer_norm": Member(
        'nj.layer_norm(), nj.layer_norm("h w c")',
        presets.layer_norm(),
        "each position over its channels, or over several axes",
        "Ba, Kiros, Hinton 2016, arXiv:1607.06450",
    ),
    "adaptive_layer_norm": Member(
        "nj.adaptive_layer_norm()",
        presets.adaptive_layer_norm(),
        "layer norm modulated by a condition: (1 + scale) x̂ + bias",
        "Peebles, Xie 2023, arXiv:2212.09748",
        "a second layer norm behind it cancels a scale and bias that are the same for "
        "all channels",
    ),
    "center_only": Member(
        "nj.center_only()",
        presets.center_only(),
        "layer norm without the division",
        "a half of layer norm, for comparison",
    ),
    "scale_only": Member(
        "nj.scale_only()",
        presets.scale_only(),
        "layer norm without the subtraction",
        "a half of layer norm, for comparison",
    ),
    "rms_norm": Member(
        "nj.rms_norm()",
        presets.rms_norm(),
        "each position by the root mean square of its channels",
        "Zhang, Sennrich 2019, arXiv:1910.07467",
    ),
    "l2_norm": Member(
        "nj.l2_norm()",
        presets.l2_norm(),
        "each position by the Euclidean norm of its channels",
        "Wang et al. 2017, arXiv:1704.06369",
    ),
    "instance_norm": Member(
        "nj.instance_norm()",
        presets.instance_norm(),
        "each channel of each example over its positions",
        "Ulyanov, Vedaldi, Lempitsky 2016, arXiv:1607.08022",
    ),
    "adaptive_instance_norm": Member(
        "nj.adaptive_instance_norm()",
        presets.adaptive_instance_norm(),
        "instance norm with the std and mean of a style",
        "Huang, Belongie 2017, arXiv:1703.06868",
    ),
    "group_norm": Member(
        "nj.group_norm(groups=32)",
        presets.group_norm(),
        "groups of consecutive channels with all positions",
        "Wu, He 2018, arXiv:1803.08494",
        "one group is layer norm over all axes but the first, as many groups as "
        "channels is instance norm (before scale and bias); texts that state it the "
        "other way round are wrong",
    ),
    "weight_standardization": Member(
        "nj.weight_standardization()",
        presets.weight_standardization(),
        "a kernel, each output channel over all that enters it",
        "Qiao et al. 2019, arXiv:1903.10520",
        'of a 1×1 depthwise kernel nothing is left; axes="o i h w" and the like name '
        "other kernel layouts",
    ),
    "qk_norm": Member(
        'nj.qk_norm(), nj.qk_norm("h d"), nj.qk_norm(scale="h")',
        presets.qk_norm(),
        "queries and keys of each head, or of all heads together",
        "Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442",
        "over one head and without scale |q · k|/√d is at most √d",
    ),
    "switchable_norm": Member(
        "nj.mixture.switchable_norm()",
        switchable_norm(),
        "instance, layer and batch norm, mixed by learned shares",
        "Luo et al. 2018, arXiv:1806.10779",
        "p and q are softmaxes of their own logits; logits with leading axes of x "
        "route each example by itself",
    ),
    "dynamic_tanh": Member(
        "nj.dynamic_tanh(x, params)",
        functional.dynamic_tanh,
        "no statistics: a bounded function of each entry, to compare with",
        "Zhu et al. 2025, arXiv:2503.10622",
    ),
}

_DYNAMIC_TANH = Properties(
    formula="tanh(alpha · x)",
    statistics="none",
    removes=(),
    reduced=(),
    couples_examples=False,
    stores=(),
    parameters=("alpha (one number)", "scale over c", "bias over c"),
    train_differs=False,
    symmetric_jacobian=True,
    degenerate=(
        "|alpha · x| above 10: ±1 comes out, no gradient",
        "|alpha · x| far below 1: the layer is linear and bounds nothing",
    ),
)


def claims(layer: Layer) -> Properties:
    """What a member of the family does; of a spec its ``properties``.

    Args:
        layer: a NormSpec, a Mixture, or the function ``nj.dynamic_tanh``.

    Raises:
        ValueError: on anything else.

    Example:
        >>> import normjax as nj
        >>> claims(nj.mixture.switchable_norm()).formula
        '(x - Σ pₖ mₖ) / √(Σ qₖ σ²ₖ + ε)'
        >>> claims(nj.dynamic_tanh).removes
        ()
    """
    if isinstance(layer, NormSpec):
        return properties(layer)
    if isinstance(layer, Mixture):
        return _mixed(layer)
    if layer is functional.dynamic_tanh:
        return _DYNAMIC_TANH
    raise ValueError(
        f"layer is {layer!r}, expected a NormSpec, a Mixture or nj.dynamic_tanh"
    )


def card(layer: Layer, member: Member | None = None) -> list[tuple[str, str]]:
    """The rows of a layer's card.

    Args:
        layer: as for ``claims``.
        member: of the family, whose words are added.

    Returns:
        Pairs of a word and what it says; a word may come several times.

    Example:
        >>> import normjax as nj
        >>> dict(card(nj.layer_norm()))["removes"]
        'offset, scale'
        >>> dict(card(nj.group_norm(), FAMILY["group_norm"]))["note"][:23]
        'one group is layer norm'
    """
    found = claims(layer)
    rows = [] if member is None else [("is", member.what), ("source", member.source)]
    rows += [
        ("formula", found.formula),
        ("statistics", found.statistics),
        ("removes", _list(found.removes, "nothing")),
        ("couples examples", "yes" if found.couples_examples else "no"),
        ("parameters", _list(found.parameters, "none")),
        ("stores", _list(found.stores, "nothing")),
    ]
    if found.train_differs:
        rows += [
            ("train", "statistics of the input; nj.running.update stores them"),
            (
                "stored",
                "inference: moments=nj.running.read(...), no example is coupled",
            ),
            ("frozen", "training with the stored ones, which no update changes"),
        ]
    else:
        rows += [("training", "the same function as inference")]
    rows += [("Jacobian", "symmetric" if found.symmetric_jacobian else "not symmetric")]
    rows += [("degenerates", text) for text in found.degenerate]
    return rows + ([("note", member.note)] if member and member.note else [])


def markdown() -> str:
    """The family as the table that the README shows.

    Example:
        >>> markdown().splitlines()[0]
        '| name | is | removes | couples examples | stores | parameters | source |'
    """
    head = "name", "is", "removes", "couples examples", "stores", "parameters", "source"
    rows = [head, ("---",) * len(head)]
    for name, member in FAMILY.items():
        found = claims(member.layer)
        rows.append(
            (
                f"`{name}`",
                member.what,
                _list(found.removes, "nothing"),
                "yes" if found.couples_examples else "no",
                _list(found.stores, "nothing"),
                _list(found.parameters, "none"),
                member.source,
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _list(items: tuple[str, ...], empty: str) -> str:
    return ", ".join(items) or empty


def _mixed(mixture: Mixture) -> Properties:
    """What follows from the members; they agree in what is subtracted and divided."""
    specs, parts = mixture.specs, [properties(spec) for spec in mixture.specs]
    formula = parts[0].formula.replace("- m", "- Σ pₖ mₖ")
    for second in ("σ²", "mean(x²)", "Σx²"):
        formula = formula.replace(second, f"Σ qₖ {second}ₖ")
    parameters = [f"{name} over the members" for name in used_logits(mixture)]
    for name in ("scale", "bias"):
        if getattr(mixture.affine, name, False):
            parameters.append(f"{name} over {mixture.affine.axes}")
    degenerate = []
    for spec, part in zip(specs, parts, strict=True):
        if spec.center and spec.divide == "std":
            degenerate.append(
                f"one element in the groups of '{spec.pattern}': its mean is x and its "
                "variance 0, so it only scales what the others give"
            )
        kept = [t for t in part.degenerate if t.startswith(("one example", "infer"))]
        degenerate += [f"'{spec.pattern}', {text}" for text in kept]
    ways = [f"{part.statistics} (member {k})" for k, part in enumerate(parts)]
    return Properties(
        formula=formula,
        statistics="; ".join(ways),
        removes=parts[0].removes,
        reduced=tuple(dict.fromkeys(name for part in parts for name in part.reduced)),
        couples_examples=any(part.couples_examples for part in parts),
        stores=tuple(dict.fromkeys(name for part in parts for name in part.stores)),
        parameters=tuple(parameters),
        train_differs=any(part.train_differs for part in parts),
        symmetric_jacobian=specs[0].divide == "none",
        degenerate=tuple(degenerate),
    )
