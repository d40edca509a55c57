from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from small import BATCH, MOMENTS, STATE, STATISTICS, X, moments, ones, refuse

import normjax as nj
from normjax.spec import NormSpec, Running

LAYER = nj.layer_norm()
BLEND = BATCH.replace(statistics="blend")
GROUP = nj.group_norm(2)
DEBIASED = BATCH.replace(running=Running(debias=True, initial=(0, 0)))
PARAMS: Any = {"scale": ones(4), "bias": ones(4)}


def every_use(spec: NormSpec, x: Any = X) -> dict[str, Any]:
    """Each entry point that takes a spec, on inputs that are right otherwise."""
    return {
        "init": lambda: nj.init(spec, x.shape),
        "normalize": lambda: nj.normalize(spec, x),
        "moments": lambda: nj.moments(spec, x),
        "running.init": lambda: nj.running.init(spec, x.shape),
        "running.update": lambda: nj.running.update(spec, STATE, MOMENTS),
        "running.read": lambda: nj.running.read(spec, STATE),
    }


USES = list(every_use(BATCH))


@pytest.mark.parametrize("use", USES)
def test_right_input_passes(use: str):
    every_use(BATCH)[use]()


@pytest.mark.parametrize("use", ["init", "normalize", "moments", "running.init"])
@pytest.mark.parametrize(
    ("pattern", "sizes", "message"),
    [
        (
            "b [c]",
            {},
            "pattern 'b [c]' has 2 dimensions, the tensor has 3: shape (2, 3",
        ),
        ("b [h] w c", {}, "pattern 'b [h] w c' has 4 dimensions, the tensor has 3"),
        ("b ... h [w] c", {}, "has at least 4 dimensions, the tensor has 3"),
        ("b [h] (g c)", {"g": 3}, "g=3 does not divide dimension 2 of size 4"),
        ("b [h] (g c)", {}, "(g c) needs a size for all of its parts but one; pass"),
    ],
)
def test_shapes(use: str, pattern: str, sizes: dict[str, int], message: str):
    with refuse(message):
        every_use(NormSpec(pattern, sizes, running=Running()))[use]()


@pytest.mark.parametrize("use", ["normalize", "moments"])
def test_statistics_of_nothing(use: str):
    """Given statistics need no axis that is reduced: a sample of an evaluated batch."""
    spec = NormSpec("b h [...] c", running=Running())
    with refuse("reduces no axis of shape (2, 3, 4): put brackets around an axis"):
        every_use(spec)[use]()


@pytest.mark.parametrize("shape", [4, X, None, {2, 3}])
@pytest.mark.parametrize("init", [nj.init, nj.running.init])
def test_what_is_no_shape(init: Any, shape: Any):
    message = (
        f"shape is a {type(shape).__name__}, expected a tuple, for instance x.shape"
    )
    with refuse(message):
        init(BATCH, shape)


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint32", "bool", "complex64"])
@pytest.mark.parametrize("use", ["normalize", "moments"])
def test_dtypes_of_the_input(use: str, dtype: str):
    message = (
        f"x has dtype {dtype}, expected a float dtype: cast it first, for instance"
    )
    with refuse(message):
        every_use(BATCH, X.astype(dtype))[use]()


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_dtypes_of_the_parameters(dtype: str):
    with refuse(f"init has dtype {dtype}, expected a float dtype"):
        nj.init(BATCH, X.shape, dtype)
    with refuse(
        f"params.bias has dtype {dtype}, expected a float dtype: cast it first"
    ):
        nj.normalize(BATCH, X, {**PARAMS, "bias": ones(4, dtype=dtype)})


@pytest.mark.parametrize("name", ["scale", "bias"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 4), (2, 2)])
def test_shapes_of_the_parameters(name: str, shape: tuple[int, ...]):
    message = (
        f"params.{name} has shape {shape}, expected (4,): the axes '(g c)' of '{{}}'"
    )
    with refuse(message.format(GROUP.pattern)):
        nj.normalize(GROUP, X, {**PARAMS, name: ones(*shape)})


