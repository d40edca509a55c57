"""Structured linear maps and queries on them; knows nothing of normalization."""

from normjax.operators.base import LinearOperator as LinearOperator
from normjax.operators.base import Product as Product
from normjax.operators.base import Sum as Sum
from normjax.operators.grouped import GroupedLowRank as GroupedLowRank
from normjax.operators.queries import eigenvalues as eigenvalues
from normjax.operators.queries import singular_values as singular_values
from normjax.operators.scalars import condition as condition
from normjax.operators.scalars import determinant as determinant
from normjax.operators.scalars import diagonal as diagonal
from normjax.operators.scalars import null_space as null_space
from normjax.operators.scalars import rank as rank
from normjax.operators.scalars import slogdet as slogdet
from normjax.operators.scalars import trace as trace
from normjax.operators.simple import Broadcast as Broadcast
from normjax.operators.simple import Dense as Dense
from normjax.operators.simple import Diagonal as Diagonal
from normjax.operators.simple import Reduction as Reduction
