"""Layers of other libraries: their conventions as specs, and nodes of ONNX models.

And what one does with a model that comes from elsewhere: convert it, fold its norms.
"""

from normjax.interop import onnx as onnx
from normjax.interop.conventions import CONVENTIONS as CONVENTIONS
from normjax.interop.conventions import arguments as arguments
from normjax.interop.conventions import convention as convention
from normjax.interop.conventions import notes as notes
from normjax.interop.conversion import from_flax as from_flax
from normjax.interop.conversion import from_keras as from_keras
from normjax.interop.conversion import from_torch as from_torch
from normjax.interop.conversion import to_keras as to_keras
from normjax.interop.conversion import to_torch as to_torch
from normjax.interop.folding import Folded as Folded
from normjax.interop.folding import fold as fold
from normjax.interop.layerwise import LayerParity as LayerParity
from normjax.interop.layerwise import ParityReport as ParityReport
from normjax.interop.layerwise import linen_activations as linen_activations
from normjax.interop.layerwise import parity as parity
from normjax.interop.layerwise import torch_activations as torch_activations
from normjax.interop.record import Convention as Convention
from normjax.interop.separable import Rewritten as Rewritten
from normjax.interop.separable import absorb_epsilon as absorb_epsilon
from normjax.interop.separable import store_scale as store_scale
