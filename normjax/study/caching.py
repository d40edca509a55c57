"""Compiled programs that the next process finds on the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


def default_folder() -> Path:
    """Where ``normjax run`` keeps compiled programs if nothing else is said.

    ``JAX_COMPILATION_CACHE_DIR``, else ``normjax/programs`` in the user's folder of
    caches (``XDG_CACHE_HOME``, else ``~/.cache``).
    """
    said = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if said:
        return Path(said)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "normjax" / "programs"


@contextlib.contextmanager
def kept_programs(folder: Path | None) -> Iterator[None]:
    """Keep every compiled program in a folder, and take it from there.

    JAX alone keeps only what took longer than a second to compile.

    Args:
        folder: None changes nothing.
    """
    if folder is None:
        yield
        return
    wanted: dict[str, Any] = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    try:
        _configure(wanted)
        yield
    finally:
        _configure(before)


def _configure(values: dict[str, Any]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # the folder is read once, at the first program
