"""How long a diagnosis takes: ``python -m benchmarks.diagnosis``, run in ``tests``.

A transformer of 12 blocks and 25 norms on 8 sequences of 64 positions. The second
diagnosis is in the same process: programs are compiled in the first alone.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

import normjax as nj


def main(depth: int = 12, width: int = 128, positions: int = 64) -> None:
    """Print seconds, and how much was found."""
    model = nj.layers.examples.Encoder(
        features=10, width=width, depth=depth, num_heads=4
    )
    x = np.random.default_rng(0).normal(size=(8, positions, 32)).astype(np.float32)
    batch = {"x": x, "mask": np.ones((8, positions), bool)}
    variables = jax.jit(model.init)(jax.random.key(0), x, jnp.asarray(batch["mask"]))
    for name in ("first", "second"):
        start = time.perf_counter()
        found = nj.diagnose(model, variables, batch, mask="mask")
        taken = time.perf_counter() - start
        count = len(found.findings)
        print(f"{name}: {taken:.1f} s, {len(found.layers)} norms, {count} findings")


if __name__ == "__main__":
    main()
