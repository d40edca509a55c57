"""The command line: ``normjax run | report | spec | diff | verify``.

Exit status: 0 everything held; 1 something was run and did not hold; 2 the input is
wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from normjax.pattern import PatternError
from normjax.presets import PRESETS
from normjax.records import suggest
from normjax.spec import NormSpec
from normjax.traits import diff, properties

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
# Markup would take the brackets of a pattern for a style.
out = Console(markup=False, highlight=False)

SpecText = Annotated[
    str, typer.Argument(help="A preset, or a pattern like 'b [h w] c'.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="FIELD=VALUE, for instance epsilon=1e-3 or groups=4."),
]


class InputError(Exception):
    """Something that the user can mend: one line, exit status 2."""


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
        _show_plan(study.make_plan(config, **options))
        return
    mode = "resume" if resume else "force" if force else "new"
    results, analysis = study.run(
        config, out=out_, mode=mode, progress=sys.stderr.isatty(), **options
    )
    page = report.write(results.folder)
    _show_verdicts(results, analysis)
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
def show_card(layer: SpecText, set_: SetOption = None) -> None:
    """Show a layer's card: what it computes, couples, stores, when it degenerates."""
    declared = resolve(layer, set_ or [])
    found = properties(declared)
    table = _table("", "")
    table.show_header = False
    out.print(repr(declared), style="bold")
    rows: list[tuple[str, str]] = [
        ("formula", found.formula),
        ("statistics", found.statistics),
        ("removes", ", ".join(found.removes) or "nothing"),
        ("couples examples", "yes" if found.couples_examples else "no"),
        ("parameters", ", ".join(found.parameters) or "none"),
        ("stores", ", ".join(found.stores) or "nothing"),
        ("training", _training(found.train_differs)),
        ("Jacobian", "symmetric" if found.symmetric_jacobian else "not symmetric"),
    ]
    rows += [("degenerates", text) for text in found.degenerate]
    for name, value in rows:
        table.add_row(name, value)
    out.print(table)


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
        found = diff(ours, theirs, None if shape is None else _shape(shape))
    except ValueError as error:
        raise InputError(str(error)) from None
    if not found:
        out.print("no difference")
        return
    table = _table("property", first, second, "")
    for item in found:
        kind = "declared" if item.declared else "follows"
        table.add_row(item.name, _text(item.first), _text(item.second), kind)
    out.print(table)


@app.command("verify")
def run_checks(
    specs: Annotated[
        list[str] | None, typer.Argument(help="Presets or patterns; none: the facts.")
    ] = None,
    set_: SetOption = None,
) -> None:
    """Check the closed forms against independent oracles."""
    from normjax import verify as evidence

    checks: list[Any] = []
    if not specs:
        checks += evidence.check_facts()
    for layer in specs or []:
        checks += evidence.check_spec(resolve(layer, set_ or []))
    table = _table("", "fact", "on", "measured", "predicted", "error", "tolerance")
    for check in checks:
        mark = Text("held", "green") if check.ok else Text("failed", "bold red")
        numbers = (f"{check.error:.1e}", f"{check.tolerance:.1e}")
        table.add_row(
            mark, check.name, check.subject, check.measured, check.predicted, *numbers
        )
    out.print(table)
    failed = sum(not check.ok for check in checks)
    out.print(f"{len(checks) - failed} of {len(checks)} held on {_device()}")
    if failed:
        raise typer.Exit(1)


def resolve(layer: str, changes: list[str]) -> NormSpec:
    """A spec from what a user typed.

    Args:
        layer: a preset, or a pattern.
        changes: ``field=value``.

    Returns:
        The spec.

    Raises:
        InputError: if it is neither, or a field or value does not fit.

    Example:
        >>> resolve("layer_norm", ["epsilon=1e-3"])
        NormSpec('... [c]', epsilon=0.001, affine='c')
    """
    values = {}
    for text in changes:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set got {text!r}, expected FIELD=VALUE")
        values[name.strip()] = _value(value.strip())
    own = {
        k: values.pop(k)
        for k in ("groups", "ghosts", "axes", "channels")
        if k in values
    }
    try:
        if layer in PRESETS:
            base = PRESETS[layer](**own)
        elif any(letter in layer for letter in "[]() .") and not own:
            base = NormSpec(layer)
        else:
            raise InputError(f"there is no preset {layer!r}{suggest(layer, PRESETS)}")
        return NormSpec.from_dict(base.replace(**values).to_dict())
    except PatternError as error:
        raise InputError(f"pattern: {error}") from None
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from None


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
        if type(error).__name__ != "ConfigError":
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


def _value(text: str) -> Any:
    """Numbers, true, false, null; everything else is text."""
    words = {"true": True, "false": False, "null": None, "none": "none"}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--shape got {text!r}, expected numbers like 8,5,16"
        ) from None


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "; ".join(map(str, value)) or "none"
    return str(value)


def _training(differs: bool) -> str:
    return "differs from inference" if differs else "the same function as inference"


def _device() -> str:
    device = jax.devices()[0]
    return f"jax {jax.__version__}, {device.platform} ({device.device_kind})"


def _show_plan(plan: Any) -> None:
    """Arms, what each changes, and how much there is to do."""
    table = _table("arm", "is", "with", "role")
    for arm in plan.arms.values():
        changes = ", ".join(f"{c.name}: {c.before} → {c.after}" for c in arm.changes)
        table.add_row(arm.name, arm.parent or "", changes, arm.role)
    out.print(table)
    seeds = plan.study.seeds
    count = "no seeds" if seeds is None else f"{seeds.count} seeds"
    out.print(
        f"{len(plan.arms)} arms, {count}, {len(plan.blocks)} blocks, "
        f"{len(plan.study.hypotheses)} hypotheses"
    )


def _show_verdicts(results: Any, analysis: Any) -> None:
    """The verdicts, and what did not hold."""
    out.print(results.plan["question"], style="bold")
    table = _table("", "hypothesis", "verdict", "difference", "95 % interval")
    for verdict in analysis.verdicts:
        paired = verdict.paired
        interval = mean = "no interval"
        if paired.low is not None:
            mean = f"{paired.mean:.3f}"
            interval = f"[{paired.low:.3f}, {paired.high:.3f}]"
        table.add_row(verdict.id, verdict.statement, verdict.verdict, mean, interval)
    if analysis.verdicts:
        out.print(table)
    for agreement in analysis.agreements:
        error = agreement.error
        found = "is not finite" if error is None else f"within {error:.1e}"
        out.print(f"{agreement.arm}: {agreement.metric} and its closed form: {found}")
    for arm, count in analysis.diverged.items():
        if count:
            out.print(f"{arm}: {count} seeds diverged")
    for check in analysis.manipulations:
        if not check.ok:
            out.print(
                f"{check.arm}: manipulation check failed: {check.name}, predicted "
                f"{check.predicted}, measured {check.measured}",
                style="red",
            )
