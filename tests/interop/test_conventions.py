"""Conventions as data: every layer by name, its words, its errors, and the commands."""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
import pytest
from commands import Call, Done, table
from commands import normjax as normjax

import normjax as nj
from normjax.interop.patterns import grouped, trailing, written

pytestmark = pytest.mark.jax_defaults

BOTH = {"create_scale": True, "create_offset": True}
# What the library has no default for.
NEEDED: dict[str, dict[str, Any]] = {
    "torch.nn.GroupNorm": {"num_groups": 2},
    "equinox.nn.GroupNorm": {"groups": 2},
    "haiku.BatchNorm": {**BOTH, "decay_rate": 0.9},
    "haiku.LayerNorm": {**BOTH, "axis": -1},
    "haiku.RMSNorm": {"axis": -1},
    "haiku.GroupNorm": {"groups": 2},
    "haiku.InstanceNorm": BOTH,
}
LIBRARIES = {
    "torch.nn": (
        *(f"BatchNorm{n}d" for n in (1, 2, 3)),
        *(f"InstanceNorm{n}d" for n in (1, 2, 3)),
        "SyncBatchNorm", "LayerNorm", "GroupNorm", "RMSNorm",
    ),
    "flax.linen": ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"),
    "flax.nnx": ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"),
    "equinox.nn": ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm"),
    "haiku": ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"),
    "keras.layers": (
        "BatchNormalization", "LayerNormalization", "GroupNormalization",
        "RMSNormalization",
    ),
}  # fmt: skip
EPSILON = {
    "torch.nn.RMSNorm": 2.0**-23,
    "flax.linen.BatchNorm": 1e-5,
    "flax.nnx.BatchNorm": 1e-5,
    "keras.layers.RMSNormalization": 1e-6,
}


def test_every_layer_has_a_convention_and_the_other_way_round():
    names = [f"{module}.{name}" for module, all_ in LIBRARIES.items() for name in all_]
    assert sorted(nj.interop.CONVENTIONS) == sorted(names)
    assert len(names) == 33


@pytest.mark.parametrize("name", nj.interop.CONVENTIONS)
def test_defaults_notes_and_plain_data(name: str):
    spec = nj.interop.convention(name, **NEEDED.get(name, {}))
    library = name.split(".")[0]
    usual = {"flax": 1e-6, "keras": 1e-3}.get(library, 1e-5)
    assert spec.epsilon == EPSILON.get(name, usual)
    assert nj.NormSpec.from_dict(spec.to_dict()) == spec
    known = nj.interop.CONVENTIONS[name]
    assert known.source.startswith(("dm-" if library == "haiku" else "") + library)
    assert known.notes == nj.interop.notes(name)
    assert all(note and note[-1] not in ".;" for note in known.notes)
    if name in NEEDED:
        missing = ", ".join(NEEDED[name])
        with pytest.raises(ValueError, match=r"has no default for") as caught:
            nj.interop.convention(name)
        assert set(missing.split(", ")) == set(
            str(caught.value).split("for ")[1].split(":")[0].split(", ")
        )


def constructor(name: str) -> Any:
    module, _, layer = name.rpartition(".")
    reason = f"{module} is not installed"
    found = getattr(pytest.importorskip(module, reason=reason), layer)
    return found.__init__ if module == "flax.nnx" else found


