"""The command line: ``normjax --help`` lists its commands.

Exit status: 0 everything held; 1 something was run and failed or did not hold; 2 the
input is wrong; 130 a run was interrupted, and can be resumed.
"""

from __future__ import annotations

from rich.console import Console

from normjax import typed
from normjax.cli import activations as activations
from normjax.cli import audits as audits
from normjax.cli import diagnoses as diagnoses
from normjax.cli import layers as layers
from normjax.cli import reports as reports
from normjax.cli import studies as studies
from normjax.cli.app import app as app

# What the extras study and data install.
EXTRAS = {
    "pydantic", "pydantic_core", "ruamel", "polars", "matplotlib", "jinja2", "mlxtend",
    "sklearn",
}  # fmt: skip


def main() -> None:
    """Run the command line; input that is wrong is one message and exit status 2."""
    try:
        app()
    except typed.InputError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package not in EXTRAS:
            raise
        _fail(f"{package} is missing: pip install 'normjax[study,data]'")
    except ValueError as error:
        kinds = ("ConfigError", "UnfinishedError", "AnalysisError")
        if type(error).__name__ not in kinds:
            raise
        _fail(str(error))


def _fail(message: str) -> None:
    errors = Console(stderr=True, markup=False, highlight=False)
    errors.print(message, style="red", soft_wrap=True)
    raise SystemExit(2)
