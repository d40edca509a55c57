"""The command line: ``normjax run | report | spec | diff | verify | analyze``.

Exit status: 0 everything held; 1 something was run and did not hold; 2 the input is
wrong.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from normjax.family import FAMILY, card, markdown
from normjax.presets import PRESETS as PRESETS
from normjax.spec import NormSpec
from normjax.terminal import (
    out,
    progress_bar,
    show_analysis,
    show_checks,
    show_plan,
    show_verdicts,
    table,
    words,
)
from normjax.traits import diff
from normjax.typed import InputError, is_dotted, resolve, shape_of

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Normalization layers for JAX: stated completely, proved against autodiff.",
)
# What the extras study and data install.
EXTRAS = {
    "pydantic", "pydantic_core", "ruamel", "polars", "matplotlib", "jinja2", "mlxtend",
    "sklearn",
}  # fmt: skip

SpecText = Annotated[
    str, typer.Argument(help="A preset, or a pattern like 'b [h w] c'.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="FIELD=VALUE, for instance epsilon=1e-3 or groups=4."),
]


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
    study, report = _studies()
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


@app.command("report")
def write_report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
) -> None:
    """Write the page of a run that is there."""
    _, writer = _studies()
    out.print(f"page: {writer.write(folder)}", soft_wrap=True)


@app.command("spec")
def show_card(
    layer: Annotated[
        str | None,
        typer.Argument(help="A member of the family, or a pattern like 'b [h w] c'."),
    ] = None,
    set_: SetOption = None,
    whole: Annotated[
        bool, typer.Option("--markdown", help="The whole family, as the README has it.")
    ] = False,
) -> None:
    """Show a layer's card: what it computes, couples, stores, when it degenerates."""
    if whole:
        out.print(markdown(), soft_wrap=True)
        return
    if layer is None:
        raise typer.BadParameter("name a layer, or say --markdown", param_hint="LAYER")
    member = None if set_ else FAMILY.get(layer)
    declared: Any = None if member is None else member.layer
    if declared is None or isinstance(declared, NormSpec):
        declared = resolve(layer, set_ or [])
    title = repr(declared)
    if member is not None and callable(declared):
        title = member.call
    out.print(title, style="bold")
    shown = table("", "")
    shown.show_header = False
    for name, value in card(declared, member) + _notes(layer):
        shown.add_row(name, value)
    out.print(shown)


@app.command("diff")
def show_diff(
    first: SpecText,
    second: SpecText,
    shape: Annotated[
        str | None, typer.Option(help="Compare axes on this shape, like 8,5,5,16.")
    ] = None,
) -> None:
    """Show every property that replacing one layer by another changes."""
    ours, theirs = resolve(first, []), resolve(second, [])
    try:
        found = diff(ours, theirs, None if shape is None else shape_of(shape))
    except ValueError as error:
        raise InputError(str(error)) from None
    if not found:
        out.print("no difference")
        return
    rows = table("property", first, second, "")
    for item in found:
        kind = "declared" if item.declared else "follows"
        rows.add_row(item.name, words(item.first), words(item.second), kind)
    out.print(rows)


@app.command("verify")
def run_checks(
    specs: Annotated[
        list[str] | None, typer.Argument(help="Presets or patterns; none: the facts.")
    ] = None,
    set_: SetOption = None,
    save: Annotated[
        Path | None, typer.Option(help="Write results that --against compares with.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Compare with a file of --save: another device or version."),
    ] = None,
    invariance: Annotated[
        bool,
        typer.Option("--invariance", help="What leaves which layer's output as it is."),
    ] = False,
) -> None:
    """Check the closed forms against independent oracles, or a stored file."""
    from normjax import verify as evidence

    if invariance:
        if specs or set_ or save or against:
            raise InputError("--invariance takes no layer and no other option")
        _show_invariances(evidence)
        return
    checks: list[Any] = []
    if save is None and against is None:
        checks += evidence.check_facts() if not specs else []
        for layer in specs or []:
            checks += evidence.check_spec(resolve(layer, set_ or []))
    if against is not None:
        try:
            checks += evidence.against(against)
        except ValueError as error:
            raise InputError(str(error)) from None
    if save is not None:
        layers = [resolve(layer, set_ or []) for layer in specs or []]
        count = evidence.save(save, layers or None)
        out.print(f"{count} results in {save}")
    if checks:
        show_checks(checks)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


@app.command("analyze")
def analyze_file(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help=".npy, .npz[:MEMBER] or Parquet.")
    ],
    spec: Annotated[str, typer.Option(help="A preset, or a pattern like 'b [h w] c'.")],
    set_: SetOption = None,
    axis_names: Annotated[
        str | None, typer.Option(help="Names of the file's axes, like 'b t c'.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples in a batch, for a layer that has one.")
    ] = None,
    out_: Annotated[
        Path | None, typer.Option("--out", help="Folder; NAME-analysis if not given.")
    ] = None,
    keep: Annotated[int, typer.Option(help="Rows to keep of each flag.")] = 100,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier analysis.")
    ] = False,
) -> None:
    """Measure what a layer does to every group of a file of activations."""
    from normjax import analysis, report

    layer = resolve(spec, set_ or [])
    folder = out_ or Path(f"{Path(source).name.partition('.')[0]}-analysis")
    names = None if axis_names is None else axis_names.split()
    with analysis.new_folder(folder, force) as draft, progress_bar(source) as progress:
        tables = analysis.Tables(draft)
        found = analysis.analyze(
            source,
            layer,
            axis_names=names,
            batch_size=batch_size,
            keep=keep,
            receive=tables.append,
            progress=progress,
        )
        tables.finish()
        analysis.save_record(found, draft)
        report.write_activations(found, draft, shlex.join(["normjax", *sys.argv[1:]]))
    show_analysis(found)
    out.print(f"page: {folder / 'report.html'}", soft_wrap=True)


def _show_invariances(evidence: Any) -> None:
    """The table, and what in it is undecided or not as predicted."""
    cells = evidence.invariances()
    out.print(evidence.invariance_markdown(cells), soft_wrap=True)
    wrong = [cell for cell in cells if not cell.ok]
    for cell in wrong:
        out.print(f"failed: {cell}", style="red", soft_wrap=True)
    if wrong:
        raise typer.Exit(1)


def _notes(layer: str) -> list[tuple[str, str]]:
    """What a card adds for another library's layer."""
    if not is_dotted(layer):
        return []
    from normjax import interop

    known = interop.CONVENTIONS[layer]
    return [("source", known.source), *(("note", text) for text in known.notes)]


def main() -> None:
    """Run the command line; input that is wrong is one message and exit status 2."""
    try:
        app()
    except InputError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package not in EXTRAS:
            raise
        _fail(f"{package} is missing: pip install 'normjax[study,data]'")
    except ValueError as error:
        if type(error).__name__ not in ("ConfigError", "AnalysisError"):
            raise
        _fail(str(error))


def _fail(message: str) -> None:
    errors = Console(stderr=True, markup=False, highlight=False)
    errors.print(message, style="red", soft_wrap=True)
    raise SystemExit(2)


def _studies() -> tuple[Any, Any]:
    """The study and report packages, which need an extra."""
    from normjax import report, study

    return study, report
