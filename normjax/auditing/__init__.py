"""What a normalization-like callable does, inferred from its values alone."""

from normjax.auditing.adapters import adapt as adapt
from normjax.auditing.adapters import adapt_step as adapt_step
from normjax.auditing.adapters import resolve_target as resolve_target
from normjax.auditing.comparing import Equivalence as Equivalence
from normjax.auditing.comparing import Gap as Gap
from normjax.auditing.comparing import equivalent as equivalent
from normjax.auditing.formula import Formula as Formula
from normjax.auditing.probing import checked_shape as checked_shape
from normjax.auditing.probing import float_dtype as float_dtype
from normjax.auditing.procedure import audit as audit
from normjax.auditing.record import Audit as Audit
from normjax.auditing.record import Finding as Finding
from normjax.auditing.target import CallError as CallError
from normjax.auditing.target import Target as Target
from normjax.auditing.target import TargetError as TargetError
