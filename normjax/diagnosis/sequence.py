"""The fixed sequence of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normjax.diagnosis.axes import axes_findings
from normjax.diagnosis.binding import subject
from normjax.diagnosis.companions import coupling_findings, padding_mask
from normjax.diagnosis.configuration import configuration_findings
from normjax.diagnosis.denominators import denominator_findings
from normjax.diagnosis.derivative import derivative_findings
from normjax.diagnosis.modes import mode_findings
from normjax.diagnosis.precision import precision_findings
from normjax.diagnosis.record import Diagnosis
from normjax.diagnosis.structure import structure_findings
from normjax.records import check_choice
from normjax.spec import FLOATS


def diagnose(
    model: Any,
    variables: Any = None,
    batch: Any = None,
    *,
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
    mask: Any = None,
    optimizer: Any = None,
    deployment_dtype: str = "bfloat16",
) -> Diagnosis:
    """What is wrong with the norm layers of a model, measured on one batch.

    In a fixed sequence: axes (every layer on small integers against the formula that it
    declares, by hand), training against evaluation (who stores, updates and uses which
    statistics, and how far stored ones are from the batch's), denominators (groups
    without variance or with too few elements, ε), derivative (closed-form gains, each
    layer's derivative against finite differences, gradients by every layer), precision
    (every layer and the whole model against float64, as it is and in the deployment
    dtype), coupling
    (other companions, repeated examples, other numbers and NaN under ``mask``),
    configuration (order of axes, dropout before stored statistics, two norms in a row,
    attention logits without QK-norm, momentum, epsilon, weight decay). The model and
    its variables stay as they are, and dropout is off.

    Args:
        model: a linen or an nnx module, with norm layers of Flax or ours.
        variables: of a linen model; None: ``init`` makes them. None for nnx.
        batch: the input, a tuple of positional arguments, or a dict by the names of the
            arguments of the model's call; examples on the leading axis.
        train: arguments that ask for training; None: found by their names in the
            signature (``train``, ``deterministic``, ``use_running_average``, ...). Of
            nnx models ``train()`` and ``eval()`` are called in any case.
        evaluate: arguments that ask for evaluation.
        mask: of the padding: True where the first array of the batch is valid, over its
            leading axes, or the name of the argument that says so.
        optimizer: an optax transformation: does its decay reach norm parameters?
        deployment_dtype: parameters and batch are tried in it too.

    Returns:
        A ``Diagnosis``: findings with severity, layer, numbers, reason and remedy.

    Raises:
        ValueError: if the model is none, the batch does not fit its call, or it calls
            no norm layer.

    Example:
        >>> import flax.linen as nn, jax.numpy as jnp, normjax as nj
        >>> x = 1e4 + jnp.arange(32.0).reshape(8, 4)
        >>> found = nj.diagnose(nn.LayerNorm(), None, x)
        >>> [(each.severity, each.step, each.what) for each in found.findings]
        [('error', 'precision', 'the result is wrong in float32')]
    """
    check_choice("deployment_dtype", deployment_dtype, FLOATS)
    found = subject(model, variables, batch, train=train, evaluate=evaluate)
    padding = padding_mask(found, mask)
    training, evaluation = found.run("train"), found.run("evaluate")
    findings = [
        *axes_findings(found, training),
        *mode_findings(found, training, evaluation),
        *denominator_findings(training),
        *derivative_findings(found, training),
        *precision_findings(found, training, deployment_dtype),
        *coupling_findings(found, training, evaluation, padding),
        *structure_findings(found, training),
        *configuration_findings(found, training, optimizer, deployment_dtype),
    ]
    arrays = {**dict(zip(found.names, found.args, strict=False)), **found.named}
    return Diagnosis(
        type(model).__name__,
        {path: repr(each.layer.spec) for path, each in training.layers.items()},
        {
            name: f"{each.dtype} {tuple(each.shape)}"
            for name, each in arrays.items()
            if hasattr(each, "shape")
        },
        deployment_dtype,
        tuple(findings),
    )
