"""A table of what examples end with, at the end of `make examples`."""

from rich.console import Console
from rich.table import Table


def pytest_terminal_summary(terminalreporter):
    """Seconds and last line of each script that ran."""
    passed = terminalreporter.stats.get("passed", [])
    rows = [
        (f"{report.duration:.0f}", *text.split(" ", 1))
        for report in passed
        for name, text in getattr(report, "user_properties", ())
        if name == "example" and report.when == "call"
    ]
    if rows:
        table = Table("seconds", "example", "ends with", title="examples")
        for row in sorted(rows, key=lambda row: row[1:]):
            table.add_row(*row)
        Console(file=terminalreporter._tw._file, width=160, highlight=False).print(table)
