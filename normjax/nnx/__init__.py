"""Flax nnx layers: they hold parameters and statistics, and no mathematics."""

from normjax.nnx.adaptive import MixtureNorm as MixtureNorm
from normjax.nnx.adaptive import ModulatedNorm as ModulatedNorm
from normjax.nnx.attention import QKNormAttention as QKNormAttention
from normjax.nnx.drop_in import BatchNorm as BatchNorm
from normjax.nnx.drop_in import GroupNorm as GroupNorm
from normjax.nnx.drop_in import InstanceNorm as InstanceNorm
from normjax.nnx.drop_in import LayerNorm as LayerNorm
from normjax.nnx.drop_in import RMSNorm as RMSNorm
from normjax.nnx.kernels import WeightStandardized as WeightStandardized
from normjax.nnx.norm import Norm as Norm
