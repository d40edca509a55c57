"""Numbers of an arm are arguments of its program; all else is its form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import pytest
from studies import TOY, write

import normjax as nj
from normjax import study
from normjax.study.cells import Cell, program, run_block
from normjax.study.plan import make_plan
from normjax.study.structure import form, leaves, put_leaves

pytestmark = pytest.mark.jax_defaults


class Inner(study.Settings):
    rate: Annotated[float, study.Leaf()] = 0.1
    width: int = 3


class Outer(study.Settings):
    inner: Inner = Inner()
    norm: Annotated[study.NormSetting | None, study.Leaf()] = None
    fixed: study.NormSetting | None = None
    decay: Annotated[float | None, study.Leaf] = None
    steps: int = 4


def outer(**values: Any) -> Outer:
    return Outer.model_validate(values)


def test_leaves_are_the_numbers_of_marked_fields():
    assert leaves(outer(fixed={"preset": "layer_norm"})) == {"inner.rate": 0.1}
    found = leaves(outer(decay=0.5, norm={"preset": "layer_norm", "epsilon": 1e-3}))
    assert found["decay"] == 0.5
    assert 1e-3 in found["norm"]
    assert leaves(None) == {}


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ({"inner": {"rate": 1.0}}, {}, True),
        ({"decay": 0.1}, {"decay": 0.2}, True),
        ({"decay": 0.1}, {"decay": None}, False),
        ({"steps": 5}, {}, False),
        ({"inner": {"width": 4}}, {}, False),
        (
            {"norm": {"preset": "layer_norm"}},
            {"norm": {"preset": "layer_norm", "epsilon": 0.1}},
            True,
        ),
        (
            {"norm": {"preset": "layer_norm"}},
            {"norm": {"preset": "layer_norm", "divide": "rms"}},
            False,
        ),
        ({"norm": {"preset": "layer_norm"}}, {}, False),
        (
            {"fixed": {"preset": "layer_norm"}},
            {"fixed": {"preset": "layer_norm", "epsilon": 0.1}},
            False,
        ),
    ],
)
def test_forms(first: dict[str, Any], second: dict[str, Any], shared: bool):
    assert (form(outer(**first)) == form(outer(**second))) is shared


def test_leaves_are_put_back_where_they_were():
    settings = outer(decay=0.5, norm={"preset": "batch_norm"}, inner={"rate": 2.0})
    assert put_leaves(settings, leaves(settings)) == settings
    doubled = jax.tree.map(lambda leaf: 2 * leaf, leaves(settings))
    other = put_leaves(settings, doubled)
    assert (other.decay, other.inner.rate) == (1.0, 4.0)
    assert settings.norm is not None
    assert other.norm.spec.epsilon == 2 * settings.norm.spec.epsilon
    assert other.norm.at == settings.norm.at
    assert settings.decay == 0.5


def measure(cell: Cell, key: Any) -> dict[str, Any]:
    """Something of a network: products, a normalization, a power."""
    settings = cell.settings
    x = jax.random.normal(key, (32, 8)) * settings.inner.rate
    y = nj.normalize(settings.norm.spec, x)
    return {"y": (y**3).mean(), "line": study.Curve(x[0], y[0]), "rate": 1.0}


def test_one_program_gives_what_a_program_of_each_arm_gives():
    """A constant may be folded where an argument is not: a few roundings, κ = O(1)."""
    traces = []

    def counted(cell: Cell, key: Any) -> dict[str, Any]:
        traces.append(cell.arm)
        return measure(cell, key)

    cells = [
        Cell(
            f"arm{i}",
            outer(
                inner={"rate": rate}, norm={"preset": "layer_norm", "epsilon": epsilon}
            ),
        )
        for i, (rate, epsilon) in enumerate([(1.0, 1e-5), (0.3, 1e-2), (3.0, 0.1)])
    ]
    assert len({form(cell.settings) for cell in cells}) == 1
    shared, seen = program(counted, cells[0]), []
    for cell in cells:
        found = run_block(counted, cell, (0, 1, 2), 4, shared)
        constant = jax.jit(lambda key, cell=cell: measure(cell, key))
        for seed in (0, 1, 2):
            alone = constant(jax.random.key(seed))
            ours = np.array([r.value for r in found if r.seed == seed], float)
            theirs = np.array([*alone["line"].values, alone["rate"], alone["y"]])
            np.testing.assert_allclose(ours, theirs, rtol=64 * 2.0**-24, atol=1e-6)
            seen.append(ours[0])
    assert traces == ["arm0"]
    assert len(set(seen)) == 9


def test_the_plan_counts_programs(tmp_path: Path):
    assert make_plan(write(tmp_path, TOY)).programs == 2
    grid = TOY + "grid: {shift: [1.0, 2.0, 4.0], form: [plain, extra]}\n"
    assert make_plan(write(tmp_path, grid)).programs == 2
    points = TOY + "grid: {points: [4, 5, 6]}\n"
    assert make_plan(write(tmp_path, points)).programs == 5


DEVICES = """
import json, sys, jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
from toy_experiment import Settings, measure
from normjax.study.cells import Cell, program, run_block
cell = Cell("a", Settings(shift=2.0))
compiled = program(measure, cell)
rows = [run_block(measure, cell, tuple(range(n)), n, compiled) for n in (1, 3, 8, 11)]
import jax.numpy as jnp
from normjax.study.structure import leaves
found = compiled(leaves(cell.settings), jnp.arange(16, dtype=jnp.uint32))
print(json.dumps([[tuple(map(repr, row)) for row in block] for block in rows]))
print(len(found["value"].sharding.device_set))
"""


def test_seeds_are_shared_out_over_devices():
    """Bit for bit what one device gives, whether or not devices divide the seeds."""
    found = {}
    for count in (1, 8):
        done = subprocess.run(
            [sys.executable, "-c", DEVICES, str(count)],
            capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        rows, devices = done.stdout.splitlines()
        assert int(devices) == count
        found[count] = json.loads(rows)
    assert found[1] == found[8]
    assert [len(block) // len(found[1][0]) for block in found[1]] == [1, 3, 8, 11]
