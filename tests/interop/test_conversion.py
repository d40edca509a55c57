"""Layers of PyTorch in Flax: the same output from the same bits, and back."""

from __future__ import annotations

import copy
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ported import randomized, same_arrays, template, torch

import normjax as nj
from normjax.interop import from_torch, to_torch

# Flax's own layers promote; the rest of the tests are strict.
pytestmark = pytest.mark.jax_defaults

CLOSE = 64 * 2.0**-53 * 100


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


# PyTorch's layer, Flax's, shape (channels last), and what the caller has to say.
Case = tuple[Any, nn.Module, tuple[int, ...], dict[str, Any]]
LAYERS: dict[str, Case] = {
    "linear": (torch.nn.Linear(4, 4), nn.Dense(4), (3, 4), {}),
    "linear without bias": (
        torch.nn.Linear(4, 6, bias=False), nn.Dense(6, use_bias=False), (3, 4), {},
    ),
    "linear to heads": (
        torch.nn.Linear(4, 6), nn.DenseGeneral((2, 3)), (3, 4), {},
    ),
    "conv 1d": (torch.nn.Conv1d(4, 4, 3), nn.Conv(4, (3,), padding=0), (2, 6, 4), {}),
    "conv 2d": (
        torch.nn.Conv2d(4, 6, (3, 2), 2, 1),
        nn.Conv(6, (3, 2), 2, padding=1), (2, 6, 5, 4), {},
    ),
    "grouped": (
        torch.nn.Conv2d(4, 6, 3, groups=2),
        nn.Conv(6, (3, 3), padding=0, feature_group_count=2), (2, 5, 5, 4), {},
    ),
    "dilated": (
        torch.nn.Conv1d(3, 4, 3, dilation=2),
        nn.Conv(4, (3,), padding=0, kernel_dilation=2), (2, 9, 3), {},
    ),
    "transposed": (
        torch.nn.ConvTranspose2d(4, 4, (3, 2), (2, 2)),
        nn.ConvTranspose(4, (3, 2), (2, 2), padding="VALID"), (2, 4, 3, 4),
        {"kinds": {"": "conv_transpose"}},
    ),
    "transposed, padded": (
        torch.nn.ConvTranspose1d(4, 6, 3, 2, padding=1, output_padding=1),
        nn.ConvTranspose(6, (3,), (2,), padding=[(1, 2)]), (2, 4, 4), {},
    ),
    "transposed kernel": (
        torch.nn.ConvTranspose1d(4, 4, 3, 2),
        nn.ConvTranspose(4, (3,), (2,), padding="VALID", transpose_kernel=True),
        (2, 4, 4), {"kinds": {"": "conv_transpose_kernel"}},
    ),
    "layer norm": (
        torch.nn.LayerNorm(4), nj.linen.LayerNorm(epsilon=1e-5), (3, 4), {},
    ),
    "layer norm over an image": (
        torch.nn.LayerNorm((4, 4, 4)),
        nj.linen.Norm(nj.layer_norm("h w c")), (2, 4, 4, 4),
        {"kinds": {"": "norm_channels_first"}},
    ),
    "rms norm": (
        torch.nn.RMSNorm(4, eps=1e-6), nj.linen.RMSNorm(), (3, 4), {},
    ),
    "group norm": (
        torch.nn.GroupNorm(2, 4),
        nj.linen.GroupNorm(num_groups=2, epsilon=1e-5), (2, 3, 4), {},
    ),
    "instance norm": (
        torch.nn.InstanceNorm2d(4, affine=True),
        nj.linen.InstanceNorm(epsilon=1e-5), (2, 3, 3, 4), {},
    ),
    "instance norm with statistics": (
        torch.nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nj.linen.Norm(nj.instance_norm(running=nj.Running()), True), (2, 3, 4), {},
    ),
    "batch norm": (
        torch.nn.BatchNorm1d(4), nj.linen.BatchNorm(True), (3, 4), {},
    ),
    "batch norm without parameters": (
        torch.nn.BatchNorm2d(4, affine=False),
        nj.linen.Norm(nj.batch_norm(affine=None), True), (3, 2, 2, 4), {},
    ),
}  # fmt: skip


