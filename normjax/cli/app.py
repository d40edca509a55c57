"""The application that the commands join, and the arguments that they share."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Normalization layers for JAX: stated completely, proved against autodiff.",
)
SpecText = Annotated[
    str, typer.Argument(help="A preset, or a pattern like 'b [h w] c'.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="FIELD=VALUE, for instance epsilon=1e-3 or groups=4."),
]
