"""One page that needs no network, says everything and quotes what users wrote."""

from __future__ import annotations

import csv
import html
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import Page, loads_nothing
from studies import EXACT, TOY, exact, refused, write

from normjax import report, study
from normjax.report import change, interval, number, p_value

pytestmark = pytest.mark.jax_defaults

CURVES = """\
import jax.numpy as jnp
from normjax import study
LABELS = {"coordinate_scale": "log", "height": "height of the curve"}
class Settings(study.Settings):
    x: float = 1.0
    points: int = 4
def measure(cell, key):
    at = jnp.arange(1.0, cell.settings.points + 1)
    value = cell.settings.x * at
    return {"height": (at, value), "height_predicted": (at, value + 0.25),
            "root": 3.0, "root_predicted": 3.5}
"""


Runner = Callable[..., Path]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    study.run(write(folder, TOY), out=folder / "run", overrides=["settings.poison=2"])
    report.write(folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def page(toy: Path) -> Page:
    return Page(toy / "report.html")


def test_the_page_loads_nothing(page: Page, tmp_path: Path):
    assert loads_nothing(page)
    for planted in ('<img src="x.png">', '<p onclick="x()">', "https://example.org"):
        path = write(tmp_path, page.source + planted, "planted.html")
        assert not loads_nothing(Page(path)), planted


def test_every_arm_hypothesis_and_verdict_is_there(page: Page):
    for word in ("baseline", "up", "again", "extra", "H1", "H2", "H3"):
        assert word in page.words, word
    for word in ("supported", "contradicted", "better", "equivalent"):
        assert word in page.words, word
    assert "up.value > baseline.value by at least 1" in page.words
    assert "extra.value = baseline.value within 0.1" in page.words
    assert "shift: 0.0 → 3.0" in page.words
    assert "form: plain → extra" in page.words
    assert "negative control" in page.words


def test_every_section_is_there(page: Page):
    for title in (
        "Verdicts",
        "What each change does to value of the toy",
        "Every seed",
        "Learning curves",
        "What differs",
        "Manipulation checks",
        "Diagnostics",
        "Provenance",
        "Computed and closed form",
    ):
        assert title in page.words, title
    assert "the shift is what the arm says" in page.words
    assert page.source.count("<svg") == 4  # forest, pairs, one curve, one closed form


def test_numbers_are_those_of_the_analysis(page: Page, toy: Path):
    results = study.load(toy)
    for verdict in study.analyze(results).verdicts:
        shown = interval(vars(verdict.paired))
        assert any(w.startswith(shown) for w in page.words)
    assert "(1 seeds lost)" in page.text
    assert results.plan["hypotheses_hash"] in page.words
    assert results.provenance["command"] in page.words


def test_what_users_write_stays_text(page: Page):
    assert 'Does <b>bold</b> & "loud" text stay text?' in page.words
    assert "&lt;b&gt;bold&lt;/b&gt; &amp;" in page.source
    assert "<b>bold" not in page.source


def test_a_question_cannot_carry_a_script(tmp_path: Path):
    text = exact(tmp_path).replace("q?", "'</style><script>x</script>'")
    study.run(write(tmp_path, text), out=tmp_path / "run")
    found = Page(report.write(tmp_path / "run"))
    assert "script" not in [tag for tag, _ in found.tags]
    assert "</style><script>x</script>" in found.words


def test_a_study_without_seeds_and_hypotheses(tmp_path: Path):
    text = exact(tmp_path) + "arms:\n  a: {set: {x: 2.0}}\n"
    study.run(write(tmp_path, text), out=tmp_path / "run")
    found = Page(report.write(tmp_path / "run"))
    assert "2 arms · exact, no seeds" in found.text
    assert "x: 1.0 → 2.0" in found.words
    for title in ("Verdicts", "Every seed", "Diagnostics", "Learning curves"):
        assert title not in found.words
    assert "<svg" not in found.source


def test_a_study_with_seeds_and_without_hypotheses(tmp_path: Path):
    text = TOY.split("outcomes:")[0]
    study.run(write(tmp_path, text), out=tmp_path / "run")
    found = Page(report.write(tmp_path / "run"))
    assert "4 arms · 6 seeds, paired" in found.text
    assert "Verdicts" not in found.words
    assert "Learning curves" in found.words


def test_a_study_in_which_every_seed_diverged(tmp_path: Path):
    text = TOY.replace("{shift: 0.0}", "{shift: 0.0, poison: -2}")
    study.run(write(tmp_path, text), out=tmp_path / "run")
    found = Page(report.write(tmp_path / "run"))
    assert "no interval (6 seeds lost)" in found.words
    assert "undecided" in found.words
    assert found.source.count("<svg") == 4


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed")
    text = exact(folder, CURVES)
    text += "arms:\n  steep: {set: {x: 2.0}}\n  long: {set: {points: 6}}\n"
    study.run(write(folder, text), out=folder / "run")
    report.write(folder / "run")
    return folder / "run"


def test_curves_with_a_closed_form_are_files_of_their_own(closed: Path):
    assert {p.name for p in (closed / "figures").iterdir()} == {
        "height.csv",
        "height.svg",
    }
    tree = ElementTree.fromstring((closed / "figures/height.svg").read_text("utf-8"))
    assert tree.tag == "{http://www.w3.org/2000/svg}svg"
    with (closed / "figures/height.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["coordinate"]) for row in table] == [1, 2, 3, 4, 5, 6]
    results = study.load(closed)
    for arm in ("baseline", "steep", "long"):
        for side, metric in (
            ("computed", "height"),
            ("closed_form", "height_predicted"),
        ):
            stored = results.curve(arm, metric)["value"].to_list()
            written = [row[f"{arm}_{side}"] for row in table]
            assert list(map(float, written[: len(stored)])) == stored
            assert set(written[len(stored) :]) <= {""}


def test_distances_from_the_closed_form_are_listed(closed: Path):
    found = Page(closed / "report.html")
    assert "Computed and closed form" in found.words
    assert "height of the curve" in found.words
    assert found.words.count("0.25") == 3
    assert found.words.count("0.5") == 3


def test_closed_forms_with_seeds_are_exported_by_seed(toy: Path):
    with (toy / "figures/line.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 6 * 3
    assert [(row["seed"], row["coordinate"]) for row in table[:4]] == [
        ("0", "1.0"),
        ("0", "2.0"),
        ("0", "3.0"),
        ("1", "1.0"),
    ]
    for row in table:
        assert float(row["up_computed"]) == 3 * float(row["coordinate"])


def test_only_finished_and_analyzed_runs_have_a_page(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("gone holds no finished run: plan.json is missing"):
        report.write("gone")
    study.run(write(tmp_path, exact(tmp_path, EXACT)), out="run")
    Path("run/analysis.json").unlink()
    with refused("run holds no finished run: analysis.json is missing"):
        report.write("run")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (1.0, "1"),
        (-0.51234, "−0.512"),
        (1234.0, "1.23·10³"),
        (3.2e-7, "3.2·10⁻⁷"),
        (-1e10, "−1·10¹⁰"),
        (math.nan, "nan"),
    ],
)
def test_numbers(value: float | None, text: str):
    assert number(value) == text


def test_numbers_with_other_digits():
    assert number(0.98765, 2) == "0.99"
    assert number(0.98765, 4) == "0.9877"


@pytest.mark.parametrize(
    ("mean", "low", "high", "text"),
    [
        (-0.518, -0.551, -0.486, "−0.518 [−0.551, −0.486]"),
        (0.5, 0.1, 0.9, "0.50 [0.10, 0.90]"),
        (12.0, 7.0, 17.0, "12 [7, 17]"),
        (1.0, 1.0, 1.0, "1.000 [1.000, 1.000]"),
        (1e-9, 0.5e-9, 2e-9, "1·10⁻⁹ [5·10⁻¹⁰, 2·10⁻⁹]"),
        (None, None, None, "no interval"),
        (2.0, None, None, "no interval"),
    ],
)
def test_intervals(mean, low, high, text: str):
    assert interval({"mean": mean, "low": low, "high": high}) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "< 0.0001"), (9.9e-5, "< 0.0001"), (0.00123, "0.0012"), (1.0, "1")],
)
def test_p_values(value: float, text: str):
    assert p_value(value) == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (True, False, "a.b: yes → no"),
        (None, 4, "a.b: none → 4"),
        ("std", "rms", "a.b: std → rms"),
        ({"x": [1]}, {"x": "y"}, "a.b: x: [1] → x: y"),
    ],
)
def test_changes(before, after, text: str):
    assert change({"name": "a.b", "before": before, "after": after}) == text


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_without_complaint(toy: Path, tmp_path: Path, width: int):
    """No message in the console, and nothing wider than the window."""
    source = (toy / "report.html").read_text("utf-8")
    probe = "parent.document.title = document.documentElement.scrollWidth"
    inner = source.replace("</body>", f"<script>{probe}</script></body>")
    # A frame, since windows of a headless browser have a least width.
    frame = f'<iframe width="{width}" height="900" srcdoc="{html.escape(inner)}">'
    page = write(tmp_path, f"<title>x</title>{frame}</iframe>", "frame.html")
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu",
            "--enable-logging=stderr", "--dump-dom", "--virtual-time-budget=2000",
            f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,900",
            page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>(\d+)</title>", done.stdout)
    assert title is not None
    assert int(title[1]) <= width
