"""JAX's switches for every test: strict, 64-bit; those marked x32 also in 32-bit."""

from __future__ import annotations

import contextlib
import gc

import jax
import pytest

# Virtual devices, for what runs across devices; all else stays on the first one.
jax.config.update("jax_num_cpu_devices", 8)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if any(mark.name == "x32" for mark in metafunc.definition.iter_markers()):
        metafunc.parametrize(
            "jax_switches", [True, False], ids=["x64", "x32"], indirect=True
        )


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Compiled programs of a module serve no other one, and add up to gigabytes."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def jax_switches(request: pytest.FixtureRequest):
    """Strict promotion catches a mean that is broadcast along the wrong axis.

    A module marked ``jax_defaults`` runs with what users have.
    """
    if request.node.get_closest_marker("jax_defaults"):
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(getattr(request, "param", True)))
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        stack.enter_context(jax.numpy_rank_promotion("raise"))
        yield
