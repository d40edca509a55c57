"""Two real processes, each with half of the batch, against one device."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import FACTOR, unit_roundoff

import normjax as nj

pytestmark = pytest.mark.jax_defaults

WORKER = """
import json, sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import normjax as nj

assert jax.process_count() == 2
data = np.load(sys.argv[3])
mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, P("i"))
x, bar, mask = (
    jax.make_array_from_callback(a.shape, split, lambda index, a=a: a[index])
    for a in (data["x"], data["bar"], data["mask"])
)
spec = nj.batch_norm(axis_names=("i",), masked_output="zero")

def step(x, bar, mask):
    y, pull = jax.vjp(lambda x: nj.normalize(spec, x, mask=mask), x)
    state = nj.running.init(spec, x.shape)
    state = nj.running.update(spec, state, nj.moments(spec, x, mask))
    return y, pull(bar)[0], state

specs = (P("i"), P("i"), P())
mapped = jax.shard_map(step, mesh=mesh, in_specs=P("i"), out_specs=specs)
y, gradient, state = jax.jit(mapped)(x, bar, mask)
found = multihost_utils.process_allgather((y, gradient), tiled=True)
state = [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(state)]
if jax.process_index() == 0:
    print(json.dumps([np.asarray(a).tolist() for a in (*found, *state)]))
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def test_two_processes_are_one_device(tmp_path: Path, port: int):
    """Value, gradient and running statistics, with uneven and offset shards."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(16, 5)) + 1e4).astype(np.float32)
    bar = rng.normal(size=x.shape).astype(np.float32)
    mask = np.ones((16, 1), bool)
    mask[9:14] = False
    np.savez(tmp_path / "data.npz", x=x, bar=bar, mask=mask)
    arguments = [sys.executable, "-c", WORKER, str(port)]
    workers = [
        subprocess.Popen(
            [*arguments, str(rank), str(tmp_path / "data.npz")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, err) in zip(workers, ends, strict=True):
        assert worker.returncode == 0, err
    found = map(np.asarray, json.loads(ends[0][0].splitlines()[-1]))

    spec = nj.batch_norm(masked_output="zero")
    y, pull = jax.vjp(lambda x: nj.normalize(spec, x, mask=jnp.asarray(mask)), x)
    state = nj.running.init(spec, x.shape)
    state = nj.running.update(
        spec, state, nj.moments(spec, jnp.asarray(x), jnp.asarray(mask))
    )
    expected = (y, pull(jnp.asarray(bar))[0], *jax.tree.leaves(state))
    bound = FACTOR * unit_roundoff(np.float32) * 16
    for a, b in zip(found, map(np.asarray, expected), strict=True):
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)
