"""The house: who may import whom, how large things are, where public names live."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import normjax

pytestmark = pytest.mark.jax_defaults

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("normjax/**/*.py"), *ROOT.glob("experiments/*.py")])
LONGEST_FILE = 350
LONGEST_FUNCTION = 60

# A module imports only from rows above its own, or from its own package.
ROWS = (
    "pattern",
    "layout",
    "records",
    "spec",
    "presets",
    "traits",
    "information",
    "statistics",
    "operators",
    "program",
    "shared",
    "standardize",
    "factors",
    "arguments",
    "functional",
    "jacobian",
    "spectra",
    "coupling",
    "running",
    "mixture",
    "family",
    "interop",
    "stateful",
    "flax_rules",
    "linen nnx",
    "layers",
    "verify",
    "auditing",
    "analysis",
    "diagnosis",
    "study",
    "report",
    "terminal",
    "typed",
    "cli",
    "experiments",
)
# The same names in linen and in nnx.
FLAX_LAYERS = {
    "adaptive": "MixtureNorm ModulatedNorm",
    "attention": "QKNormAttention",
    "drop_in": "BatchNorm GroupNorm InstanceNorm LayerNorm RMSNorm",
    "kernels": "WeightStandardized",
    "norm": "Norm apply",
}
WIRED_LAYERS = "Residual SelfAttention TransformerBlock"
STANDARD_LIBRARY_ONLY = {"pattern", "layout"}
EVERYWHERE = {"jax", "numpy"}
THIRD_PARTY = {
    "flax": {
        "linen",
        "nnx",
        "layers",
        "interop",
        "auditing",
        "diagnosis",
        "study",
        "experiments",
    },
    "optax": {"study", "experiments"},
    "chex": {"verify"},
    "scipy": {"verify", "auditing", "study"},
    "mpmath": {"verify"},
    "pydantic": {"study"},
    "pydantic_core": {"study"},
    "ruamel": {"study"},
    "polars": {"analysis", "study", "report", "cli"},
    "matplotlib": {"report"},
    "jinja2": {"report"},
    "typer": {"cli"},
    "rich": {"cli", "terminal", "study"},
    "mlxtend": {"study.tasks"},
    "sklearn": {"study.tasks"},
    "onnx": {"interop.onnx"},
    "ray": {"study.clusters"},
    "keras": {"experiments.precision_offset"},
    "torch": {"experiments.precision_offset"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def area(name: str) -> str:
    """The row's word for a module: normjax.study.plan and normjax.study are "study"."""
    parts = name.split(".")
    return parts[1] if parts[0] == "normjax" and len(parts) > 1 else parts[0]


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            whole = base == "normjax" or (ROOT / base.replace(".", "/")).is_dir()
            found += [f"{base}.{a.name}" if whole else base for a in node.names]
    return found


def row(word: str) -> int:
    return next(i for i, names in enumerate(ROWS) if word in names.split())


def ids(path: Path) -> str:
    return module_name(path)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_imports_point_up_and_third_parties_stay_in_their_place(path: Path):
    name = module_name(path)
    here = area(name)
    for imported in imports(path):
        top = imported.split(".")[0]
        if top in sys.stdlib_module_names or name == "normjax":
            continue
        if top == "normjax":
            there = area(imported)
            inside = there == here or (here == "experiments" and there == "normjax")
            lazy = (here, there) == ("study", "normjax")
            known = any(there in names.split() for names in ROWS)
            if known:
                assert inside or row(there) < row(here), f"{name} imports {imported}"
            else:  # `import normjax as nj` is for what stands outside the package
                assert here in ("experiments",) or lazy, f"{name} imports {imported}"
        elif here in STANDARD_LIBRARY_ONLY:
            pytest.fail(f"{name} imports {imported}, but is plain Python")
        elif top not in EVERYWHERE:
            allowed = THIRD_PARTY.get(top, set())
            short = name.removeprefix("normjax.")
            assert here in allowed or short in allowed, f"{name} imports {imported}"


def test_every_module_has_a_row():
    words = {area(module_name(path)) for path in FILES} - {"normjax"}
    assert words == {word for names in ROWS for word in names.split()}


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_files_and_functions_are_short(path: Path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body
            docstring = ast.get_docstring(node) is not None
            first = body[1].lineno if docstring and len(body) > 1 else body[0].lineno
            size = (node.end_lineno or 0) - first + 1
            assert size <= LONGEST_FUNCTION, f"{path.name}:{node.name} has {size} lines"


def packages() -> list[types.ModuleType]:
    found = [normjax]
    for info in pkgutil.walk_packages(normjax.__path__, "normjax."):
        if info.ispkg:
            found.append(importlib.import_module(info.name))
    return found


def public(module: types.ModuleType) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and str(value.__module__).startswith("normjax")
    }


@pytest.mark.parametrize("package", packages(), ids=lambda p: p.__name__)
def test_public_names_have_a_docstring_a_home_and_no_module_of_their_name(package):
    modules = {info.name for info in pkgutil.iter_modules(package.__path__)}
    for name, value in public(package).items():
        assert inspect.getdoc(value), f"{package.__name__}.{name} has no docstring"
        assert name not in modules, f"{package.__name__}.{name} is also a module"
        home = str(value.__module__)  # type: ignore[attr-defined]
        assert home.startswith(package.__name__), f"{name} lives in {home}"
        assert getattr(importlib.import_module(home), name, None) is value


def test_public_definitions_have_one_home():
    """Equal names stand in two modules only where the module is part of the name."""
    homes: dict[str, list[str]] = {}
    for path in FILES:
        name = module_name(path)
        if not name.startswith("normjax"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
            if definition and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {
        "analyze": ["normjax.analysis.stream", "normjax.study.analysis"],
        "init": ["normjax.functional", "normjax.mixture.apply", "normjax.running"],
        "input_jacobian": ["normjax.jacobian", "normjax.mixture.jacobian"],
        "merge": ["normjax.running", "normjax.statistics"],
        "normalize": ["normjax.functional", "normjax.mixture.apply"],
        **{
            name: [f"normjax.linen.{module}", f"normjax.nnx.{module}"]
            for module, names in FLAX_LAYERS.items()
            for name in names.split()
        },
        **{
            name: [f"normjax.layers.{framework}" for framework in ("linen", "nnx")]
            for name in WIRED_LAYERS.split()
        },
        "Finding": [
            f"normjax.{kind}.record" for kind in ("analysis", "auditing", "diagnosis")
        ],
        "Settings": ["normjax.study.schema", "normjax.study.training"],
    }


def test_import_is_light_and_changes_no_configuration():
    """`import normjax` loads no Flax and no extra, and leaves jax.config alone."""
    code = (
        "import sys, jax; before = dict(jax.config.values); import normjax as nj; "
        "assert dict(jax.config.values) == before; "
        "heavy = {'flax', 'optax', 'pydantic', 'polars', 'matplotlib', 'typer',"
        " 'scipy', 'mpmath', 'mlxtend'} & set(sys.modules); assert not heavy, heavy; "
        "nj.linen.Norm; nj.nnx.Norm; nj.verify.check_laws"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_reference_shares_nothing_with_the_library():
    """The oracle imports nothing else of normjax and holds no custom rule."""
    path = ROOT / "normjax/verify/oracles.py"
    assert not [name for name in imports(path) if name.startswith("normjax")]
    assert "custom_" not in path.read_text(encoding="utf-8")