@pytest.mark.parametrize(
    ("affine", "got", "expected"),
    [
        ("c", ["scale"], ["bias", "scale"]),
        ("c", ["bias", "gamma"], ["bias", "scale"]),
        ("c", ["bias", "scale", "shift"], ["bias", "scale"]),
        ("c", [], ["bias", "scale"]),
        (nj.Affine("c", bias=False), ["bias", "scale"], ["scale"]),
        (nj.Affine("c", scale=False, bias=False), ["scale"], []),
        (None, ["scale"], []),
    ],
)
def test_names_of_the_parameters(affine: Any, got: list[str], expected: list[str]):
    spec = LAYER.replace(affine=affine)
    params: Any = dict.fromkeys(got, PARAMS["scale"])
    message = (
        f"params has {got}, expected {expected}: the spec says affine={spec.affine}"
    )
    with refuse(message):
        nj.normalize(spec, X, params)


@pytest.mark.parametrize("params", [PARAMS["scale"], [1.0], "scale"])
def test_params_are_a_dict(params: Any):
    name = type(params).__name__
    with refuse(f"params is a {name}, expected a dict as nj.init gives it"):
        nj.normalize(LAYER, X, params)


@pytest.mark.parametrize("use", [nj.normalize, nj.moments])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (3,), (2, 4), (2, 3, 4, 1), (2, 3, 2)])
def test_masks_never_align_at_the_end(use: Any, shape: tuple[int, ...]):
    message = f"mask has shape {shape}, x has (2, 3, 4): expected full rank with size 1"
    with refuse(message):
        use(BATCH, X, mask=ones(*shape, dtype="bool"))


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (1, 3), (2, 3, 4), (2, 3, 1)])
def test_masks_align_at_the_front_or_have_full_rank(shape: tuple[int, ...]):
    mask = ones(*shape, dtype="bool")
    full = ones(2, 3, 4) * mask.reshape(shape + (1,) * (3 - len(shape)))
    count = nj.moments(BATCH, X, mask=mask).count
    assert count.tolist() == full.sum((0, 1)).tolist()


def test_masks_are_real():
    with refuse("mask has dtype complex64, expected bool or real weights"):
        nj.normalize(BATCH, X, mask=ones(2, 3, dtype="complex64"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (0.0, 1.0),
            " is a tuple, expected Moments (nj.moments) or Statistics (nj.runn",
        ),
        (
            STATE,
            " is a State, expected Moments (nj.moments) or Statistics (nj.running.",
        ),
        (
            nj.Statistics(ones(3), ones(4)),
            ".mean has shape (3,), expected (4,): the mapped axes of '[...] c'",
        ),
        (
            nj.Statistics(ones(4), ones(1, 4)),
            ".variance has shape (1, 4), expected (4,): the mapped axes of '[...] c'",
        ),
        (
            moments(2),
            ".mean has shape (2,), expected (4,): the mapped axes of '[...] c'",
        ),
        (
            nj.Statistics(ones(4), ones(4, dtype="int64")),
            ".variance has dtype int64, expected a float dtype: cast it first",
        ),
        (
            nj.Statistics(ones(4, dtype="complex64"), ones(4)),
            ".mean has dtype complex64, expected a float dtype: cast it first",
        ),
    ],
)
def test_given_statistics(given: Any, message: str):
    with refuse(f"moments{message}"):
        nj.normalize(BATCH, X, moments=given)
    with refuse(f"reference{message}"):
        nj.normalize(BLEND, X, reference=given)
    with refuse(f"reference{message}"):
        nj.normalize(BLEND, X, moments=MOMENTS, reference=given)


