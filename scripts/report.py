"""Write one self-contained page about runs: checks passed, measurements, and curves.

CARDS are run cards or folders of them: run_notebooks.py's output folder, or a folder with
one such folder per person. They may also be output folders of the training commands.
"""

import argparse
import sys
from pathlib import Path

from rlhf_course.command_line import exits
from rlhf_course.command_line.run_report import show, write


def main(arguments: list[str]) -> int:
    """Write the page and print problems; return 1 if a run or card has a problem, else 0."""
    parser = argparse.ArgumentParser(
        "report.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "cards", nargs="+", type=Path, metavar="CARDS", help="run cards, or folders of them"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.html"),
        help="page to write (default: report.html)",
    )
    chosen = parser.parse_args(arguments)
    entries = write(chosen.cards, chosen.output.resolve())
    show(entries)
    print(f"Open {chosen.output}")
    return int(any(entry["problem"] for entry in entries))


if __name__ == "__main__":
    sys.exit(exits.run("report.py", main))
