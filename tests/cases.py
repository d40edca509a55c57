"""The shared inventory of program structures: every preset, and every field varied."""

from __future__ import annotations

from itertools import product
from typing import Any

from frames import FRAMES, RENORM, Case

import normjax as nj

PLACEMENTS = ("outside_sqrt", "floor_var", "floor_std")
PLACED = {(True, "std"), (False, "std"), (False, "rms")}


def _case(name: str, frame: str, mask=None, given=None, affine: Any = False, **fields):
    """``affine`` is whether parameters are passed, or the affine part to use."""
    kind, shape = mask or (None, ())
    if isinstance(affine, nj.Affine):
        fields["affine"] = affine
    return Case(name, FRAMES[frame], fields, kind, shape, given, bool(affine))


def _presets() -> list[Case]:
    """Every frame with its preset's own fields, and its affine part if it has one."""
    return [
        _case(name, name, affine=bool(frame.affine_view))
        for name, frame in FRAMES.items()
    ]


def _algebra() -> list[Case]:
    """center × divide × epsilon_placement on one small group, and ddof."""
    found = []
    for center, divide in product((True, False), ("std", "rms", "l2", "none")):
        fields = {"center": center, "divide": divide}
        word = "center" if center else "plain"
        found.append(_case(f"{word}_{divide}", "layer", **fields))
        for place in PLACEMENTS if (center, divide) in PLACED else ():
            name = f"{word}_{divide}_{place}"
            fields |= {"epsilon_placement": place, "epsilon": 0.1}
            found.append(_case(name, "layer", **fields))
    return [
        *found,
        _case(
            "center_rms_outside",
            "layer",
            divide="rms",
            epsilon_placement="outside_sqrt",
        ),
        _case("plain_l2_floor", "l2", epsilon_placement="floor_std", epsilon=0.1),
        _case("ddof_1", "batch_space", ddof=1),
        _case("ddof_2_rms", "rms", ddof=2),
        _case("ddof_1_outside", "group", ddof=1, epsilon_placement="outside_sqrt"),
        _case("epsilon_0", "layer", epsilon=0.0),
        _case("epsilon_large", "instance", epsilon=10.0),
    ]


def _detached() -> list[Case]:
    return [
        _case("detach_mean", "layer", detach=("mean",)),
        _case("detach_variance", "batch", detach=("variance",), affine=True),
        _case("detach_both", "group", detach=("mean", "variance")),
        _case("detach_variance_rms", "rms", detach=("variance",), affine=True),
        _case(
            "detach_mean_outside",
            "layer",
            detach="mean",
            epsilon_placement="outside_sqrt",
        ),
        _case("detach_mean_center_rms", "layer", detach="mean", divide="rms"),
    ]


def _elsewhere() -> list[Case]:
    """Given and blended statistics."""
    half = {"statistics": "blend", "mean_weight": 0.3, "variance_weight": 0.6}
    return [
        _case("given_batch", "batch_space", given="statistics", affine=True),
        _case("given_rms", "rms", given="statistics", affine=True),
        _case("given_center_only", "layer", given="statistics", divide="none"),
        _case(
            "given_floor",
            "batch",
            given="statistics",
            epsilon_placement="floor_var",
            epsilon=1.0,
        ),
        _case(
            "given_outside",
            "group",
            given="statistics",
            epsilon_placement="outside_sqrt",
        ),
        _case("given_moments", "batch", given="moments", ddof=1, affine=True),
        _case("given_moments_rms", "rms", given="moments", ddof=1),
        _case("given_moments_l2", "l2", given="moments"),
        _case("given_stored_instance", "instance", given="stored", affine=True),
        _case("given_stored_ghost", "ghost", given="stored"),
        _case("blend_batch", "batch_space", affine=True, **half),
        _case("blend_layer_outside", "layer", epsilon_placement="outside_sqrt", **half),
        _case(
            "blend_floor", "layer", epsilon_placement="floor_std", epsilon=1.0, **half
        ),
        _case("blend_rms", "rms", **half),
        _case("blend_center_rms", "layer", divide="rms", **half),
        _case("blend_plain_std", "layer", center=False, **half),
        _case("blend_center_only", "layer", divide="none", **half),
        _case("blend_detach", "batch", detach="mean", **half),
        _case("blend_mean", "group", statistics="blend", mean_weight=0.5),
        _case("blend_moments", "batch", given="moments", **half),
    ]


