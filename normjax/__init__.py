"""normjax: normalization layers, stated completely and proved against autodiff."""

import importlib as _importlib
from typing import Any as _Any

from normjax import mixture as mixture
from normjax import running as running
from normjax.coupling import influence as influence
from normjax.functional import dynamic_tanh as dynamic_tanh
from normjax.functional import init as init
from normjax.functional import init_dynamic_tanh as init_dynamic_tanh
from normjax.functional import moments as moments
from normjax.functional import normalize as normalize
from normjax.information import Survival as Survival
from normjax.information import recoverable as recoverable
from normjax.jacobian import input_jacobian as input_jacobian
from normjax.operators import eigenvalues as eigenvalues
from normjax.operators import singular_values as singular_values
from normjax.presets import adaptive_instance_norm as adaptive_instance_norm
from normjax.presets import adaptive_layer_norm as adaptive_layer_norm
from normjax.presets import batch_norm as batch_norm
from normjax.presets import batch_renorm as batch_renorm
from normjax.presets import center_only as center_only
from normjax.presets import ghost_batch_norm as ghost_batch_norm
from normjax.presets import group_norm as group_norm
from normjax.presets import instance_norm as instance_norm
from normjax.presets import l2_norm as l2_norm
from normjax.presets import layer_norm as layer_norm
from normjax.presets import qk_norm as qk_norm
from normjax.presets import rms_norm as rms_norm
from normjax.presets import scale_only as scale_only
from normjax.presets import weight_standardization as weight_standardization
from normjax.spec import Affine as Affine
from normjax.spec import NormSpec as NormSpec
from normjax.spec import Precision as Precision
from normjax.spec import Running as Running
from normjax.spectra import Geometry as Geometry
from normjax.spectra import Spectrum as Spectrum
from normjax.spectra import geometry as geometry
from normjax.spectra import spectrum as spectrum
from normjax.spectra import stabilizer_share as stabilizer_share
from normjax.statistics import Moments as Moments
from normjax.statistics import Statistics as Statistics
from normjax.traits import diff as diff
from normjax.traits import properties as properties

_ON_FIRST_USE = {
    name: f"normjax.{name}"
    for name in (
        "analysis", "auditing", "diagnosis", "interop", "layers", "linen", "nnx",
        "report", "study", "verify",
    )
} | {"surgery": "normjax.layers.surgery"}  # fmt: skip
_FUNCTIONS = {
    "audit": "normjax.auditing",
    "diagnose": "normjax.diagnosis",
    "equivalent": "normjax.auditing",
}


def __getattr__(name: str) -> _Any:
    """Load what needs Flax or an extra when it is first used."""
    if name in _ON_FIRST_USE:
        return _importlib.import_module(_ON_FIRST_USE[name])
    if name in _FUNCTIONS:
        return getattr(_importlib.import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module 'normjax' has no attribute {name!r}")
