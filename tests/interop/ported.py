"""Whole models in PyTorch, and the same ones in Flax with normjax's layers."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj

torch = pytest.importorskip("torch", reason="PyTorch is not installed: TORCH=1")

# PyTorch's BatchNorm2d with channels last: it stores n/(n − 1) of the variance.
BATCH_NORM = nj.interop.convention("torch.nn.BatchNorm2d").replace(pattern="[...] c")


class TorchBlock(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        conv = torch.nn.Conv2d
        self.conv1 = conv(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(outputs)
        self.conv2 = conv(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(outputs)
        self.downsample = torch.nn.Sequential()
        if stride > 1:
            self.downsample.append(conv(inputs, outputs, 1, stride, bias=False))
            self.downsample.append(torch.nn.BatchNorm2d(outputs))

    def forward(self, x: Any) -> Any:
        y = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(y)) + self.downsample(x)).relu()


class TorchNet(torch.nn.Module):
    """Residual blocks on (N, 3, 8, 8), pooled, flattened, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(4)
        self.layer1 = TorchBlock(4, 4, 1)
        self.layer2 = TorchBlock(4, 6, 2)
        self.pool = torch.nn.MaxPool2d(2)
        self.fc1 = torch.nn.Linear(24, 5)
        self.fc2 = torch.nn.Linear(5, 5)

    def forward(self, x: Any) -> Any:
        x = self.bn1(self.conv1(x)).relu()
        x = self.pool(self.layer2(self.layer1(x)))
        return self.fc2(self.fc1(x.flatten(1)).relu())


class Block(nn.Module):
    features: int
    stride: int
    norm: nj.NormSpec = BATCH_NORM

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        def conv(size: int, stride: int, name: str) -> nn.Conv:
            edge = [(size // 2, size // 2)] * 2
            words: Any = {"use_bias": False, "name": name}
            return nn.Conv(self.features, (size, size), stride, edge, **words)

        def norm(name: str) -> nj.linen.Norm:
            return nj.linen.Norm(self.norm, not train, name=name)

        y = nn.relu(norm("bn1")(conv(3, self.stride, "conv1")(x)))
        y = norm("bn2")(conv(3, 1, "conv2")(y))
        if self.stride > 1:
            shortcut = conv(1, self.stride, "downsample_conv")(x)
            x = norm("downsample_bn")(shortcut)
        return nn.relu(y + x)


class Net(nn.Module):
    """``TorchNet`` on (N, 8, 8, 3)."""

    norm: nj.NormSpec = BATCH_NORM
    first: nj.NormSpec = BATCH_NORM

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(4, (3, 3), padding=1, use_bias=False, name="conv1")(x)
        x = nn.relu(nj.linen.Norm(self.first, not train, name="bn1")(x))
        x = Block(4, 1, self.norm, name="layer1")(x, train)
        x = Block(6, 2, self.norm, name="layer2")(x, train)
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(5, name="fc1")(x.reshape(len(x), -1)))
        return nn.Dense(5, name="fc2")(x)


NET: dict[str, Any] = {
    "names": {
        "layer2/downsample_conv": "layer2.downsample.0",
        "layer2/downsample_bn": "layer2.downsample.1",
    },
    "flatten": {"fc1": (6, 2, 2)},
}


class EncoderLayer(nn.Module):
    """``torch.nn.TransformerEncoderLayer`` with gelu, without dropout."""

    norm_first: bool
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        def attend(x: jax.Array) -> jax.Array:
            layer = nn.MultiHeadDotProductAttention(2, name="self_attn")
            return layer(x, mask=mask)

        def feed(x: jax.Array) -> jax.Array:
            x = nn.gelu(nn.Dense(16, name="linear1")(x), approximate=False)
            return nn.Dense(8, name="linear2")(x)

        def norm(name: str) -> nj.linen.LayerNorm:
            return nj.linen.LayerNorm(epsilon=self.epsilon, name=name)

        if self.norm_first:
            x = x + attend(norm("norm1")(x))
            return x + feed(norm("norm2")(x))
        x = norm("norm1")(x + attend(x))
        return norm("norm2")(x + feed(x))


class Encoder(nn.Module):
    """``torch.nn.TransformerEncoder`` of two layers and a last norm."""

    norm_first: bool
    epsilons: tuple[float, float] = (1e-5, 1e-5)

    @nn.compact
    def __call__(self, x: jax.Array, padded: jax.Array) -> jax.Array:
        mask = ~padded[:, None, None, :]
        for k, epsilon in enumerate(self.epsilons):
            x = EncoderLayer(self.norm_first, epsilon, name=f"layers_{k}")(x, mask)
        return nj.linen.LayerNorm(epsilon=1e-5, name="norm")(x)


ENCODER: dict[str, Any] = {"names": {f"layers_{k}": f"layers.{k}" for k in range(2)}}


def torch_encoder(norm_first: bool) -> Any:
    layer = torch.nn.TransformerEncoderLayer(
        8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=norm_first
    )
    last = torch.nn.LayerNorm(8)
    return torch.nn.TransformerEncoder(layer, 2, last, enable_nested_tensor=False)


def randomized(module: Any, seed: int = 0, dtype: Any = None) -> Any:
    """Every array of a module away from where it starts, variances above 0."""
    module = module.to(torch.float64 if dtype is None else dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if not tensor.is_floating_point():
                tensor.fill_(3 + seed)
                continue
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            noise = noise / max(1, tensor[0].numel() if tensor.ndim > 1 else 1) ** 0.5
            if tensor.ndim == 1:
                noise = 0.3 * noise + ("weight" in name)
            tensor.copy_(noise.abs() + 0.5 if name.endswith("running_var") else noise)
    return module


def template(model: nn.Module, *args: Any) -> Any:
    """Shapes of the variables; they start in float32, and so does this."""

    def narrow(leaf: Any) -> Any:
        dtype = "float32" if leaf.dtype == np.float64 else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    inputs = [narrow(a) if isinstance(a, np.ndarray) else a for a in args]
    fixed = [a for a in inputs if isinstance(a, bool)]
    shaped = [a for a in inputs if not isinstance(a, bool)]
    return jax.eval_shape(
        lambda *given: model.init(jax.random.key(0), *given, *fixed), *shaped
    )


def images(count: int = 6, dtype: Any = np.float64) -> np.ndarray:
    """(N, 8, 8, 3)."""
    return np.random.default_rng(0).normal(1, 2, (count, 8, 8, 3)).astype(dtype)


def channels_first(x: np.ndarray) -> Any:
    """(N, C, H, W), contiguous.

    With the strides of channels last torch 2.13.0+cpu computes a wrong float32 gradient
    of a strided 1×1 kernel, and writes to memory that is not its own.
    """
    return torch.tensor(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def sequences(dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """(N, L, E), and where it is padded."""
    x = np.random.default_rng(1).normal(0.5, 1.5, (3, 5, 8)).astype(dtype)
    return x, np.arange(5)[None] >= np.array([5, 3, 4])[:, None]


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """Arrays by names without the collection."""
    flat = jax.tree.leaves_with_path(tree)
    return {
        "/".join(str(entry.key) for entry in path[1:]): np.asarray(leaf)
        for path, leaf in flat
    }


def same_arrays(first: Any, second: Any) -> None:
    """Two state dicts, bit for bit, dtypes too."""
    assert list(first) == list(second)
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


def arrays(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)