def run(module: Any, x: np.ndarray) -> np.ndarray:
    """A module of channels first, unless it knows the last axis alone."""
    last = isinstance(module, torch.nn.Linear | torch.nn.RMSNorm) or (
        isinstance(module, torch.nn.LayerNorm) and len(module.normalized_shape) == 1
    )
    given = x if last or x.ndim < 3 else np.moveaxis(x, -1, 1)
    with torch.no_grad():
        y = module(torch.tensor(given)).numpy()
    return y if given is x else np.moveaxis(y, 1, -1)


@pytest.mark.parametrize("case", LAYERS)
def test_one_layer(case: str):
    module, layer, shape, words = LAYERS[case]
    module = randomized(module).eval()
    x = images(*shape)
    shapes = template(layer, x)
    variables = from_torch(module, shapes, **words)
    assert jax.tree.structure(variables) == jax.tree.structure(shapes)
    got: Any = layer.apply(variables, jnp.asarray(x))
    np.testing.assert_allclose(
        np.reshape(got, run(module, x).shape), run(module, x), rtol=CLOSE, atol=CLOSE
    )
    state = module.state_dict()
    # The classes of a module and the shapes of a state dict say the same.
    said: Any = {"kinds": {"": "conv"}} if case == "conv 1d" else words
    jax.tree.map(
        np.testing.assert_array_equal, from_torch(state, shapes, **said), variables
    )
    # Bit for bit into a module with other values; a counter without a place stays.
    other = randomized(copy.deepcopy(module), 1)
    back = to_torch(variables, other, **words)
    if case == "batch norm":
        assert back.pop("num_batches_tracked") == 4
        assert state.pop("num_batches_tracked") == 3
    same_arrays(back, state)
    other.load_state_dict(back, strict=case != "batch norm")


def attention(**words: Any) -> Any:
    return torch.nn.MultiheadAttention(8, 2, batch_first=True, **words)


@pytest.mark.filterwarnings("ignore:You are passing an array:DeprecationWarning")
@pytest.mark.parametrize("own", [False, True])
def test_attention(own: bool):
    """One in_proj for all, or one for each of query, key and value."""
    sizes: Any = {"kdim": 6, "vdim": 4, "bias": False} if own else {}
    module = randomized(attention(**sizes)).eval()
    layer = nn.MultiHeadDotProductAttention(2, qkv_features=8, use_bias=not own)
    x, key = images(3, 5, 8), images(3, 4, 6 if own else 8)
    value = images(3, 4, 4 if own else 8)
    shapes = template(layer, x, key, value)
    variables = from_torch(module, shapes)
    got: Any = layer.apply(variables, *map(jnp.asarray, (x, key, value)))
    with torch.no_grad():
        expected = module(*map(torch.tensor, (x, key, value)))[0].numpy()
    np.testing.assert_allclose(got, expected, rtol=CLOSE, atol=CLOSE)
    other = randomized(attention(**sizes), 1)
    same_arrays(to_torch(variables, other), module.state_dict())
    four = nn.MultiHeadDotProductAttention(4, qkv_features=8, use_bias=not own)
    with pytest.raises(ValueError, match=r"has 4 heads, .* 2"):
        from_torch(module, template(four, x, key, value))
    with pytest.raises(ValueError, match="bias_k"):
        from_torch(randomized(attention(add_bias_kv=True)), shapes)


class Mixed(nn.Module):
    """Names that Flax gives, an embedding, and a flattened image before a dense."""

    @nn.compact
    def __call__(self, words: jax.Array, x: jax.Array) -> jax.Array:
        x = nn.Conv(4, (3, 3), padding=0)(x)
        return nn.Dense(4)(x.reshape(len(x), -1)) + nn.Embed(7, 4)(words)


