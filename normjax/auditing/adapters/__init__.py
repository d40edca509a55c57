"""Layers of any library as targets of an audit."""

from normjax.auditing.adapters.libraries import adapt as adapt
from normjax.auditing.adapters.libraries import adapt_step as adapt_step
from normjax.auditing.adapters.resolve import resolve_target as resolve_target
