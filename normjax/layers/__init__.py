"""What is built from norms: residual wiring, blocks, and surgery on whole models."""

from normjax.layers import examples as examples
from normjax.layers import linen as linen
from normjax.layers import nnx as nnx
from normjax.layers import wiring as wiring
