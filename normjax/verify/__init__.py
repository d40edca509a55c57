"""The evidence: values and derivatives against oracles that share no code with them."""

from normjax.verify.checks import check_jacobian as check_jacobian
from normjax.verify.facts import check_facts as check_facts
from normjax.verify.invariance import Invariance as Invariance
from normjax.verify.invariance import invariance_markdown as invariance_markdown
from normjax.verify.invariance import invariances as invariances
from normjax.verify.laws import check_laws as check_laws
from normjax.verify.precision import PrecisionBound as PrecisionBound
from normjax.verify.precision import precision_bound as precision_bound
from normjax.verify.stored import against as against
from normjax.verify.stored import save as save
from normjax.verify.suite import check_spec as check_spec
from normjax.verify.tolerance import Check as Check
from normjax.verify.tolerance import normwise as normwise
from normjax.verify.tolerance import rounding_tolerance as rounding_tolerance
