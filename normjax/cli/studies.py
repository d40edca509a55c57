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
        bool, typer.Option("--resume", help="Compute what is missing or failed.")
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry-failed", help="Compute what failed, no more.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Start anew.")] = False,
    read: Annotated[
        bool,
        typer.Option("--read-only", help="Judge what is there; write nothing."),
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(help="I/N: compute one of N fixed parts, in one run directory."),
    ] = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop at the first failing block.")
    ] = False,
    max_failures: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many failing blocks.")
    ] = None,
    executor: Annotated[
        str, typer.Option(help="local, or ray: the processes of a Ray cluster.")
    ] = "local",
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder of compiled programs; JAX_COMPILATION_CACHE_DIR, else "
            "normjax/programs in the user's caches."
        ),
    ] = None,
) -> None:
    """Run a study and write its page.

    Status 1 if a block failed, or something did not hold; 130 if it was interrupted.
    """
    from normjax import report, study

    options: dict[str, Any] = {"overrides": set_ or (), "seeds": seeds, "smoke": smoke}
    mode = _mode(resume=resume, retry=retry, force=force, read=read)
    if fail_fast and max_failures is not None:
        raise InputError("--fail-fast is --max-failures 1: give one of them")
    options_of_run: dict[str, Any] = {
        "shard": None if shard is None else _shard(shard),
        "max_failures": 1 if fail_fast else max_failures,
        "executor": executor,
        "programs": cache or study.default_folder(),
        "progress": sys.stderr.isatty(),
    }
    if plan:
        show_plan(study.make_plan(config, **options))
        folder = options_of_run["programs"]
        out.print(f"compiled programs are kept in {folder}", soft_wrap=True)
        return
    try:
        results, analysis = study.run(
            config, out=out_, mode=mode, **options, **options_of_run
        )
    except study.UnfinishedError as error:
        if mode == "read":
            raise
        part = options_of_run["shard"]
        ours = [b for b in error.failed if part is None or b["shard"] == part[0]]
        out.print(str(error), soft_wrap=True, style="red" if ours else "")
        raise typer.Exit(1 if ours else 0) from None
    except KeyboardInterrupt:
        out.print("interrupted: --resume computes the rest")
        raise typer.Exit(130) from None
    show_verdicts(results, analysis)
    if mode != "read":
        out.print(f"page: {report.write(results.folder)}", soft_wrap=True)
    if not analysis.held:
        raise typer.Exit(1)


def _mode(**chosen: bool) -> str:
    """The one mode that was asked for."""
    asked = [name for name, wanted in chosen.items() if wanted]
    if len(asked) > 1:
        names = {"retry": "--retry-failed", "read": "--read-only"}
        texts = " and ".join(names.get(name, f"--{name}") for name in asked)
        raise InputError(f"{texts} exclude each other")
    return asked[0] if asked else "new"


def _shard(text: str) -> tuple[int, int]:
    """``2/3``: the second of three."""
    number, _, count = text.partition("/")
    if not (
        number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)
    ):
        raise InputError(f"--shard: got {text!r}, expected I/N with I from 1 to N: 2/3")
    return int(number), int(count)
