"""Manage the course's translations in locale/.

python docs/_ext/translate.py po               update locale/ from the English sources
python docs/_ext/translate.py write            write README.zh.md, figs/zh and build/zh/notebooks
python docs/_ext/translate.py check [FILE …]   compare translations with their messages
python docs/_ext/translate.py release          fail if a message is missing or fuzzy
"""

from __future__ import annotations

import sys
from pathlib import Path

from docs._ext import figures
from docs._ext.catalog import catalog, entries, finished, is_done, page_name, po_files
from docs._ext.collect import ROOT
from docs._ext.compare import problems
from docs._ext.editions import readme_in_chinese, write_notebooks
from docs._ext.messages import update


def write() -> None:
    """Write README.zh.md, the figures in figs/zh, and the Chinese notebooks into build/zh."""
    figures.draw(ROOT / "figs" / "zh", catalog("figures"))
    (ROOT / "README.zh.md").write_text(readme_in_chinese(), encoding="utf-8")
    write_notebooks(ROOT / "build" / "zh", up="../../")
    print("README.zh.md, figs/zh, build/zh/notebooks")


def check(paths: list[Path]) -> None:
    """Exit with the problems of the translations in po files."""
    lines = []
    for path in paths:
        for message, translation in finished(path).items():
            for problem in problems(message, translation):
                lines.append(f"{path.name}: {message[:60]!r}: {problem}")
    if lines:
        sys.exit("\n".join(lines))


def release() -> None:
    """Exit with the number of missing and fuzzy translations per page, if there are any."""
    lines = []
    for path in po_files():
        missing = sum(not is_done(entry) for entry in entries(path))
        if missing:
            lines.append(f"{page_name(path)}: {missing} missing or fuzzy")
    if lines:
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["po"]:
            update()
        case ["write"]:
            write()
        case ["check", *names]:
            check([Path(name) for name in names] or po_files())
        case ["release"]:
            release()
        case _:
            sys.exit(__doc__)
