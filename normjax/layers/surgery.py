"""Norm layers of Flax models that exist: found, watched, replaced, recalibrated."""

from normjax.layers.calibration import recalibrate as recalibrate
from normjax.layers.found import NormCall as NormCall
from normjax.layers.found import NormInputs as NormInputs
from normjax.layers.found import NormLayer as NormLayer
from normjax.layers.parameters import NormParameters as NormParameters
from normjax.layers.parameters import norm_parameters as norm_parameters
from normjax.layers.replace import NormChange as NormChange
from normjax.layers.replace import freeze as freeze
from normjax.layers.replace import replace_norms as replace_norms
from normjax.layers.snapshots import merge_statistics as merge_statistics
from normjax.layers.snapshots import restore as restore
from normjax.layers.snapshots import snapshot as snapshot
from normjax.layers.watch import norm_inputs as norm_inputs
from normjax.layers.watch import norm_layers as norm_layers
