"""Norm layers of Flax models that exist: found, watched, replaced, recalibrated."""

from normjax.layers.found import NormLayer as NormLayer
from normjax.layers.replace import NormChange as NormChange
from normjax.layers.replace import freeze as freeze
from normjax.layers.replace import replace_norms as replace_norms
from normjax.layers.watch import NormCall as NormCall
from normjax.layers.watch import NormInputs as NormInputs
from normjax.layers.watch import norm_inputs as norm_inputs
from normjax.layers.watch import norm_layers as norm_layers
