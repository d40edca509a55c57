"""``normjax run``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from normjax.cli.app import app
from normjax.terminal import out, show_plan, show_verdicts
from normjax.typed import InputError


@app.command("run")
def run_study(
    config: Annotated[Path, typer.Argument(help="The study's YAML file.")],
    out_: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory; runs/STUDY if not given."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE: change the baseline, for all arms."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="In place of seeds.count.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The small form.")] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what would run, and stop.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Compute what is missing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Start anew.")] = False,
) -> None:
    """Run a study and write its page."""
    from normjax import report, study

    if resume and force:
        raise InputError("--resume and --force exclude each other")
    options: dict[str, Any] = {"overrides": set_ or (), "seeds": seeds, "smoke": smoke}
    if plan:
        show_plan(study.make_plan(config, **options))
        return
    mode = "resume" if resume else "force" if force else "new"
    results, analysis = study.run(
        config, out=out_, mode=mode, progress=sys.stderr.isatty(), **options
    )
    page = report.write(results.folder)
    show_verdicts(results, analysis)
    out.print(f"page: {page}", soft_wrap=True)
    if not analysis.held:
        raise typer.Exit(1)
