"""normjax analyze: a folder with a page and tables, or one line and status 2."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from commands import Call, Done, table
from commands import normjax as normjax
from pages import Page, loads_nothing

pytestmark = pytest.mark.jax_defaults


def batches() -> np.ndarray:
    x = np.random.default_rng(0).normal(1, 2, (19, 20)).astype(np.float32)
    x[5], x[:, 3], x[12, 6] = x[2], 4, np.nan
    return x


def test_a_batch_norm_has_a_page_and_tables(normjax: Call):
    np.save("act <b>.npy", batches())
    line = ["analyze", "act <b>.npy", "--spec", "batch_norm", "--batch-size", "8"]
    done = normjax(*line, "--set", "epsilon=1e-3", "--axis-names", "n c", "--out", "o")
    assert (done.code, done.err) == (0, "")
    rows = {row[0]: row for row in table(done.out)}
    assert rows["repeated"][1] == "1"
    assert rows["repeated"][-1] == "example 5, companion 2"
    assert rows["not_finite"][-1] == "batch 1, c 6"
    assert rows["stabilized"][1] == "none"
    assert rows["stabilizer share ρ"][-1] == "1 at batch 0, c 3"
    assert done.out.splitlines()[-1] == "page: o/report.html"
    assert {path.name for path in Path("o").iterdir()} == {
        "analysis.json",
        "examples.parquet",
        "groups.parquet",
        "influence.npy",
        "report.html",
    }
    assert pl.read_parquet("o/groups.parquet").height == 3 * 20
    assert pl.read_parquet("o/examples.parquet")["example"].to_list() == [*range(19)]
    assert np.load("o/influence.npy").shape == (8, 8)
    page = Page(Path("o/report.html"))
    assert loads_nothing(page)
    assert page.source.count("<svg") == 4
    assert "<b>" not in page.source
    for words in (
        "act <b>.npy",
        "epsilon=0.001",
        "40 groups in batches of 8",
        "Who moves whom",
        "The last batch, which has 3 examples",
        "example 5, companion 2: 0",
        "--batch-size 8",
        "1 of 16",
    ):
        assert words in page.text, words
    for flag in json.loads(Path("o/analysis.json").read_text("utf-8"))["findings"]:
        assert flag in page.words, flag
    again = normjax(*line, "--out", "o")
    message = "o holds an analysis already: --force replaces it, --out takes another "
    assert again == Done(2, "", message + "folder\n")


def test_a_layer_norm_without_anything_finite(normjax: Call):
    """No number at all still makes a page; the folder has the file's name."""
    np.save("x.npy", np.full((4, 3), np.nan, np.float32))
    done = normjax("analyze", "x.npy", "--spec", "... [c]", "--keep", "2")
    assert (done.code, done.err) == (0, "")
    page = Page(Path("x-analysis/report.html"))
    assert loads_nothing(page)
    assert page.source.count("<svg") == 2
    stored = json.loads(Path("x-analysis/analysis.json").read_text("utf-8"))
    assert stored["findings"]["not_finite"]["count"] == 4
    assert len(stored["findings"]["not_finite"]["worst"]) == 2
    assert "Who moves whom" not in page.words


WRONG = {
    "file": (["gone.npy", "--spec", "layer_norm"], "gone.npy: there is no such file"),
    "preset": (
        ["x.npy", "--spec", "layernorm"],
        "there is no preset 'layernorm'; did you mean 'layer_norm'?",
    ),
    "rank": (
        ["x.npy", "--spec", "b t [c]"],
        "x.npy: pattern 'b t [c]' has 3 dimensions, the tensor has 2: shape (4, 3)",
    ),
    "names": (
        ["x.npy", "--spec", "layer_norm", "--axis-names", "b t c"],
        "axis names 'b t c' are 3, but x.npy has 2 axes: shape (4, 3)",
    ),
    "no batch size": (
        ["x.npy", "--spec", "batch_norm"],
        "'[...] c' couples the examples of a batch: give the batch size (--batch-size) "
        "that the layer sees",
    ),
    "batch size": (
        ["x.npy", "--spec", "batch_norm", "--batch-size", "0"],
        "x.npy: batch size is 0, expected a whole number, 1 or more",
    ),
    "large batch": (
        ["x.npy", "--spec", "batch_norm", "--batch-size", "5"],
        "batch size is 5, but x.npy has 4 examples",
    ),
    "keep": (
        ["x.npy", "--spec", "layer_norm", "--keep", "-1"],
        "keep is -1, expected a whole number, 0 or more",
    ),
    "damaged": (["d.npz", "--spec", "layer_norm"], "d.npz:x is cut short or damaged: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line_and_leaves_nothing(normjax: Call, name: str):
    arguments, message = WRONG[name]
    np.save("x.npy", np.zeros((4, 3), np.float32))
    rng = np.random.default_rng(0)
    np.savez_compressed("d.npz", x=rng.normal(size=(900, 3)))
    content = Path("d.npz").read_bytes()
    Path("d.npz").write_bytes(content[:9000] + bytes(50) + content[9050:])
    before = set(Path().iterdir())
    done = normjax("analyze", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(message)
    assert done.err.count("\n") == 1
    assert set(Path().iterdir()) == before
