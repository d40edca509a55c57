"""Every field case that is about the core has a test that carries its number.

FIELD_CASES.md names for each entry the capability it exercises. Those with spec,
precision, stats, masked or grad are tested here, those of layers where the core gives
the number. Elsewhere, or with the part of the package that they are about:

    N51                  groups of replicas: with the distributed layers (N49: here)
    N62 N77 N78 N79 N87  porting, folding and export: with interop
    N66 N69 N90          wiring and further families: with layers
    N82                  numbers in YAML: tests/study/test_document.py
    N81 N83 N84          weight decay, dropout, batch invariance: with studies and audit
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kinds import ALIKE, ONE_EACH

import normjax as nj

# Cap names spec, precision, stats, masked or grad.
REQUIRED = [
    *(1, 2, 4, 5, 6, 8, 9, 10, 13, 14, 16, 18, 19),  # algorithms and dtypes
    *(21, 22, 23, 24, 26, 27, 28, 30, 32, 33, 34, 36, 37, 38, 39, 41, 42),  # modes
    *(43, 44, 45),  # masks
    *(48, 52),  # several places
    *(54, 55, 57, 61, 64),  # axes
    *(68, 71, 72, 73, 74),  # derivatives
    *(75, 80, 86, 89),  # epsilon, checkpoints, resets
]
ALSO = [49, 56, 63, 65]


def found() -> dict[int, list[ast.FunctionDef]]:
    """The tests of this folder by the numbers in their names."""
    numbers: dict[int, list[ast.FunctionDef]] = {}
    for path in sorted(Path(__file__).parent.glob("test_field_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_n"):
                carried = re.match(r"test((?:_n\d\d)+)_", node.name)
                assert carried, f"{path.name}: {node.name} has no number of two digits"
                for number in re.findall(r"\d\d", carried[1]):
                    numbers.setdefault(int(number), []).append(node)
    return numbers


def test_every_entry_about_the_core_has_a_test():
    assert sorted(found()) == sorted([*REQUIRED, *ALSO])
    assert len(set(REQUIRED)) == len(REQUIRED) == 49


def test_every_docstring_carries_the_numbers():
    for number, tests in found().items():
        for test in tests:
            text = ast.get_docstring(test) or ""
            assert re.search(rf"\bN{number:02}b?\b", text), test.name


def test_every_preset_is_in_the_family():
    """What "every preset" means in these tests."""
    assert {*ONE_EACH, *ALIKE} == set(nj.presets.PRESETS)
