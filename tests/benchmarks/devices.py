"""What synchronized statistics cost: ``make bench``.

Batch norm, value and gradient, under ``jax.shard_map`` on 8 virtual devices: with
statistics across devices over without, and Flax's synchronized layer over the same.
Virtual devices share the cores of one machine, so that a collective costs a barrier and
no transfer: the ratio says what the program adds, not what a network would.
"""

from __future__ import annotations

import re
from functools import partial
from math import prod

import jax

jax.config.update("jax_num_cpu_devices", 8)

import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from benchmarks.timing import ratios  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import normjax as nj  # noqa: E402

SPLIT, WHOLE = PartitionSpec("i"), PartitionSpec()


def programs(shape: tuple[int, int]):
    """Value and gradient, ready to call, by name."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, SPLIT)
    x = jax.device_put(jax.random.normal(jax.random.key(0), shape), split)
    apart = nj.batch_norm(running=None)
    params = nj.init(apart, shape)
    flax = nn.BatchNorm(use_running_average=False, axis_name="i")
    single = nn.BatchNorm(use_running_average=False)
    variables = single.init(jax.random.key(0), jnp.ones((2, shape[1])))

    def by_flax(params, x):
        tree = {**variables, "params": params}
        return flax.apply(tree, x, mutable=["batch_stats"])[0]

    layers = {
        "unsynchronized": lambda p, x: nj.normalize(apart, x, p),
        "synchronized": partial(
            lambda spec, p, x: nj.normalize(spec, x, p),
            apart.replace(axis_names=("i",)),
        ),
        "flax, synchronized": by_flax,
    }

    def both(layer, params, x):
        y, pull = jax.vjp(partial(layer, params), x)
        return y, pull(y)[0]

    found = {}
    for name, layer in layers.items():
        mapped = jax.shard_map(
            partial(both, layer),
            mesh=mesh,
            in_specs=(WHOLE, SPLIT),
            out_specs=(SPLIT, SPLIT),
        )
        found[name] = partial(jax.jit(mapped), params, x)
    return found


COLLECTIVE = re.compile(
    r"= (\(?f32[^=]*?) "
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
)


def moved(run) -> str:
    """Collectives of a compiled program, and bytes that they give each device."""
    compiled = run.func.lower(*run.args).compile()
    found = COLLECTIVE.findall(compiled.as_text())
    shapes = [shape for text, _ in found for shape in re.findall(r"f32\[(.*?)\]", text)]
    sizes = [4 * prod(int(n) for n in shape.split(",") if n) for shape in shapes]
    kinds = ", ".join(sorted({kind for _, kind in found}))
    return f"{len(found)} collectives ({kinds}), {sum(sizes)} bytes"


def by_xla(shape: tuple[int, int]):
    """The same layer without a named axis, on a batch that ``jax.jit`` finds split."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), shape)
    x = jax.device_put(x, NamedSharding(mesh, SPLIT))
    spec = nj.batch_norm(running=None)

    @jax.jit
    def both(x):
        y, pull = jax.vjp(partial(nj.normalize, spec), x)
        return y, pull(y)[0]

    return partial(both, x)


def main() -> None:
    """Print what is moved, and one line for each size."""
    shape = (8192, 256)
    for name, run in (*programs(shape).items(), ("plain jit", by_xla(shape))):
        print(f"{shape}: {name}: {moved(run)}")
    print("batch norm on 8 virtual devices, value and gradient, over unsynchronized")
    for shape in ((1024, 256), (8192, 256), (65536, 64)):
        found = ratios(programs(shape), "unsynchronized")
        for name in ("synchronized", "flax, synchronized"):
            low, middle, high = found[name]
            print(f"{shape}: {name} {middle:.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
