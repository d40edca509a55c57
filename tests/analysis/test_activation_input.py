"""Wrong input is one line; a stream never holds the whole; objects stay pickled."""

from __future__ import annotations

import pickle
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import normjax as nj
from normjax.analysis import AnalysisError, source
from normjax.analysis.source import open_source

pytestmark = pytest.mark.jax_defaults

X = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)


class Bomb:
    """Unpickled, it says so."""

    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of every kind that cannot be used."""
    folder = tmp_path_factory.mktemp("wrong")
    np.save(folder / "good.npy", X)
    np.save(folder / "ints.npy", X.astype(np.int32))
    np.save(folder / "complex.npy", X.astype(np.complex64))
    np.save(folder / "raw.npy", X.astype(np.float16).view("V2"))
    np.save(folder / "none.npy", X[:0])
    np.save(folder / "scalar.npy", X[0, 0])
    np.save(folder / "fields.npy", np.zeros(2, [("é", "f4")]))
    bomb = np.array([Bomb(), 1], object)
    (folder / "objects.npy").write_bytes(_object_file(bomb))
    np.savez(folder / "two.npz", first=X, second=X)
    np.savez(folder / "columns.npz", x=np.asfortranarray(X))
    with zipfile.ZipFile(folder / "no.npz", "w"):
        pass
    with zipfile.ZipFile(folder / "text.npz", "w") as archive:
        archive.writestr("x.npy", "hello")
    np.savez_compressed(folder / "whole.npz", x=np.resize(X, (5000, 6)))
    content = (folder / "whole.npz").read_bytes()
    (folder / "short.npz").write_bytes(content[: len(content) // 2])
    (folder / "damaged.npz").write_bytes(content[:600] + bytes(100) + content[700:])
    (folder / "short.npy").write_bytes((folder / "good.npy").read_bytes()[:-1])
    (folder / "stub.npy").write_bytes(b"\x93NUMPY")
    (folder / "empty.npy").write_bytes(b"")
    (folder / "notes.txt").write_text("not an array")
    pl.DataFrame({"a": [1.0], "b": [2]}).write_parquet(folder / "mixed.parquet")
    lists = pl.Series("x", [[1.0, 2.0]])
    pl.DataFrame({"x": lists}).write_parquet(folder / "lists.parquet")
    whole = pl.DataFrame({"x": pl.Series([[1, 2]], dtype=pl.Array(pl.Int64, 2))})
    whole.write_parquet(folder / "whole.parquet")
    pl.DataFrame({"x": X}).write_parquet(folder / "good.parquet")
    content = (folder / "good.parquet").read_bytes()
    (folder / "short.parquet").write_bytes(content[:-20])
    return folder


def _object_file(array: np.ndarray) -> bytes:
    """A .npy of objects, as NumPy writes it."""
    header = "{'descr': '|O', 'fortran_order': False, 'shape': (2,), }"
    text = header.ljust(117) + "\n"
    size = len(text).to_bytes(2, "little")
    return b"\x93NUMPY\x01\x00" + size + text.encode() + pickle.dumps(array)


WRONG = {
    "gone.npy": "gone.npy: there is no such file",
    ".": r".*: is a folder, expected a file",
    "ints.npy": "ints.npy has dtype int32, expected one of float16, bfloat16, float32,",
    "complex.npy": "complex.npy has dtype complex64, expected one of",
    "raw.npy": r"raw.npy has raw bytes \(dtype \|V2\); NumPy stores bfloat16 so: save",
    "none.npy": r"none.npy has shape \(0, 6\): there is nothing to analyze",
    "scalar.npy": r"scalar.npy has shape \(\): there is nothing",
    "fields.npy": "fields.npy has dtype .*, expected one of float16",
    "objects.npy": "objects.npy holds Python objects, which are never unpickled",
    "two.npz": "two.npz has 2 members, first, second: choose one, like .*two.npz:first",
    "two.npz:frist": "two.npz has no member 'frist'; did you mean 'first'?",
    "columns.npz": "columns.npz:x is stored column by column",
    "no.npz": "no.npz has no member",
    "text.npz": "text.npz:x has no readable header",
    "short.npz": "short.npz is cut short or damaged",
    "short.npy": "short.npy is cut short: 287 bytes of numbers, its header says 288",
    "stub.npy": "stub.npy has no readable header",
    "empty.npy": "empty.npy: expected a .npy, .npz or Parquet file, this is empty",
    "notes.txt": "notes.txt: expected a .npy, .npz or Parquet file, this is none of",
    "mixed.parquet": "mixed.parquet: column 'b' is Int64, expected columns of floats",
    "lists.parquet": "lists.parquet: column 'x' is List.*expected columns of floats",
    "whole.parquet": "whole.parquet holds Int64, expected floats",
    "short.parquet": "short.parquet cannot be read: ",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_array_of_floats(files: Path, name: str):
    with pytest.raises(AnalysisError, match=WRONG[name]) as caught:
        open_source(files / name)
    assert "\n" not in str(caught.value)


def test_damage_inside_is_found_while_reading(files: Path):
    opened = open_source(files / "damaged.npz")
    with pytest.raises(AnalysisError, match=r"damaged\.npz:x is cut short or damaged"):
        list(opened.read(1, 100))


FIT = {
    "no batch size": (nj.batch_norm(), {}, "couples the examples of a batch: give the"),
    "none": (nj.batch_norm(), {"batch_size": 0}, "batch size is 0, expected a whole"),
    "many": (nj.batch_norm(), {"batch_size": 13}, "batch size is 13, but array has 12"),
    "idle": (nj.layer_norm(), {"batch_size": 4}, "does not couple examples: leave it"),
    "names": (nj.layer_norm(), {"axis_names": ("b",)}, "axis names 'b' are 1, but arr"),
    "twice": (
        nj.group_norm(groups=2),
        {"axis_names": ("b", "b")},
        "'b' is no name, st",
    ),
    "column": (
        nj.layer_norm(),
        {"axis_names": ("share", "c")},
        "'share' is no name, st",
    ),
    "place": (
        nj.layer_norm(),
        {"axis_names": ("c", "t")},
        r"put 'c' on axis 0, '... \[",
    ),
    "rank": (nj.NormSpec("b t [c]"), {}, "has 3 dimensions, the tensor has 2"),
    "groups": (
        nj.group_norm(groups=4),
        {},
        "g=4 does not divide dimension 1 of size 6",
    ),
    "first": (
        nj.NormSpec("[a] c", example=None),
        {},
        "put the axis that counts the rows",
    ),
    "elsewhere": (
        nj.NormSpec("[t b]", example="b"),
        {"batch_size": 4},
        "examples of .* are not on the first axis",
    ),
    "blend": (
        nj.batch_norm(statistics="blend"),
        {"batch_size": 4},
        "a blend has no fixed offset",
    ),
    "ghosts": (nj.ghost_batch_norm(ghosts=5), {"batch_size": 6}, "g=5 does not divide"),
    "keep": (nj.layer_norm(), {"keep": -1}, "keep is -1, expected a whole number"),
}


@pytest.mark.parametrize("name", FIT)
def test_what_does_not_fit_the_layer(name: str):
    spec, options, message = FIT[name]
    with pytest.raises(AnalysisError, match=message):
        nj.analysis.analyze(X, spec, **options)


def test_batches_beyond_what_a_matrix_holds():
    x = np.zeros((8193, 1), np.float32)
    with pytest.raises(AnalysisError, match="batch size is 8193, expected 8192 at mo"):
        nj.analysis.analyze(x, nj.batch_norm(), batch_size=8193)


@pytest.mark.parametrize("kind", ["npy", "npz", "parquet"])
def test_a_stream_never_holds_the_whole(tmp_path: Path, kind: str, monkeypatch):
    """16 MB in blocks of 64 kB: what Python allocates at once stays below 2 MB."""
    monkeypatch.setattr(source, "SLICE_BYTES", 2**18)
    x = np.resize(X, (2**16, 64))
    path = tmp_path / f"x.{kind}"
    if kind == "npy":
        np.save(path, x)
    elif kind == "npz":
        np.savez(path, x=x)
    else:
        pl.DataFrame({"x": x}).write_parquet(path, row_group_size=1024)
    tracemalloc.start()
    try:
        rows = sum(len(block) for block in open_source(path).read(1, 256))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows == 2**16
    assert peak < 2**21 < x.nbytes / 7


def test_missing_numbers_of_parquet_are_not_finite(tmp_path: Path):
    pl.DataFrame({"a": [1.0, None, 3.0], "b": [2.0, 2.5, 1.0]}).write_parquet(
        tmp_path / "x.parquet"
    )
    found = nj.analysis.analyze(tmp_path / "x.parquet", nj.layer_norm())
    assert found.findings["not_finite"].found.index.tolist() == [[1]]
    assert found.groups == 3


def test_columns_of_two_dtypes_meet_in_the_wider(tmp_path: Path):
    narrow = pl.Series("a", [1.0, 2.0], dtype=pl.Float32)
    path = tmp_path / "x.parquet"
    pl.DataFrame([narrow, pl.Series("b", [0.1, 0.2])]).write_parquet(path)
    opened = open_source(path)
    assert opened.dtype == np.float64
    assert next(opened.read(1, 9)).tolist() == [[1.0, 0.1], [2.0, 0.2]]
