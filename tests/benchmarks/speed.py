"""Speed and memory, as ratios in one process: ``make bench``.

Prints every number, and with ``--readme`` writes the tables between the markers of the
README. Times vary with the machine and its neighbours, so no test asserts one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from importlib import metadata

import jax
from benchmarks import layers, spectra
from benchmarks.readme import put, table

BEGIN, END = "<!-- speed and memory: make bench -->", "<!-- end of speed and memory -->"
LIBRARIES = ("jax", "flax", "equinox", "dm-haiku", "keras")


def machine() -> str:
    """Device, libraries, allocator and load: what the numbers depend on."""
    device = jax.devices()[0]
    versions = []
    for name in LIBRARIES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    preloaded = os.environ.get("LD_PRELOAD") or "the C library's malloc"
    return (
        f"{device.device_kind} with {os.cpu_count()} cores, {', '.join(versions)}; "
        f"memory by {preloaded}; load average {os.getloadavg()[0]:.1f} at the start"
    )


def sections(smoke: bool) -> Iterator[str]:
    """The block of the README, paragraph by paragraph."""
    rounds, few = (2, 2) if smoke else (31, 15)
    yield machine() + "."
    workloads = layers.SMALL if smoke else layers.WORKLOADS
    found = []
    for row in layers.rows(workloads, rounds):
        found.append(row)
        for what, against in (("f+b", row.both), ("forward", row.forward)):
            each = ", ".join(f"{k} {v:.2f}" for k, v in against.all.items())
            print(f"{row.workload}: {what} over {each}", flush=True)
    yield table(layers.HEADER, map(layers.cells, found))
    settings = spectra.SMALL if smoke else spectra.SETTINGS
    yield table(spectra.HEADER, map(spectra.cells, spectra.rows(settings, few)))
    sizes = [8, 16] if smoke else [2**k for k in range(10, 21, 2)]
    slopes = [
        f"{name} n^{slope:.2f} (time for each entry, last over first: {last:.2f})"
        for name, (slope, last) in spectra.growth(sizes, few).items()
    ]
    yield (
        f"Growth of the time of 64 groups with their size n, {sizes[0]} to "
        f"{sizes[-1]}: {'; '.join(slopes)}."
    )


def main() -> None:
    """Print the block, or put it into the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="the smallest form")
    parser.add_argument("--readme", action="store_true", help="write the README")
    chosen = parser.parse_args()
    block = "\n\n".join(sections(chosen.smoke))
    if chosen.readme:
        put(block, BEGIN, END)
    print(block)


if __name__ == "__main__":
    main()