@pytest.mark.parametrize(
    "name", [name for name in nj.interop.CONVENTIONS if not name.startswith("keras")]
)
def test_arguments_have_the_names_and_defaults_of_the_constructor(name: str):
    """Equinox's default mode is 'ema' by another name; axis_name has none there."""
    theirs = inspect.signature(constructor(name)).parameters
    ours = nj.interop.CONVENTIONS[name].arguments
    sizes = {"num_features", "num_channels", "normalized_shape", "shape", "input_size"}
    for word, parameter in ours.items():
        assert word in theirs, f"{name} has no {word}"
        default = theirs[word].default
        if word in sizes or (word, default) in (
            ("mode", "legacy"),
            ("axis", slice(1, None)),
        ):
            continue
        if word == "axis_name" and name.startswith("equinox"):
            continue
        assert parameter.default == default, word


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "layer": (
        "torch.nn.BatchNorm4d", {},
        "there is no convention 'torch.nn.BatchNorm4d'; did you mean "
        "'torch.nn.BatchNorm3d'?",
    ),
    "argument": (
        "torch.nn.LayerNorm", {"epsilon": 1e-6},
        "torch.nn.LayerNorm has no argument 'epsilon' that changes its spec; did you "
        "mean 'eps'?",
    ),
    "argument that changes nothing": (
        "flax.linen.RMSNorm", {"use_fast_variance": False},
        "flax.linen.RMSNorm has no argument 'use_fast_variance' that changes its spec; "
        "expected one of epsilon, dtype, use_scale, reduction_axes, feature_axes, "
        "axis_name",
    ),
    "argument that is missing": (
        "torch.nn.GroupNorm", {},
        "torch.nn.GroupNorm has no default for num_groups: give it as num_groups=...",
    ),
    "argument of nnx": (
        "flax.linen.BatchNorm", {"num_features": 3},
        "flax.linen.BatchNorm has no argument 'num_features' that changes its spec; "
        "expected one of axis, momentum, epsilon, dtype, use_bias, use_scale, "
        "axis_name, use_fast_variance",
    ),
    "flag": (
        "flax.linen.LayerNorm", {"use_bias": 0},
        "use_bias is 0, expected True or False",
    ),
    "number": (
        "flax.linen.LayerNorm", {"epsilon": "small"},
        "epsilon is 'small', expected a number",
    ),
    "share": (
        "keras.layers.BatchNormalization", {"momentum": 99},
        "momentum is 99, expected between 0 and 1",
    ),
    "count": (
        "haiku.GroupNorm", {"groups": 2.0},
        "groups is 2.0, expected a whole number",
    ),
    "groups": (
        "torch.nn.GroupNorm", {"num_groups": 4, "num_channels": 6},
        "4 groups do not divide 6 channels",
    ),
    "no groups": (
        "equinox.nn.GroupNorm", {"groups": 0, "channels": 6},
        "groups is 0, expected a whole number, 1 or more",
    ),
    "two words for groups": (
        "flax.nnx.GroupNorm", {"group_size": 4},
        "num_groups is 32 and group_size 4, expected exactly one of them: say "
        "num_groups=None beside group_size",
    ),
    "axes of groups": (
        "flax.linen.GroupNorm", {"reduction_axes": -2},
        "the axes of a group norm are '... [w] c', expected the last one among the "
        "reduced ones: add -1",
    ),
    "axis": (
        "keras.layers.LayerNormalization", {"axis": "last"},
        "axis is 'last', expected a whole number, or several in a tuple",
    ),
    "slice": (
        "haiku.RMSNorm", {"axis": slice(-2, None)},
        "axis is slice(-2, None, None), expected a slice that starts at 0 or more and "
        "stops at the end or before it, like slice(1, -1)",
    ),
    "axis of groups": (
        "keras.layers.GroupNormalization", {"axis": 2},
        "axis is 2, expected -1 or 1: write the pattern",
    ),
    "axis and format": (
        "haiku.GroupNorm", {"groups": 2, "axis": -1, "data_format": "NC..."},
        "axis is -1, expected None beside data_format='NC...': write the pattern",
    ),
    "format": (
        "haiku.InstanceNorm", {**BOTH, "data_format": "NHWC"},
        "data_format is 'NHWC', expected one of 'channels_last', 'channels_first', "
        "'N...C', 'NC...'",
    ),
    "mode": (
        "equinox.nn.BatchNorm", {"mode": "eval"},
        "mode is 'eval', expected one of 'ema', 'batch', 'legacy'",
    ),
    "shape": (
        "torch.nn.LayerNorm", {"normalized_shape": "6"},
        "shape is '6', expected a whole number or several",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line(case: str):
    name, arguments, message = WRONG[case]
    with pytest.raises(ValueError, match=r"\A[^\n]*\Z") as caught:
        nj.interop.convention(name, **arguments)
    assert str(caught.value) == message
    with pytest.raises(ValueError, match="there is no convention"):
        nj.interop.notes("torch.LayerNorm")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((-1, -1), ("... [c]", "c")),
        (((-1, -2, -3), -1), ("... [h w c]", "c")),
        (((-2, -1), (-2, -1)), ("... [w c]", "w c")),
        ((-2, -1), ("... [w] c", "c")),
        (((1, 2), ()), ("b [x1 x2] ...", "")),
        (((1, -1), -1), ("b [x1] ... [c]", "c")),
        ((0, 0), ("[c] ...", "c")),
        ((-2, -2), ("... [c] z1", "c")),
        ((-5, ()), ("... [z5] d h w c", "")),
        ((slice(1, -1), -1), ("b [...] c", "c")),
        ((slice(2, None), (-2, -1)), ("b x1 [... w c]", "w c")),
        ((slice(None), ()), ("[...]", "")),
    ],
)
def test_axes_by_number_are_written_as_patterns(arguments, expected):
    assert written(*arguments) == expected
    nj.NormSpec(expected[0], affine=expected[1] or None)


