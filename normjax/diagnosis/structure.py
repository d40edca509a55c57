"""Configuration of a whole model: what stands before and behind a norm."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax import nnx

from normjax import functional
from normjax.diagnosis.record import Finding
from normjax.diagnosis.subject import BoundModel, Run, stateful
from normjax.layers.watch import deliver, modules
from normjax.spec import Precision

STEP = "configuration"
# Dropout with rate p multiplies a second moment by 1/(1 − p): 1.5 is a third dropped.
DROPPED = float(np.log(1.5))
# A softmax of logits that differ by 50 gives all but e⁻⁵⁰ to one position: no gradient.
SATURATED = 50.0


def structure_findings(subject: BoundModel, train: Run) -> list[Finding]:
    """Dropout before a norm, axes out of order, norms in a row, bare attention."""
    return [
        *_axes(train),
        *_dropout(subject, train),
        *_in_a_row(train),
        *_attention(subject, train),
    ]


def _axes(train: Run) -> list[Finding]:
    found = []
    for path, module in train.modules.items():
        ndim = train.layers[path].calls[0].x.ndim
        for name in ("reduction_axes", "feature_axes", "axis"):
            axes = getattr(module, name, None)
            if not isinstance(axes, tuple | list):
                continue
            places = [axis % ndim for axis in axes]
            if places == sorted(set(places)):
                continue
            found.append(
                Finding(
                    "warning", STEP, path, "axes are not in order", {name: str(axes)},
                    "Flax neither sorts them nor takes one out that is there twice: "
                    "scale and bias may lie along other axes than they are shaped for",
                    f"{name}={tuple(sorted(set(places)))}",
                )
            )  # fmt: skip
    return found


def _dropout(subject: BoundModel, train: Run) -> list[Finding]:
    """Stored variances are those under dropout, and evaluation has none."""
    layers = stateful(train)
    if not layers:
        return []
    dropped = subject.run("train", dropout=True)
    for path, inputs in layers.items():
        if path not in dropped.layers or all(call.stored for call in inputs.calls):
            continue
        off, on = (
            _variance(each, run.layers[path].calls[0])
            for each, run in ((inputs, train), (inputs, dropped))
        )
        live = (off > 0) & (on > 0)
        ratio = float(np.mean(np.log(on[live] / off[live]))) if live.any() else 0.0
        if ratio >= DROPPED:
            return [
                Finding(
                    "warning", STEP, path, "dropout before stored statistics",
                    {"variance with dropout over without": float(np.exp(ratio))},
                    "the stored variance is that under dropout: in evaluation, without "
                    "it, the output is too small",
                    "dropout behind the norm, or a norm that stores nothing",
                )
            ]  # fmt: skip
    return []


def _variance(inputs: Any, call: Any) -> np.ndarray:
    spec = inputs.layer.spec.replace(precision=Precision(), axis_names=())
    found = functional.moments(spec, call.x.astype(jnp.float32), call.mask)
    return np.asarray(found.variance(), np.float64)


def _in_a_row(train: Run) -> list[Finding]:
    found = []
    for (first, before), (path, inputs) in itertools.pairwise(train.layers.items()):
        pairs = itertools.product(before.calls, inputs.calls)
        if any(_same(one.y, other.x) for one, other in pairs):
            found.append(
                Finding(
                    "warning", STEP, path, "two norms in a row", {"before": first},
                    "the second undoes the scale of the first, and its bias where that "
                    "is one for all",
                    "leave one of them out",
                )
            )  # fmt: skip
    return found


def _same(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool(jnp.array_equal(one, other))


def _attention(subject: BoundModel, train: Run) -> list[Finding]:
    """The attention with the largest logits among those without norms of q and k."""
    sizes = {
        path: max(map(_logit, pairs))
        for path, pairs in _queries_and_keys(subject).items()
        if pairs and not any(each.startswith(f"{path}/") for each in train.layers)
    }
    if not sizes:
        return []
    path = max(sizes, key=sizes.__getitem__)
    large = sizes[path] >= SATURATED
    return [
        Finding(
            "warning" if large else "note", STEP, path,
            "softmax attention without QK-norm",
            {"largest logit": sizes[path], "layers": len(sizes)},
            "the softmax is saturated: one position gets all, and no gradient passes"
            if large
            else "nothing bounds the logits while queries and keys grow",
            "normalize_qk=True, or nj.linen.QKNormAttention(nj.qk_norm())",
        )
    ]  # fmt: skip


def _logit(pair: Mapping[str, Any]) -> float:
    query, key = (np.asarray(pair[name], np.float64) for name in ("query", "key"))
    found = np.einsum("...qhd,...khd->...hqk", query, key)
    return float(np.abs(found).max() / query.shape[-1] ** 0.5)


def _queries_and_keys(subject: BoundModel) -> dict[str, list[dict[str, Any]]]:
    """Queries and keys of every call of Flax's attention layers, by path."""
    found: dict[str, list[dict[str, Any]]] = {}
    if isinstance(subject.model, nnx.Module):
        model = nnx.clone(subject.model)
        for path, module in modules(model).items():
            if isinstance(module, nnx.MultiHeadAttention):
                module.attention_fn = _recording(
                    module.attention_fn, found.setdefault(path, [])
                )
        if found:
            replace(subject, model=model).call("train", lambda call: call.run())
        return found

    def interceptor(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, parent = context.module, context.module.parent
        y = run(*args, **kwargs)
        own = isinstance(parent, nn.MultiHeadDotProductAttention)
        if own and module.name in ("query", "key") and isinstance(module, nn.Module):
            pairs = found.setdefault("/".join(parent.path), [])

            def receive(value: Any, name: str = module.name) -> None:
                if not pairs or name in pairs[-1]:
                    pairs.append({})
                pairs[-1][name] = value

            deliver(receive, y)
        return y

    with nn.intercept_methods(interceptor):
        subject.call("train", lambda call: call.run())
    return {
        path: [pair for pair in pairs if len(pair) == 2]
        for path, pairs in found.items()
    }


def _recording(attend: Any, pairs: list[dict[str, Any]]) -> Any:
    def call(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        deliver(pairs.append, {"query": query, "key": key})
        return attend(query, key, *args, **kwargs)

    return call
