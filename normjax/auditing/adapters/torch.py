"""PyTorch's modules, on the CPU."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import numpy as np

from normjax.auditing.adapters.parameters import randomized
from normjax.auditing.target import Calls, Target, argument_names, one_array
from normjax.interop.arrays import array_of, tensor


def torch_target(module: Any, settings: dict[str, Any], seed: int | None) -> Target:
    """A copy of a PyTorch module; what it stores are its buffers."""
    torch: Any = import_module("torch")

    layer = copy.deepcopy(module).cpu()
    if settings["dtype"] == np.float64:
        layer = layer.double()
    given = {name: array_of(value) for name, value in layer.named_parameters()}
    parameters = randomized(given, seed)
    with torch.no_grad():
        for name, value in layer.named_parameters():
            value.copy_(tensor(parameters[name]))
    buffers = {name: value.clone() for name, value in layer.named_buffers()}
    takes = argument_names(layer.forward)

    def call(state: Any, x: Any, mask: Any, train: bool) -> Any:
        with torch.no_grad():
            for name, value in layer.named_buffers():
                value.copy_(state[name])
        layer.train(train)
        more = {} if mask is None else {"mask": torch.tensor(mask)}
        return one_array(layer(x, **more))

    def forward(
        state: Any, x: np.ndarray, mask: Any, train: bool
    ) -> tuple[np.ndarray, Any]:
        with torch.no_grad():
            y = array_of(call(state, tensor(x), mask, train))
        after = {name: value.clone() for name, value in layer.named_buffers()}
        return y, after or None

    def jacobian(state: Any, x: np.ndarray, mask: Any, train: bool) -> np.ndarray:
        def y_of(x: Any) -> Any:
            return call(state, x, mask, train)

        return array_of(torch.autograd.functional.jacobian(y_of, tensor(x)))

    return Target(
        name=type(module).__name__,
        how=Calls(forward, jacobian),
        parameters=parameters,
        state=buffers or None,
        accepts_mask="mask" in takes,
        **settings,
    )
