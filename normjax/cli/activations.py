"""``normjax analyze``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from normjax.cli.app import SetOption, app
from normjax.terminal import out, progress_bar, show_analysis
from normjax.typed import resolve


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
