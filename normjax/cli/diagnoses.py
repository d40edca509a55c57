"""``normjax diagnose``."""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from normjax.cli.app import app
from normjax.terminal import out, show_diagnosis
from normjax.typed import InputError


@app.command("diagnose")
def diagnose_model(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="Gives a linen or nnx model, or a pair (linen model, variables).",
        ),
    ],
    batch: Annotated[
        Path,
        typer.Option(help=".npy, or .npz by the names of the call's arguments."),
    ],
    dtype: Annotated[str, typer.Option(help="Deployment dtype.")] = "bfloat16",
    mask: Annotated[
        str | None,
        typer.Option(help="The argument that is True where the input is no padding."),
    ] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write all findings there.")
    ] = None,
) -> None:
    """Find what is wrong with the norm layers of a model, in seven steps."""
    from normjax.diagnosis import diagnose

    arrays = _batch(batch)
    made = _made(target)
    model, variables = made if isinstance(made, tuple) else (made, None)
    try:
        found = diagnose(model, variables, arrays, deployment_dtype=dtype, mask=mask)
    except ValueError as error:
        raise InputError(f"{target}: {error}") from None
    show_diagnosis(found)
    if json_ is not None:
        json_.write_text(json.dumps(found.to_dict(), indent=2) + "\n", encoding="utf-8")
        out.print(f"findings: {json_}", soft_wrap=True)
    if not found.ok:
        raise typer.Exit(1)


def _batch(path: Path) -> Any:
    """An array, or arrays by name."""
    try:
        found = np.load(path)
    except FileNotFoundError:
        raise InputError(f"--batch: there is no file {path}") from None
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise InputError(f"--batch: {path} is no .npy or .npz of numbers") from None
    return found if isinstance(found, np.ndarray) else dict(found)


def _made(target: str) -> Any:
    """What MODULE:FACTORY gives; modules are looked for in this folder too."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise InputError(f"got {target!r}, expected MODULE:FACTORY, like models:make")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise
        raise InputError(f"there is no module {module!r} here") from None
    factory = getattr(loaded, name, None)
    if not callable(factory):
        raise InputError(f"{module} has no function {name!r}")
    return factory()