NAMES = {"Conv_0": "body.0", "Dense_0": "body.2", "Embed_0": "words"}


class TorchMixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.Conv2d(4, 4, 3), torch.nn.Flatten(), torch.nn.Linear(24, 4))
        self.body = torch.nn.Sequential(*layers)
        self.words = torch.nn.Embedding(7, 4)

    def forward(self, words: Any, x: Any) -> Any:
        return self.body(x) + self.words(words)


def mixed() -> tuple[Any, Any, Any]:
    shapes = template(Mixed(), np.zeros(2, np.int32), np.zeros((2, 4, 5, 4)))
    return (
        randomized(TorchMixed()),
        shapes,
        {"names": NAMES, "flatten": {"Dense_0": (4, 2, 3)}},
    )


def test_names_flatten_and_an_embedding():
    """Without the order of the flatten all shapes fit and the output is wrong."""
    module, shapes, words = mixed()
    ids, x = np.array([6, 2], np.int32), images(2, 4, 5, 4)
    with torch.no_grad():
        given = torch.tensor(ids), torch.tensor(np.moveaxis(x, -1, 1))
        expected = module(*given).numpy()
    variables = from_torch(module.state_dict(), shapes, **words)
    got: Any = Mixed().apply(variables, jnp.asarray(ids), jnp.asarray(x))
    np.testing.assert_allclose(got, expected, rtol=CLOSE, atol=CLOSE)
    same_arrays(
        to_torch(variables, randomized(TorchMixed(), 1), **words), module.state_dict()
    )
    wrong: Any = Mixed().apply(
        from_torch(module, shapes, names=NAMES), jnp.asarray(ids), jnp.asarray(x)
    )
    assert np.abs(wrong - expected).max() > 0.1


def test_half_precision_bits_and_float64_without_x64():
    module, shapes, words = mixed()
    half = randomized(TorchMixed(), dtype=torch.bfloat16)
    variables = from_torch(half, shapes, **words)
    assert variables["params"]["Dense_0"]["kernel"].dtype == jnp.bfloat16
    other = randomized(TorchMixed(), 1, dtype=torch.bfloat16)
    same_arrays(to_torch(variables, other, **words), half.state_dict())
    with jax.enable_x64(False), pytest.raises(ValueError, match="float64, which JAX"):
        from_torch(module, shapes, **words)


