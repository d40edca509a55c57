"""Structured linear maps and queries on them; knows nothing of normalization."""

from normjax.operators.base import LinearOperator as LinearOperator
from normjax.operators.grouped import GroupedLowRank as GroupedLowRank
from normjax.operators.queries import eigenvalues as eigenvalues
from normjax.operators.queries import singular_values as singular_values
from normjax.operators.simple import Diagonal as Diagonal
from normjax.operators.simple import Product as Product
