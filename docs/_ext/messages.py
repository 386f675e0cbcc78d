"""Collect the messages of the English pages, and update the po files with them."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path

import polib
from babel.messages.extract import extract_from_file
from sphinx.cmd.build import main as sphinx

from docs._ext import catalog, exercise_messages, figures
from docs._ext.catalog import HEADER, words_in_html
from docs._ext.collect import HERE, ROOT, SOURCE_FOLDERS, SOURCE_PAGES, collect, copy
from docs._ext.compare import NUMBER, has_words
from docs._ext.editions import parser

ENGLISH_ONLY = re.compile(rf"api$|CONTRIBUTING$|tests/|models/.+/|{SOURCE_PAGES}")


def source_text(path: Path) -> str:
    """Return a page's Markdown; a notebook's cells are separated by blank lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def text_hash(text: str) -> str:
    """Return a hash of a page's text without its numbers, which each rendering changes."""
    return hashlib.sha256(NUMBER.sub("0", text).encode()).hexdigest()[:16]


def renumbered(old: polib.POEntry, message: str) -> polib.POEntry:
    """Return an entry whose message differs from the old entry's only in its numbers.

    It is fuzzy if one old number became two different new ones.
    """
    pairs = set(zip(NUMBER.findall(old.msgid), NUMBER.findall(message), strict=True))
    new_numbers = dict(pairs)
    text = NUMBER.sub(lambda match: new_numbers.get(match[0], match[0]), old.msgstr)
    flags = old.flags if len(new_numbers) == len(pairs) else ["fuzzy"]
    return polib.POEntry(msgid=message, msgstr=text, flags=flags)


def fuzzy_or_new(message: str, lost: dict[str, polib.POEntry]) -> polib.POEntry:
    """Return an entry with the translation of the most similar lost message, if there is one."""
    similar = difflib.get_close_matches(message, lost, n=1, cutoff=0.6)
    if not similar:
        return polib.POEntry(msgid=message)
    return polib.POEntry(
        msgid=message,
        msgstr=lost[similar[0]].msgstr,
        flags=["fuzzy"],
        previous_msgid=similar[0],
    )


def updated(old: list[polib.POEntry], messages: list[str], text: str) -> polib.POFile:
    """Return a page's po file: kept, renumbered, fuzzy and new entries, in the messages' order."""
    new = polib.POFile(wrapwidth=0)
    new.metadata = HEADER | {"X-Source": text_hash(text)}
    known = {entry.msgid: entry for entry in old}
    lost = {key: entry for key, entry in known.items() if entry.msgstr and key not in messages}
    by_shape = {NUMBER.sub("0", key): entry for key, entry in lost.items()}
    for message in messages:
        shape = NUMBER.sub("0", message)
        if message in known:
            new.append(known[message])
        elif shape in by_shape:
            new.append(renumbered(by_shape[shape], message))
        else:
            new.append(fuzzy_or_new(message, lost))
    return new


def in_order(messages: list[str], text: str) -> list[str]:
    """Return a page's messages that have words, and the texts in its HTML, in the page's order."""
    places = {}
    for place, token in enumerate(parser().parse(text)):
        if token.type in ("inline", "html_block"):
            for message in (" ".join(token.content.split()), *words_in_html(token.content)):
                places.setdefault(message, place)
    place = 0
    kept = list(dict.fromkeys(filter(has_words, [*messages, *words_in_html(text)])))
    for message in kept:
        place = places.setdefault(message, place)  # inside a directive: after the message before
    return sorted(kept, key=places.get)


def collect_sources(folder: Path) -> None:
    """Copy the site's pages, the README and the slides into a folder."""
    collect(folder)
    for name in ("README.md", "slides/slides.md"):
        copy(ROOT / name, folder / name)


def extract(work: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the messages, and the Markdown, of each page, the README and the slides."""
    source = work / "source"
    kept = work / "messages.json"
    collect_sources(source)
    options = ["-Q", "-b", "gettext", "-c", str(HERE)]
    options += ["-D", "exclude_patterns=" + ",".join(f"{folder}/**" for folder in SOURCE_FOLDERS)]
    options += ["-D", f"messages_file={kept}"]
    if sphinx([*options, str(source), str(work / "pot")]):
        sys.exit("Sphinx could not read the pages; `make site` shows its messages.")
    texts = {}
    for path in [*source.rglob("*.md"), *source.rglob("*.ipynb")]:
        texts[str(path.relative_to(source).with_suffix(""))] = source_text(path)
    messages = json.loads(kept.read_text(encoding="utf-8"))
    pages = {name: page for name, page in messages.items() if not ENGLISH_ONLY.match(name)}
    return pages, texts


def said_by_site() -> list[str]:
    """Return the strings that the code in this folder passes to ``catalog.say``."""
    messages = []
    for path in sorted(HERE.glob("_ext/*.py")):
        said = extract_from_file("python", path, keywords={"say": None})
        messages += [message if isinstance(message, str) else message[0] for _, message, *_ in said]
    return messages


def update() -> None:
    """Update the po files from the English sources, and print how many messages there are."""
    with tempfile.TemporaryDirectory() as work:
        pages, texts = extract(Path(work))
    pages = {name: in_order(messages, texts[name]) for name, messages in pages.items()}
    from_code = {
        "site": said_by_site(),
        "exercises": exercise_messages.messages(),
        "figures": figures.messages(),
    }
    for name, messages in from_code.items():
        pages[name] = list(dict.fromkeys(messages))
        texts[name] = "\n\n".join(messages)
    remove_repeated(pages)
    for name, messages in pages.items():
        path = catalog.po_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        po = updated(catalog.entries(path), messages, texts[name])
        path.write_text(f"{po}\n", encoding="utf-8")
    for path in catalog.po_files():
        if catalog.page_name(path) not in pages:
            path.unlink()
    counted = [entry for path in catalog.po_files() for entry in catalog.entries(path)]
    print(f"{len(counted)} messages, {sum(map(catalog.is_done, counted))} translated")


def remove_repeated(pages: dict[str, list[str]]) -> None:
    """Remove, in place, other pages' messages from recorded runs, which repeat the notebooks."""
    folders = ("notebooks/scratch/", "notebooks/small/")
    recorded = [name for name in sorted(pages) if name.startswith(folders)]
    seen = {text for name, page in pages.items() if name not in recorded for text in page}
    for name in recorded:
        pages[name] = [message for message in pages[name] if message not in seen]
        seen |= {*pages[name]}