@pytest.mark.parametrize("kind", ["blend", "renorm"])
def test_a_reference_belongs_to_a_blend_or_a_renorm_and_to_nothing_else(kind: str):
    mixed = BATCH.replace(statistics=kind)
    nj.normalize(mixed, X, reference=STATISTICS)
    nj.normalize(mixed, X, moments=MOMENTS, reference=STATISTICS)
    nj.normalize(mixed, X, moments=STATISTICS)
    for own in (None, MOMENTS):
        with refuse(f"statistics='{kind}' needs reference=Statistics(mean, variance)"):
            nj.normalize(mixed, X, moments=own)
    message = (
        "reference is only used with statistics='blend' or 'renorm', and not beside "
        "Statistics"
    )
    for spec, own in ((BATCH, None), (BATCH, MOMENTS), (mixed, STATISTICS)):
        with refuse(message):
            nj.normalize(spec, X, moments=own, reference=STATISTICS)


NUMBERS = [
    ("epsilon", None, "epsilon is None, expected a number"),
    ("epsilon", "1e-5", "epsilon is '1e-5', expected a number"),
    ("epsilon", float("nan"), "epsilon is nan, expected a finite number"),
    ("epsilon", -1e-5, "epsilon is -1e-05, expected 0 or more"),
    ("epsilon", True, "epsilon is True, expected a number"),
    (
        "epsilon",
        np.ones(4),
        "epsilon has shape (4,) and dtype float64, expected one real",
    ),
    (
        "epsilon",
        np.array(1j),
        "epsilon has shape () and dtype complex128, expected one",
    ),
    ("mean_weight", 1.5, "mean_weight is 1.5, expected between 0 and 1"),
    ("running.decay", 1.5, "running.decay is 1.5, expected between 0 and 1"),
    ("running.decay", -0.1, "running.decay is -0.1, expected between 0 and 1"),
    ("running.decay", "0.9", "running.decay is '0.9', expected a number"),
    ("running", 0.9, "running is 0.9, expected Running(decay=...) or None"),
    ("running", {"decay": 0.9}, "running is {'decay': 0.9}, expected Running(decay="),
]


@pytest.mark.parametrize("use", [use for use in USES if use != "moments"])
@pytest.mark.parametrize(("name", "value", "message"), NUMBERS)
def test_numbers(use: str, name: str, value: Any, message: str):
    with refuse(message):
        every_use(DEBIASED.replace(**{name: value}))[use]()


@pytest.mark.parametrize("use", ["init", "normalize", "moments", "running.init"])
def test_groups_of_one_are_refused_where_the_spec_says_so(use: str):
    strict = NormSpec("b [h] c", single="error", running=Running())
    every_use(strict)[use]()
    with refuse("'b [h] c' on shape (2, 1, 4) has groups of one element and the spec"):
        every_use(strict, X[:, :1])[use]()


@pytest.mark.parametrize("use", ["init", "normalize", "moments", "running.init"])
@pytest.mark.parametrize("field", ["accumulate", "output"])
def test_float64_needs_x64(use: str, field: str):
    wide = BATCH.replace(**{f"precision.{field}": "float64"})
    every_use(wide)[use]()
    message = (
        f"precision.{field} is 'float64', which JAX only has with jax_enable_x64: "
    )
    with jax.enable_x64(False), refuse(message):
        every_use(wide)[use]()


def test_errors_come_from_shapes_and_never_from_values():
    bad = X * np.nan
    assert np.isnan(nj.normalize(LAYER, bad)).all()
    assert np.isnan(nj.normalize(BATCH, X, moments=nj.moments(BATCH, bad))).all()

    @jax.jit
    def traced(epsilon: Any, mask: Any):
        return nj.normalize(LAYER.replace(epsilon=epsilon), X, mask=mask)

    assert np.isnan(traced(-1e9, ones(2, 3, 1))).all()
    with refuse("mask has shape (4,), x has (2, 3, 4)"):
        traced(0.0, ones(4))
