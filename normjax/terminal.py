"""How plans, verdicts and checks look on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# Markup would take the brackets of a pattern for a style.
out = Console(markup=False, highlight=False)


def table(*headers: str) -> Table:
    """An empty table; long cells fold."""
    empty = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        empty.add_column(header, overflow="fold")
    return empty


def words(value: Any) -> str:
    """A fact in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "; ".join(map(str, value)) or "none"
    return str(value)


def show_plan(plan: Any) -> None:
    """Arms, what each changes, and how much there is to do."""
    rows = table("arm", "is", "with", "role")
    for arm in plan.arms.values():
        changes = ", ".join(f"{c.name}: {c.before} → {c.after}" for c in arm.changes)
        rows.add_row(arm.name, arm.parent or "", changes, arm.role)
    out.print(rows)
    seeds = plan.study.seeds
    count = "no seeds" if seeds is None else f"{seeds.count} seeds"
    out.print(
        f"{len(plan.arms)} arms, {count}, {len(plan.blocks)} blocks, "
        f"{plan.programs} programs to compile, "
        f"{len(plan.study.hypotheses)} hypotheses"
    )


def show_verdicts(results: Any, analysis: Any) -> None:
    """The verdicts, and what did not hold."""
    out.print(results.plan["question"], style="bold")
    rows = table("", "hypothesis", "verdict", "difference", "95 % interval")
    for verdict in analysis.verdicts:
        paired = verdict.paired
        interval = mean = "no interval"
        if paired.low is not None:
            mean = f"{paired.mean:.3f}"
            interval = f"[{paired.low:.3f}, {paired.high:.3f}]"
        rows.add_row(verdict.id, verdict.statement, verdict.verdict, mean, interval)
    if analysis.verdicts:
        out.print(rows)
    for agreement in analysis.agreements:
        error = agreement.error
        found = "is not finite" if error is None else f"within {error:.1e}"
        out.print(f"{agreement.arm}: {agreement.metric} and its closed form: {found}")
    for bound in analysis.bounds:
        if not bound.ok:
            out.print(f"{bound.arm}: {bound.metric} lies above its bound", style="red")
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


def show_checks(checks: Sequence[Any]) -> None:
    """Measured against predicted, and how many held."""
    rows = table("", "fact", "on", "measured", "predicted", "error", "tolerance")
    for check in checks:
        mark = Text("held", "green") if check.ok else Text("failed", "bold red")
        numbers = (f"{check.error:.1e}", f"{check.tolerance:.1e}")
        rows.add_row(
            mark, check.name, check.subject, check.measured, check.predicted, *numbers
        )
    out.print(rows)
    held, device = sum(check.ok for check in checks), jax.devices()[0]
    out.print(
        f"{held} of {len(checks)} held on jax {jax.__version__}, {device.platform} "
        f"({device.device_kind})"
    )


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, if that is a terminal; yields (done, total) → None."""
    errors = Console(stderr=True)
    shown = "{task.percentage:>3.0f} %"
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn(shown)
    with Progress(
        *columns, TimeRemainingColumn(), console=errors, disable=not errors.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_analysis(found: Any) -> None:
    """The spread of every measure, and how many rows each flag has."""
    rows = table("measure", "lowest", "median about", "highest")
    for one in found.distributions.values():
        histogram = one.histogram
        ends = [histogram.lowest, histogram.highest]
        low, high = (
            "–" if end is None else f"{end.value:.3g} at {one.place(end.index)}"
            for end in ends
        )
        lower, upper = histogram.quantile(0.5)
        rows.add_row(one.measure.label, low, f"{(lower * upper) ** 0.5:.2g}", high)
    out.print(rows)
    rows = table("flag", "rows", "says", "worst at")
    for one in found.findings.values():
        count, index = one.found.count, one.found.index
        worst = one.place(index[0].tolist()) if len(index) else ""
        style = "bold red" if count else ""
        counted = Text(f"{count:,}" if count else "none", style)
        rows.add_row(one.flag.name, counted, one.flag.meaning, worst)
    out.print(rows)
    rest = found.remainder
    if rest is not None:
        out.print(f"the last batch has {rest.batch_size} examples; the page shows it")
    elif found.left_out:
        out.print(f"{found.left_out} examples behind the last whole batch are left out")


def show_diagnosis(found: Any) -> None:
    """What was found, then why it matters and what to try, once for each kind."""
    styles = {"error": "bold red", "warning": "yellow", "note": ""}
    rows = table("", "step", "layer", "found", "measured")
    kinds: dict[tuple[str, ...], Any] = {}
    for each in found.findings:
        numbers = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in each.numbers.items()
        )
        mark = Text(each.severity, styles[each.severity])
        rows.add_row(mark, each.step, each.path or "the model", each.what, numbers)
        kinds.setdefault((each.what, each.why, each.remedy), each)
    if found.findings:
        out.print(rows)
    for what, why, remedy in kinds:
        out.print(f"{what}: {why}. Try: {remedy}.")
    counts = [
        sum(each.severity == severity for each in found.findings) for severity in styles
    ]
    out.print(
        f"{len(found.layers)} norm layers: {counts[0]} errors, {counts[1]} warnings, "
        f"{counts[2]} notes"
    )
