"""``normjax audit``."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.text import Text

from normjax.cli.app import app
from normjax.terminal import out, table, words
from normjax.traits import diff
from normjax.typed import InputError, resolve, shape_of


@app.command("audit")
def audit_target(
    target: Annotated[
        str, typer.Argument(help="MODULE:NAME or MODULE:NAME(ARGUMENTS).")
    ],
    shape: Annotated[str, typer.Option(help="Of the input, like 8,16.")] = "8,16",
    dtype: Annotated[
        str, typer.Option(help="float32, float64, float16 or bfloat16.")
    ] = "float32",
    train: Annotated[bool, typer.Option("--train", help="As in training.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Every number, as JSON.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(help="A preset or pattern: print only what differs from it."),
    ] = None,
    max_calls: Annotated[
        int | None, typer.Option(help="Stop after so many calls.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="The formula and the variance alone.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of probes and parameters.")] = 0,
    explain: Annotated[
        str | None, typer.Option(help="A finding: its evidence and every number.")
    ] = None,
) -> None:
    """Say which normalization a layer of any library is, from its values alone."""
    from normjax import auditing

    expected = None if against is None else resolve(against, [])
    try:
        sizes = auditing.checked_shape(shape_of(shape))
        kind = auditing.float_dtype(dtype)
        layer = auditing.resolve_target(target, sizes, kind, train, seed=seed)
        found = auditing.audit(layer, seed=seed, max_calls=max_calls, quick=quick)
        if explain is not None:
            _explain(found, explain)
    except ValueError as error:
        raise InputError(str(error)) from None
    if as_json:
        out.print_json(json.dumps(found.to_dict()))
    elif expected is not None:
        if _show_differences(found, expected, against):
            raise typer.Exit(1)
        return
    elif explain is None:
        show_audit(found)
    if found.defects:
        raise typer.Exit(1)


def show_audit(found) -> None:
    """One line for each finding; a non-norm in one line."""
    train = f"{found.calls} calls, {found.seconds:.1f} s"
    sizes = ",".join(map(str, found.shape))
    out.print(
        f"normjax audit  {found.target}  input ({sizes}) {found.dtype}  {train}",
        style="bold",
        soft_wrap=True,
    )
    if found.kind is not None:
        evidence = found.findings[0].evidence if found.findings else ""
        text = f"not a normalization: {found.kind}"
        out.print(f"{text} ({evidence})" if evidence else text, soft_wrap=True)
        for text in found.open:
            out.print(f"open: {text}", soft_wrap=True)
        return
    rows = table("", "", "", "")
    rows.show_header = False
    for finding in found.findings:
        style = "bold red" if finding.defect else ""
        value = "open" if finding.value is None else words(finding.value)
        mark = Text("!", style) if finding.defect else ""
        rows.add_row(finding.name, Text(value, style), finding.confidence, mark)
    for position, text in enumerate(found.open or ("none",)):
        rows.add_row("" if position else "open", text, "", "")
    out.print(rows)
    if found.spec is not None:
        out.print(f"spec  {found.spec!r}", soft_wrap=True)
    else:
        out.print("spec  none reproduces it", soft_wrap=True)
        if found.nearest is not None:
            out.print(f"nearest  {found.nearest!r}", soft_wrap=True)
        for text in found.differs:
            out.print(f"differs  {text}", soft_wrap=True)
    count = len(found.defects)
    if count:
        names = ", ".join(finding.name for finding in found.defects)
        plural = "warning" if count == 1 else "warnings"
        out.print(f"{count} {plural} (!): {names}; --explain NAME shows the evidence")


def _explain(found, name: str) -> None:
    """The evidence of a finding, and every number."""
    try:
        finding = found[name]
    except KeyError as error:
        raise ValueError(f"--explain: {error.args[0]}") from None
    out.print(f"{finding.name}: {finding.value} ({finding.confidence})", style="bold")
    if finding.evidence:
        out.print(finding.evidence, soft_wrap=True)
    numbers = next(f for f in found.to_dict()["findings"] if f["name"] == name)
    rows = table("", "")
    rows.show_header = False
    for key, value in numbers["facts"].items():
        rows.add_row(key, json.dumps(value, ensure_ascii=False))
    out.print(rows)


def _show_differences(found, expected, name: str | None) -> bool:
    """What the layer has otherwise than a declared spec; whether there is anything."""
    if found.kind is not None:
        out.print(f"not a normalization: {found.kind}", soft_wrap=True)
        return True
    ours = found.spec or found.nearest
    rows = table("property", found.target, str(name))
    if ours is not None:
        try:
            differences = diff(ours, expected, found.shape)
        except ValueError as error:
            raise InputError(f"--against {name}: {error}") from None
        for item in differences:
            if item.declared:
                rows.add_row(item.name, words(item.first), words(item.second))
    if found.spec is None:
        for text in found.differs:
            rows.add_row("formula", text, "")
    if not rows.row_count:
        out.print("no difference")
        return False
    out.print(rows)
    return True
