"""A learned mixture of specs: each member's statistics, mixed by two softmaxes.

    p = softmax(mean_logits)      q = softmax(variance_logits)
    x̂ = (x − Σ pₖ mₖ) / S(Σ qₖ σ²ₖ)      y = scale · x̂ + bias

With instance, layer and batch norm as members this is switchable normalization. Logits
with leading axes route each example (or position) by itself. There is no arithmetic of
its own here: a member's ``moments`` are mixed and given to ``normalize``.

Source: Luo, Ren, Peng, Zhang, Li, "Differentiable Learning-to-Normalize via Switchable
Normalization" (2018), arXiv:1806.10779.
"""

from normjax.mixture.apply import init as init
from normjax.mixture.apply import normalize as normalize
from normjax.mixture.jacobian import input_jacobian as input_jacobian
from normjax.mixture.members import Mixture as Mixture
from normjax.mixture.members import switchable_norm as switchable_norm
from normjax.mixture.members import used_logits as used_logits
