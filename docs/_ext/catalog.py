"""Read the translations in locale/: gettext's po files, one per page."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import polib

from docs._ext.compare import LOCALE

LANGUAGE = "zh_CN"
PO = LOCALE / LANGUAGE / "LC_MESSAGES"
HEADER = {
    "Language": LANGUAGE,
    "Content-Type": "text/plain; charset=UTF-8",
    "MIME-Version": "1.0",
    "Content-Transfer-Encoding": "8bit",
}
# The words between two tags; the closing tag may be missing from a table's header.
HTML = re.compile(
    r"(<(summary|label|th|noscript|caption|button|h3|p|span)\b[^>]*>)([^<>]+)(</\2>|(?= <))"
)
ALT = re.compile(r"(?<=!\[)[^]]+(?=\]\()")


def is_done(entry: polib.POEntry) -> bool:
    """Return whether an entry is translated and not fuzzy."""
    return bool(entry.msgstr) and "fuzzy" not in entry.flags


def po_path(name: str) -> Path:
    """Return the path of a page's po file, which need not exist."""
    return PO / f"{name}.po"


def page_name(path: Path) -> str:
    """Return the name of the page that a po file belongs to."""
    return str(path.relative_to(PO).with_suffix(""))


def po_files() -> list[Path]:
    """Return the paths of all po files."""
    return sorted(PO.rglob("*.po"))


def entries(path: Path) -> list[polib.POEntry]:
    """Return the entries of a po file, or [] if it does not exist."""
    return polib.pofile(str(path)) if path.exists() else []


def finished(path: Path) -> dict[str, str]:
    """Return a po file's finished translations."""
    return {entry.msgid: entry.msgstr for entry in entries(path) if is_done(entry)}


@cache
def shared() -> dict[str, str]:
    """Return the finished translations of all pages."""
    translations = {}
    for path in po_files():
        translations |= finished(path)
    return translations


def catalog(name: str) -> dict[str, str]:
    """Return a page's finished translations; other pages' translations fill its gaps."""
    return shared() | finished(po_path(name))


def messages_of(name: str) -> list[str]:
    """Return a page's messages."""
    return [entry.msgid for entry in entries(po_path(name))]


def say(text: str, language: str = "en") -> str:
    """Return one of the site's own texts, translated into a page's language.

    The command ``translate.py po`` collects the strings that are passed to this function.
    """
    return text if language == "en" else shared().get(text, text)


def words_in_html(text: str) -> list[str]:
    """Return the texts between the tags of Markdown or HTML."""
    return [match[3].strip() for match in HTML.finditer(text)]


def in_html(text: str, translations: dict[str, str]) -> str:
    """Return Markdown with the texts in its HTML and images translated."""

    def image_words(match: re.Match) -> str:
        return translations.get(" ".join(match[0].split()), match[0])

    def tag_words(match: re.Match) -> str:
        opening, _, words, closing = match.groups()
        return opening + translations.get(words.strip(), words) + closing

    return HTML.sub(tag_words, ALT.sub(image_words, text))