def changed(**changes: Any) -> dict[str, Any]:
    """The state dict with arrays changed, or taken out (None)."""
    state = {k: v.numpy() for k, v in mixed()[0].state_dict().items()}
    for name, value in changes.items():
        name = name.replace("_", ".")
        state.pop(name, None)
        if value is not None:
            state[name] = value
    return state


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "missing": (
        {"body_2_bias": None}, {}, r"without a source: Dense_0/bias \(from body",
    ),
    "left over": ({"body_9_weight": np.ones(3)}, {}, "left over: body/9/weight"),
    "both": (
        {"body_2_bias": None, "more": np.ones(3)}, {},
        "without a source: Dense_0/bias.*; left over: more",
    ),
    "shape": ({"body_2_weight": np.ones((4, 23))}, {}, r"\(24, 4\), body/2/weight is"),
    "dense for a conv": (
        {"body_0_weight": np.ones((4, 36))}, {}, r"body/0/weight is \(4, 36\)",
    ),
    "kind": ({}, {"kinds": {"Conv_0": "conv_2d"}}, "did you mean 'conv'"),
    "layer": ({}, {"kinds": {"Conv_1": "conv"}}, "did you mean 'Conv_0'"),
    "flatten": ({}, {"flatten": {"Dense": (4, 2, 3)}}, "did you mean 'Dense_0'"),
    "flatten sizes": ({}, {"flatten": {"Dense_0": (5, 2, 3)}}, "of another shape"),
    "names": ({}, {"names": {**NAMES, "Dense_1": "x"}}, "names has 'Dense_1'"),
    "no model": ({}, {"source": 3}, "is a int, expected a module"),
    "no tree": ({}, {"template": [1]}, "variables are a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_correspond_is_refused_in_one_line(case: str):
    """N80: nothing is left out in silence."""
    changes, said, text = BAD[case]
    _, shapes, words = mixed()
    words = {**words, **said}
    source = words.pop("source", changed(**changes))
    with pytest.raises(ValueError, match=text) as caught:
        from_torch(source, words.pop("template", shapes), **words)
    assert "\n" not in str(caught.value)


def test_statistics_must_be_there_and_a_square_kernel_needs_a_kind():
    """N80; and (4, 4, 3) is a convolution or a transposed one."""
    norm, layer = randomized(torch.nn.BatchNorm1d(4)), nj.linen.BatchNorm(True)
    state = norm.state_dict()
    state.pop("running_var")
    with pytest.raises(ValueError, match="source: var"):
        from_torch(state, template(layer, images(3, 4)))
    bare = torch.nn.BatchNorm1d(4, affine=False)
    with pytest.raises(ValueError, match=r"source: .*scale"):
        from_torch(bare, template(layer, images(3, 4)))
    conv = torch.nn.Conv1d(4, 4, 3)
    shapes = template(nn.Conv(4, (3,)), images(2, 6, 4))
    with pytest.raises(ValueError, match="fit conv, conv_transpose"):
        from_torch(conv.double().state_dict(), shapes)
    cube = torch.nn.LayerNorm((4, 4, 4)).double()
    layer = nj.linen.Norm(nj.layer_norm("h w c"))
    with pytest.raises(ValueError, match="fit norm, norm_channels_first"):
        from_torch(cube, template(layer, images(2, 4, 4, 4)))


def test_a_bias_without_a_place_is_no_rms_norm():
    """N62: some libraries' RMS norms have a bias; it is not dropped in silence."""
    state = {"weight": torch.ones(4), "bias": torch.zeros(4)}
    shapes = template(nj.linen.RMSNorm(), images(3, 4))
    with pytest.raises(ValueError, match="left over: bias"):
        from_torch(state, shapes)
    found = from_torch(state, shapes, ignore=["bias"])
    assert found["params"]["scale"].tolist() == [1] * 4


def test_one_array_of_theirs_may_be_two_of_ours_if_they_are_equal():
    state = {"fc.weight": torch.ones(4, 4, dtype=torch.float64)}
    shapes = {name: {"kernel": jnp.zeros((4, 4))} for name in ("first", "second")}
    words: Any = {"names": {"first": "fc", "second": "fc"}}
    found = from_torch(state, shapes, **words)
    same_arrays(to_torch(found, state, **words), state)
    found["second"]["kernel"] = found["second"]["kernel"] * 2
    with pytest.raises(ValueError, match="tied arrays must be equal"):
        to_torch(found, state, **words)


def test_counters_that_differ_are_no_single_number():
    state = randomized(torch.nn.BatchNorm1d(4)).state_dict()
    layer = nj.linen.Norm(nj.batch_norm(), True)
    found = from_torch(state, template(layer, images(3, 4)))
    count = found["batch_stats"]["count"]
    found["batch_stats"]["count"] = count.at[0].add(1)
    with pytest.raises(ValueError, match="num_batches_tracked is one number"):
        to_torch(found, state)


def test_what_is_ignored_stays_as_it_is():
    module, shapes, words = mixed()
    state = {**module.state_dict(), "mask": torch.ones(3)}
    words["ignore"] = ("mask", "Embed_0*", "words*")
    arrays = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 7.0), shapes)
    found = from_torch(state, arrays, **words)
    assert (found["params"]["Embed_0"]["embedding"] == 7).all()
    back = to_torch(found, {**state, "mask": torch.zeros(3)}, **words)
    assert back["mask"].sum() == 0
    assert torch.equal(back["words.weight"], state["words.weight"])
    with pytest.raises(ValueError, match="only its shape"):
        from_torch(state, shapes, **words)