def test_all_other_axes():
    assert written(-1, -1, others=True) == ("[...] c", "c")
    assert written(1, 1, others=True) == ("[b] c [...]", "c")
    assert written(-2, -2, others=True) == ("[...] c [z1]", "c")
    assert written((0, -1), (), others=True) == ("b [...] c", "")
    assert grouped("b x1 [... c]") == "b x1 [...] (g [c])"
    assert trailing([5]) == ((-1,), {"c": 5})


def test_sizes_of_a_constructor_are_checked_at_the_input():
    spec = nj.interop.convention("equinox.nn.LayerNorm", shape=(4, 6))
    assert (spec.pattern, dict(spec.sizes)) == ("... [w c]", {"w": 4, "c": 6})
    with pytest.raises(ValueError, match="w=4 does not match dimension 1 of size 6"):
        nj.normalize(spec, jnp.ones((2, 6, 4)))


def test_the_commands_know_conventions(normjax: Call):
    done = normjax("spec", "torch.nn.BatchNorm2d")
    assert (done.code, done.err) == (0, "")
    first, *rows = done.out.splitlines()
    assert first == repr(nj.interop.convention("torch.nn.BatchNorm2d"))
    card = [row[0] for row in table("\n".join(rows))]
    assert "formula" in card
    notes = nj.interop.notes("torch.nn.BatchNorm2d")
    assert card.count("note") == len(notes)
    assert notes[0] in done.out
    done = normjax(
        "spec", "torch.nn.GroupNorm", "--set", "num_groups=4", "--set", "ddof=1"
    )
    spec = nj.interop.convention("torch.nn.GroupNorm", num_groups=4).replace(ddof=1)
    assert done.out.splitlines()[0] == repr(spec)
    done = normjax("diff", "torch.nn.LayerNorm", "flax.linen.LayerNorm")
    assert [row[0] for row in table(done.out)[1:]] == ["epsilon", "precision.algorithm"]


def test_the_commands_refuse_in_one_line(normjax: Call):
    done = normjax("spec", "torch.nn.Batchnorm2d")
    assert done == Done(2, "", "there is no convention 'torch.nn.Batchnorm2d'; did you "
                        "mean 'torch.nn.BatchNorm2d'?\n")  # fmt: skip
    done = normjax("diff", "haiku.RMSNorm", "rms_norm")
    message = "haiku.RMSNorm has no default for axis: give it as axis=...\n"
    assert done == Done(2, "", message)


@pytest.mark.slow
def test_verify_holds_for_a_convention(normjax: Call):
    """The tolerance of the checks is that of the convention's own arithmetic."""
    done = normjax("verify", "torch.nn.LayerNorm")
    assert (done.code, done.err) == (0, "")
