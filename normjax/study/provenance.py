"""Where a run's numbers come from: versions, device, commit, data, command line."""

from __future__ import annotations

import datetime
import hashlib
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("normjax", "jax", "jaxlib", "flax", "optax", "numpy", "scipy", "polars")


def collect(
    config: str, data: Mapping[str, str], arguments: Sequence[str]
) -> dict[str, Any]:
    """Facts that somebody needs to repeat a run.

    Args:
        config: path of the config.
        data: fingerprints of the data sets.
        arguments: options of ``normjax run`` that repeat it.

    Returns:
        Plain data; a commit of None means that the config is in no git checkout.
    """
    device = jax.devices()[0]
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["normjax", "run", config, *arguments]),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "devices": jax.local_device_count(),
        "x64": bool(_switch("jax_enable_x64")),
        "matmul_precision": str(_switch("jax_default_matmul_precision")),
        "random_generator": str(_switch("jax_default_prng_impl")),
        "data": dict(data),
        **_commit(Path(config).resolve().parent),
    }


def _switch(name: str) -> Any:
    return getattr(jax.config, name)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> dict[str, str | None]:
    """The commit of the config's checkout, and a hash of what differs from it."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return {"commit": None, "uncommitted": None}
    changes = _git(folder, "diff", "HEAD") or ""
    digest = hashlib.sha256(changes.encode()).hexdigest()[:16] if changes else None
    return {"commit": head.strip(), "uncommitted": digest}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
