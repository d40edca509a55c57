"""Layers of other libraries: their conventions as specs, and nodes of ONNX models.

And what one does with a norm that comes from elsewhere: fold it into a kernel.
"""

from normjax.interop import onnx as onnx
from normjax.interop.conventions import CONVENTIONS as CONVENTIONS
from normjax.interop.conventions import arguments as arguments
from normjax.interop.conventions import convention as convention
from normjax.interop.conventions import notes as notes
from normjax.interop.folding import Folded as Folded
from normjax.interop.folding import fold as fold
from normjax.interop.record import Convention as Convention
from normjax.interop.separable import Rewritten as Rewritten
from normjax.interop.separable import absorb_epsilon as absorb_epsilon
from normjax.interop.separable import store_scale as store_scale
