"""Writes the report of a run again, or compares several runs: one HTML file that works offline.

    python -m analysis.report runs/2026-11-29_23-39-24
    python -m analysis.report RUN RUN RUN html=comparison.html

Every run writes report.html into its directory when it ends. Several runs are compared in one page, comparison.html if
no other name is given. What the page shows was recorded in the directories of the runs: docs/report.md.
"""

from configs.entry_point import entry_point  # isort: skip -- first: Ctrl-C may come during the other imports

from pathlib import Path

from analysis.attention_html import save_page
from analysis.report_html import load_run, report_page
from system.errors import UserError
from system.files import check_suffix, expand_user
from system.streams import print_note


def main(arguments: list[str]) -> None:
    """Reads the runs and writes the page. Raises UserError."""
    names = [argument for argument in arguments if not argument.startswith("html=")]
    outputs = [argument.partition("=")[2] for argument in arguments if argument.startswith("html=")]
    if not names:
        raise UserError("no run is given. Give one or more run directories: python -m analysis.report runs/NAME")
    if len(outputs) > 1:
        raise UserError(f"html is given {len(outputs)} times. Give it once.")
    run_dirs = [Path(expand_user(name)) for name in names]
    for run_dir in run_dirs:
        if not run_dir.is_dir():
            raise UserError(f"{run_dir} is not a directory. Give the directory of a run, such as runs/NAME.")
    default = run_dirs[0] / "report.html" if len(run_dirs) == 1 else Path("comparison.html")
    page = Path(expand_user(outputs[0])) if outputs else default
    check_suffix("html", str(page), ".html")

    runs = [load_run(run_dir.absolute()) for run_dir in run_dirs]
    for run in runs:
        for note in run.notes:
            print_note(f"{run.run_dir}: {note}")
    save_page(report_page(runs), page)
    print(f"report: {page}")


if __name__ == "__main__":
    entry_point(main)
