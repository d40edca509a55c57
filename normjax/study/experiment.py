"""What an experiment is to the engine: a settings schema and a measure function."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from normjax.study import training
from normjax.study.document import Document
from normjax.study.schema import Settings

BUILT_IN = {"training": training}


@dataclass(frozen=True)
class Experiment:
    """A settings schema and a measure function.

    ``measure(cell, key)`` is pure and can be traced: it returns a dict of scalars,
    ``Curve`` and None (no value in this arm). Optional in the module: ``SEEDED = True``
    if it draws random numbers and cannot do without seeds,
    ``shapes(settings)`` gives the input shape of every norm by its path in the
    settings, ``data()`` the fingerprints of the data, ``MANIPULATIONS`` checks of the
    properties that arms change (``normjax.study.interventions``), ``LABELS`` texts for
    figures.

    Attributes:
        name: as the study names it.
        settings: the schema.
        measure: the function.
        shapes: input shapes of the norms in the settings.
        manipulations: checks of the properties that arms change.
        labels: axis labels for figures, by metric.
        digest: SHA-256 of the source.
        data: fingerprints of the data sets, by name.
        seeded: whether it cannot do without seeds.
    """

    name: str
    settings: type[Settings]
    measure: Callable[..., Mapping[str, Any]]
    shapes: Callable[[Any], Mapping[str, tuple[int, ...]]]
    manipulations: Mapping[str, Any]
    labels: Mapping[str, str]
    digest: str
    data: Callable[[], Mapping[str, str]]
    seeded: bool


def find(name: str, document: Document, folder: Path) -> Experiment:
    """The built-in experiment of a name, or the script at a path beside the config.

    Args:
        name: ``"training"``, or a path to a Python file.
        document: for error messages.
        folder: what the path is relative to.

    Returns:
        The ``Experiment``.

    Raises:
        ConfigError: if there is none, or the script has no ``Settings`` or ``measure``.
    """
    if name in BUILT_IN:
        module, source = BUILT_IN[name], Path(str(BUILT_IN[name].__file__))
    elif name.endswith(".py"):
        source = (folder / name).resolve()
        if not source.is_file():
            raise document.error(("experiment",), f"there is no script {source}")
        module = _run(source, document)
    else:
        raise document.error(
            ("experiment",),
            f"got {name!r}, expected {', '.join(BUILT_IN)} or the path of a script "
            "(../experiments/mine.py)",
        )
    for part in ("Settings", "measure"):
        if not hasattr(module, part):
            raise document.error(("experiment",), f"{source} defines no {part}")
    kind = module.Settings
    if not (isinstance(kind, type) and issubclass(kind, Settings)):
        text = f"{source}: Settings is {kind!r}, expected a class from study.Settings"
        raise document.error(("experiment",), text)
    return Experiment(
        name=source.stem,
        settings=module.Settings,
        measure=module.measure,
        shapes=getattr(module, "shapes", lambda _settings: {}),
        manipulations=getattr(module, "MANIPULATIONS", {}),
        labels=getattr(module, "LABELS", {}),
        digest=hashlib.sha256(source.read_bytes()).hexdigest(),
        data=getattr(module, "data", dict),
        seeded=getattr(module, "SEEDED", False),
    )


def _run(source: Path, document: Document) -> ModuleType:
    """Import a script by its path."""
    name = f"_experiment_{hashlib.sha256(str(source).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None or spec.loader is None:
        raise document.error(("experiment",), f"{source} is no Python module")
    module = importlib.util.module_from_spec(spec)
    # Annotations that are text are looked up in the module of this name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        first = str(error).split("\n")[0]
        text = f"{source} fails at import: {type(error).__name__}: {first}"
        raise document.error(("experiment",), text) from error
    return module
