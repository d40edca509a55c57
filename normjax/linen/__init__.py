"""Flax linen layers: they hold parameters and statistics, and no mathematics."""

from normjax.linen.adaptive import MixtureNorm as MixtureNorm
from normjax.linen.adaptive import ModulatedNorm as ModulatedNorm
from normjax.linen.attention import QKNormAttention as QKNormAttention
from normjax.linen.drop_in import BatchNorm as BatchNorm
from normjax.linen.drop_in import GroupNorm as GroupNorm
from normjax.linen.drop_in import InstanceNorm as InstanceNorm
from normjax.linen.drop_in import LayerNorm as LayerNorm
from normjax.linen.drop_in import RMSNorm as RMSNorm
from normjax.linen.kernels import WeightStandardized as WeightStandardized
from normjax.linen.norm import Norm as Norm
