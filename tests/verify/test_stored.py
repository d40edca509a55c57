"""Stored numbers: equal here, and a number that is changed is found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import normjax as nj
from normjax.verify import against, save
from normjax.verify.stored import DTYPES, RESULTS

pytestmark = pytest.mark.jax_defaults
SPECS = [
    nj.layer_norm(),
    nj.batch_norm(statistics="blend", mean_weight=0.4, variance_weight=0.7),
    nj.batch_renorm(ddof=1),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored") / "here.npz"
    assert save(path, SPECS) == len(SPECS) * len(DTYPES) * len(RESULTS) * 2
    return path


def edited(file: Path, out: Path, change) -> Path:
    with np.load(file) as stored:
        arrays: dict[str, Any] = dict(stored)
    change(arrays)
    np.savez(out, **arrays)
    return out


def test_the_same_machine_agrees(file: Path):
    checks = against(file)
    assert len(checks) == len(SPECS) * len(DTYPES) * len(RESULTS) * 2
    assert all(check.ok for check in checks)
    assert {check.name for check in checks} == {f"{name} = stored" for name in RESULTS}


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_changed_number_is_found(file: Path, tmp_path: Path, dtype: str, result: str):
    """A little more than the tolerance, in one entry of one result."""
    key = f"0/{dtype}/normal/{result}"
    limit = 3 * {"float64": 1e-13, "float32": 1e-4, "bfloat16": 0.02}[dtype]

    def change(arrays):
        for name in [name for name in arrays if "/" in name]:
            if not name.startswith(f"0/{dtype}/normal"):
                del arrays[name]
        values = arrays[key].copy()
        values.flat[0] += limit * np.linalg.norm(values)
        arrays[key] = values

    checks = against(edited(file, tmp_path / "changed.npz", change))
    failed = [check for check in checks if not check.ok]
    assert len(checks) == len(RESULTS)
    assert [check.name for check in failed] == [f"{result} = stored"]
    assert limit < 30 * failed[0].tolerance  # and not because it is so large


def test_the_specs_travel_with_the_numbers(file: Path, tmp_path: Path):
    """Another epsilon placement in the file is another layer, and is found."""

    def change(arrays):
        for name in [name for name in arrays if name.startswith(("1", "2"))]:
            del arrays[name]
        about = json.loads(str(arrays["about"]))
        about["specs"][0]["epsilon_placement"] = "outside_sqrt"
        about["specs"][0]["epsilon"] = 0.1
        arrays["about"] = np.array(json.dumps(about))

    checks = against(edited(file, tmp_path / "other.npz", change))
    assert not all(check.ok for check in checks)


@pytest.mark.parametrize("kind", ["missing", "text", "other archive", "format"])
def test_what_is_no_such_file_is_one_line(file: Path, tmp_path: Path, kind: str):
    path = tmp_path / "wrong.npz"
    if kind == "text":
        path.write_text("no archive", encoding="utf-8")
    if kind == "other archive":
        np.savez(path, x=np.ones(3))
    if kind == "format":

        def change(arrays):
            about = json.loads(str(arrays["about"])) | {"format": 0}
            arrays["about"] = np.array(json.dumps(about))

        edited(file, path, change)
    messages = {"format": "has format 0, expected 1", "missing": "is no such file"}
    message = messages.get(kind, "is no file of")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        against(path)
    assert "\n" not in str(caught.value)
