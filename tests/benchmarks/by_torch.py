"""PyTorch's layers on the CPU, for arrays whose channels come last."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import numpy as np


class Torch:
    """One layer with its defaults; parameters in float32, as under autocast."""

    def __init__(self, kind: str, shape: tuple[int, ...]):
        """Build it, or raise ImportError."""
        self.torch: Any = import_module("torch")
        nn, size = self.torch.nn, shape[-1]
        self.make = {
            "layer": lambda: nn.LayerNorm(size),
            "rms": lambda: nn.RMSNorm(size),
            "batch": lambda: nn.BatchNorm1d(size),
            "group": lambda: nn.GroupNorm(32, size),
        }[kind]
        self.first = kind in ("batch", "group") and len(shape) > 2

    def tensor(self, array: Any, dtype: str) -> Any:
        array = np.moveaxis(array, -1, 1).copy() if self.first else np.array(array)
        return self.torch.from_numpy(array).to(getattr(self.torch, dtype))

    def run(self, x: Any, bar: Any, dtype: str) -> tuple[Any, Any, float]:
        """y, the gradient by x, and the bytes that are kept, in units of x's.

        Args:
            x: float32 array of what the dtype holds.
            bar: the gradient by y, likewise.
            dtype: of the call.
        """
        layer, given = self.make(), self.tensor(x, dtype).requires_grad_()
        inputs = {given.data_ptr(), *(p.data_ptr() for p in layer.parameters())}
        held: dict[int, int] = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if tensor.data_ptr() not in inputs:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        hooks = self.torch.autograd.graph.saved_tensors_hooks
        with warnings.catch_warnings(), hooks(pack, lambda tensor: tensor):
            warnings.simplefilter("ignore")  # that it cannot fuse two dtypes
            y = layer(given)
        y.backward(self.tensor(bar, dtype).to(y.dtype))
        share = sum(held.values()) / (given.numel() * given.element_size())
        return self.array(y), self.array(given.grad), share

    def array(self, tensor: Any) -> np.ndarray:
        found = tensor.detach().to(self.torch.float32).numpy()
        return np.moveaxis(found, 1, -1) if self.first else found

    def stored(self, x: Any) -> tuple[Any, Any]:
        """Mean and variance that a fresh batch norm stores after x."""
        layer = self.make()
        layer(self.tensor(np.asarray(x, np.float32), x.dtype.name))
        return layer.running_mean.numpy(), layer.running_var.numpy()
