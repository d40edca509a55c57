"""Models of the studies, in Flax linen, with every leaf drawn from a key of its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field
from pydantic import model_validator as _validator

from normjax.linen import Norm
from normjax.study.cells import stream
from normjax.study.norm_setting import NormSetting
from normjax.study.schema import Settings, problem


class ModelSettings(Settings):
    """A ReLU multilayer perceptron.

    ``norm`` stands at the input, or after every hidden Dense (``at: hidden``). A side
    route adds a Dense of one feature of the raw input, its mean over features, to the
    head's output; ``side_route_shuffled`` permutes that feature over the examples.
    """

    name: Literal["mlp"] = "mlp"
    widths: list[Annotated[int, Field(ge=1)]] = Field(default=[32], min_length=1)
    norm: NormSetting | None = None
    side_route: Literal["none", "mean"] = "none"
    side_route_shuffled: bool = False

    @_validator(mode="after")
    def _places(self) -> ModelSettings:
        if self.norm is not None and self.norm.at not in ("input", "hidden"):
            text = f"expected 'input' or 'hidden', got {self.norm.at!r}"
            raise problem("norm.at", text)
        if self.side_route_shuffled and self.side_route == "none":
            text = "there is no side route to shuffle: set side_route: mean"
            raise problem("side_route_shuffled", text)
        return self


class MLP(nn.Module):
    """The perceptron of ``ModelSettings``; sows what diagnostics look at."""

    settings: ModelSettings

    @nn.compact
    def __call__(self, x: Array, level: Array, train: bool) -> Array:
        """Predict one number for each example.

        Args:
            x: examples × features.
            level: the side route's feature, one for each example.
            train: whether norms that store statistics use the batch's own.

        Returns:
            One prediction for each example.
        """
        settings = self.settings
        h = self._norm(x, "input", "norm", train)
        for i, width in enumerate(settings.widths):
            h = nn.Dense(width, name=f"hidden_{i}")(h)
            h = nn.relu(self._norm(h, "hidden", f"norm_{i}", train))
        self.sow("intermediates", "head_input", h)
        y = nn.Dense(1, name="head")(h)
        if settings.side_route != "none":
            y = y + nn.Dense(1, name="side_route")(level[:, None])
        return y[:, 0]

    def _norm(self, x: Array, place: str, name: str, train: bool) -> Array:
        norm = self.settings.norm
        if norm is None or norm.at != place:
            return x
        y = Norm(norm.spec, name=name)(x, use_running_average=_mode(norm, train))
        self.sow("intermediates", "norm_input", x)
        self.sow("intermediates", "norm_output", y)
        return y


def _mode(norm: NormSetting, train: bool) -> bool | None:
    return None if norm.spec.running is None else not train


def initialize(model: nn.Module, key: Array, *inputs: Any) -> dict[str, Any]:
    """Variables in which a leaf depends on its path and shape only.

    Every kernel is drawn by ``lecun_normal`` with a key that is folded from its path,
    so leaves of equal path and shape are identical across arms, whatever else there is.

    Args:
        model: the module.
        key: of the initialization.
        *inputs: what the module is called with.

    Returns:
        The variables as ``model.init`` gives them.
    """
    variables = model.init(jax.random.key(0), *inputs)
    draw = nn.initializers.lecun_normal()

    def leaf(path, value: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not name.endswith("kernel"):
            return value
        return draw(stream(key, name), value.shape, value.dtype)

    return jax.tree_util.tree_map_with_path(leaf, variables)


def digests(variables: dict[str, Any]) -> dict[str, Array]:
    """One number for each parameter, by path and shape, that any bit changes.

    It is made of whole numbers, so that no order of summation rounds it differently.
    """

    def digest(value: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
        places = jnp.arange(bits.size, dtype=jnp.uint32)
        odd = places * jnp.uint32(2654435761) * 2 + 1
        return jnp.sum(bits.ravel() * odd, dtype=jnp.uint32)

    leaves = jax.tree_util.tree_flatten_with_path(variables["params"])[0]
    return {
        f"{jax.tree_util.keystr(path, simple=True, separator='/')} "
        + "x".join(map(str, value.shape)): digest(value)
        for path, value in leaves
    }
