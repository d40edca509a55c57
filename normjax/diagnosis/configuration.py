"""Configuration: what the settings alone tell."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from normjax.diagnosis.record import Finding
from normjax.diagnosis.subject import BoundModel, Run, specs
from normjax.layers.parameters import norm_parameters

STEP = "configuration"
# Below one half the newest batch weighs more than all before it; 0.1 and 0.01 are what
# PyTorch calls momentum: the share of the new value, where Flax has that of the old.
SMALL_DECAY = 0.5


def configuration_findings(
    subject: BoundModel, train: Run, optimizer: Any, deployment_dtype: str
) -> list[Finding]:
    """Momentum, epsilon, and weight decay on norm parameters."""
    found = []
    for path, inputs in train.layers.items():
        for spec in specs(inputs):
            epsilon = float(spec.epsilon)
            if (
                spec.divide != "none"
                and float(jnp.asarray(epsilon, deployment_dtype)) == 0
            ):
                found.append(
                    Finding(
                        "warning", STEP, path, f"epsilon is 0 in {deployment_dtype}",
                        {"epsilon": epsilon},
                        "a group without variance gives 0/0, in value or gradient",
                        "an epsilon that this dtype has, such as 1e-5",
                    )
                )  # fmt: skip
            if spec.running is not None and float(spec.running.decay) < SMALL_DECAY:
                found.append(
                    Finding(
                        "warning", STEP, path, "momentum looks like PyTorch's",
                        {"share kept": float(spec.running.decay)},
                        "in Flax momentum is the share that is kept: stored statistics "
                        "follow the last batch alone",
                        "1 - momentum, as nj.running.decay(momentum, 'torch') says",
                    )
                )  # fmt: skip
    return found + ([] if optimizer is None else _decayed(subject, train, optimizer))


def _decayed(subject: BoundModel, train: Run, optimizer: Any) -> list[Finding]:
    """Norm parameters that the optimizer moves although no gradient asks for it."""
    if not any(inputs.layer.params for inputs in train.layers.values()):
        return []
    model, variables = subject.model, subject.variables
    own = isinstance(model, nnx.Module)
    params: Any = nnx.state(model, nnx.Param) if own else variables["params"]
    args = () if own else subject.args
    named = {} if own else {**subject.named, **subject.evaluate}
    mask = norm_parameters(model, variables, *args, **named).mask
    ones = jax.tree.map(jnp.ones_like, params)
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(still, optimizer.init(ones), ones)
    sizes = jax.tree.map(
        lambda norm, update: (
            float(jnp.max(jnp.abs(jnp.asarray(update)))) if norm else 0.0
        ),
        mask,
        jax.tree.map(lambda each: each[...], updates) if own else updates,
    )
    worst = float(np.max(jax.tree.leaves(sizes), initial=0))
    if worst == 0:
        return []
    flat = jax.tree_util.tree_leaves_with_path(sizes)
    moved = {
        "/".join(str(getattr(key, "key", key)) for key in keys[:-1])
        for keys, size in flat
        if size > 0
    }
    first = next((path for path in train.layers if path in moved), sorted(moved)[0])
    return [
        Finding(
            "warning", STEP, first, "weight decay reaches norm parameters",
            {
                "arrays": sum(size > 0 for size in jax.tree.leaves(sizes)),
                "share in one step": worst,
            },
            "scales are pulled to 0 where no gradient asks for it",
            "mask=nj.surgery.norm_parameters(model, variables, x).others",
        )
    ]  # fmt: skip