def _masked() -> list[Case]:
    """Kinds of masks, ranks of masks, and what becomes of masked entries."""
    zero, through = {"masked_output": "zero"}, {"masked_output": "passthrough"}
    return [
        _case("mask_keep", "layer", ("bool", (2, 6)), affine=True),
        _case("mask_zero", "layer", ("bool", (2, 6)), affine=True, **zero),
        _case("mask_passthrough", "layer", ("bool", (2, 6)), affine=True, **through),
        _case("mask_int_zero", "batch", ("int", (6, 2)), **zero),
        _case("mask_positions", "batch_space", ("bool", (3, 2, 2)), **through),
        _case(
            "mask_full_rank", "instance", ("bool", (2, 2, 3, 1)), affine=True, **zero
        ),
        _case("mask_leading", "layer_space", ("float", (2, 2, 2)), **zero),
        _case("mask_ghost", "ghost", ("bool", (10,)), **zero),
        _case("mask_ghost_space", "ghost_space", ("float", (4, 3, 2)), **through),
        _case("mask_group", "group", ("bool", (2, 3)), affine=True),
        _case("mask_rms", "rms", ("bool", (2, 6)), **zero),
        _case("mask_ddof", "batch", ("bool", (6, 1)), ddof=1, **zero),
        _case("mask_given", "batch", ("bool", (6, 1)), given="statistics", **zero),
        _case(
            "mask_blend",
            "batch",
            ("bool", (6, 1)),
            statistics="blend",
            mean_weight=0.3,
            variance_weight=0.6,
            **zero,
        ),
        _case("mask_detach", "layer", ("bool", (2, 6)), detach="variance", **through),
        _case("mask_center_only", "layer", ("bool", (2, 6)), divide="none"),
        _case("weights_keep", "layer", ("weights", (2, 6)), affine=True),
        _case("weights_ddof", "batch_space", ("weights", (3, 2, 2)), ddof=1, **through),
        _case("weights_rms", "rms", ("weights", (2, 6))),
        _case("weights_center_rms", "layer", ("weights", (2, 6)), divide="rms"),
        _case(
            "weights_blend",
            "ghost",
            ("weights", (10, 2)),
            statistics="blend",
            mean_weight=0.5,
        ),
    ]


def _renorm() -> list[Case]:
    """Batch renormalization, clipped and not, and what it may be combined with."""
    kind = {"statistics": "renorm"}
    zero = {"masked_output": "zero"}
    return [
        Case("renorm_preset", RENORM, affine=True),
        _case("renorm_batch", "batch_space", affine=True, **kind),
        _case("renorm_clipped", "batch", r_max=1.1, d_max=0.1, **kind),
        _case("renorm_free", "ghost", r_max=1e9, d_max=1e9, **kind),
        _case("renorm_outside", "layer", epsilon_placement="outside_sqrt", **kind),
        _case("renorm_floor", "group", epsilon_placement="floor_var", **kind),
        _case("renorm_rms", "rms", affine=True, **kind),
        _case("renorm_center_only", "layer", divide="none", **kind),
        _case("renorm_detach", "batch", detach="variance", **kind),
        _case("renorm_mask", "batch", ("bool", (6, 1)), **zero, **kind),
        _case("renorm_moments", "batch", given="moments", affine=True, **kind),
    ]


def _precise() -> list[Case]:
    """Folded application, and groups that are rescaled first."""
    folded = {"precision": nj.Precision(apply="folded")}
    rescale = {"precision": nj.Precision(rescale=True)}
    half = {"statistics": "blend", "mean_weight": 0.3, "variance_weight": 0.6}
    zero = {"masked_output": "zero"}
    return [
        _case("folded_batch", "batch_space", affine=True, **folded),
        _case("folded_rms", "rms", affine=True, **folded),
        _case("folded_given", "batch", given="statistics", affine=True, **folded),
        _case("folded_blend", "layer", **half, **folded),
        _case("folded_renorm", "batch", affine=True, statistics="renorm", **folded),
        _case("folded_mask", "layer", ("bool", (2, 6)), affine=True, **zero, **folded),
        _case("rescale_layer", "layer", affine=True, **rescale),
        _case("rescale_rms", "rms", epsilon_placement="outside_sqrt", **rescale),
        _case("rescale_l2", "l2", epsilon_placement="floor_var", **rescale),
        _case("rescale_floor", "group", epsilon_placement="floor_std", **rescale),
        _case("rescale_blend", "batch", **half, **rescale),
        _case("rescale_renorm", "batch", statistics="renorm", **rescale),
        _case("rescale_given", "batch", given="statistics", **rescale),
        _case("rescale_mask", "layer", ("weights", (2, 6)), **rescale),
    ]


def _other() -> list[Case]:
    """Algorithm and affine variants."""
    two_pass = {"precision": nj.Precision(algorithm="two_pass")}
    return [
        _case("two_pass", "layer", **two_pass),
        _case(
            "two_pass_mask", "batch", ("bool", (6, 2)), masked_output="zero", **two_pass
        ),
        _case("affine_scale", "layer", affine=nj.Affine("c", bias=False)),
        _case("affine_bias", "batch", affine=nj.Affine("c", scale=False)),
        _case("affine_plus_one", "group", affine=nj.Affine("(g c)", stored="1+w")),
        _case("affine_before", "layer", affine=nj.Affine("c", cast="before")),
    ]


CASES = {
    case.name: case
    for group in (
        _presets(),
        _algebra(),
        _detached(),
        _elsewhere(),
        _masked(),
        _renorm(),
        _precise(),
        _other(),
    )
    for case in group
}
