"""``normjax spec``, ``normjax diff`` and ``normjax verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from normjax.cli.app import SetOption, SpecText, app
from normjax.family import FAMILY, card, markdown
from normjax.spec import NormSpec
from normjax.terminal import out, show_checks, table, words
from normjax.traits import diff
from normjax.typed import InputError, is_dotted, resolve, shape_of


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
