"""Manage the course's translations: messages of the English pages, and gettext's po files.

python docs/_ext/translate.py po               update locale/ from the English sources
python docs/_ext/translate.py write            write README.zh.md, figs/zh and build/zh/notebooks
python docs/_ext/translate.py check [FILE …]   compare translations with their messages
python docs/_ext/translate.py release          fail if a message is missing or fuzzy
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import polib

from docs._ext import exercise_messages, figures
from docs._ext.compare import LOCALE, NUMBER, has_words, problems

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
LANGUAGE = "zh_CN"
PO = LOCALE / LANGUAGE / "LC_MESSAGES"
ENGLISH_ONLY = re.compile(
    r"api$|CONTRIBUTING$|tests/|models/.+/|rlhf_course/|scripts/|figs/(?!README)"
)
CODE_PAGES = "rlhf_course/**", "scripts/**", "figs/*.py"
CHECK_MESSAGES = "notebooks/exercises/messages.json"
HEADER = {"Language": LANGUAGE, "Content-Type": "text/plain; charset=UTF-8"}
HEADER |= {"MIME-Version": "1.0", "Content-Transfer-Encoding": "8bit"}
HTML = re.compile(
    r"(<(summary|label|th|noscript|caption|button|h3|p|span)\b[^>]*>)([^<>]+)(</\2>|(?= <))"
)
DOCSTRING = re.compile(r'(?<=""").+?(?=""")', re.S)
TITLE = re.compile(r"<title>(.*?)</title>")
ALT = re.compile(r"(?<=!\[)[^]]+(?=\]\()")
LEAD = r"(?P<lead>^[ \t]*(?:(?:>|[-*+]|\d+\.|#{1,6}|:)[ \t]+)*|\|[ \t]*)"
TAIL = r"(?=[ \t]*(?:\||\n?\Z|\n[ \t]*(?:\n|[-*+>#|:<]|\d+\. |```)))"


def done(entry: polib.POEntry) -> bool:
    """Return whether an entry is translated and not fuzzy."""
    return bool(entry.msgstr) and "fuzzy" not in entry.flags


def catalog(name: str) -> dict[str, str]:
    """Return a page's finished translations; other pages' translations fill its gaps."""
    return shared() | (finished(PO / f"{name}.po") if (PO / f"{name}.po").exists() else {})


@cache
def shared() -> dict[str, str]:
    """Return the finished translations of all pages."""
    return {key: text for path in files() for key, text in finished(path).items()}


def finished(path: Path) -> dict[str, str]:
    """Return a po file's finished translations."""
    return {e.msgid: e.msgstr for e in polib.pofile(str(path)) if done(e)}


def files() -> list[Path]:
    """Return the po files."""
    return sorted(PO.rglob("*.po"))


def messages_of(name: str) -> list[str]:
    """Return a page's messages."""
    path = PO / f"{name}.po"
    return [entry.msgid for entry in polib.pofile(str(path))] if path.exists() else []


def say(text: str, language: str = "en") -> str:
    """Return one of the site's own texts, translated into a page's language."""
    return text if language == "en" else shared().get(text, text)


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


def as_pattern(message: str) -> str:
    """Return a pattern that finds a message in its page, wherever lines break."""
    pattern = r"\s+(?:>[ \t]*)?".join(map(re.escape, message.split()))
    return pattern.replace(r"\|", r"\\?\|")  # a table's cell escapes a bar


def squeezed(text: str) -> str:
    """Return Markdown as one line, without the marks that begin a quotation's lines."""
    return re.sub(r"[\s>]+", " ", text.replace(r"\|", "|"))


def translator(found: dict[str, str], messages: list[str] = ()) -> Callable[[str], str]:
    """Return a function that translates Markdown; untranslated paragraphs stay in English."""
    known = {" ".join(key.split()): found.get(key, "") for key in {*messages, *found}}
    longest = [(key, squeezed(key)) for key in sorted(known, key=len, reverse=True)]

    def replace(match: re.Match) -> str:
        key = " ".join(re.sub(r"\n[ \t]*>", " ", match["message"]).split())
        text = known.get(key if key in known else key.replace(r"\|", "|")) or match["message"]
        if "|" in match["lead"]:
            text = re.sub(r"(?<!\\)\|", r"\\|", text)
        return match["lead"] + text

    def translated(text: str) -> str:
        line = squeezed(text)
        inside = "|".join(as_pattern(key) for key, short in longest if short in line)
        if inside:
            text = re.sub(f"{LEAD}(?P<message>{inside}){TAIL}", replace, text, flags=re.M)
        return in_html(text, found)

    return translated


def in_html(text: str, found: dict[str, str]) -> str:
    """Return Markdown with the texts in its HTML and images translated."""
    text = ALT.sub(lambda m: found.get(" ".join(m[0].split()), m[0]), text)
    return HTML.sub(lambda m: m[1] + found.get(m[3].strip(), m[3]) + m[4], text)


def renumbered(old: polib.POEntry | None, message: str) -> polib.POEntry | None:
    """Return the old entry with the message's numbers, or None without an old entry."""
    if old is None:
        return None
    pairs = set(zip(NUMBER.findall(old.msgid), NUMBER.findall(message), strict=True))
    new = dict(pairs)
    text = NUMBER.sub(lambda m: new.get(m[0], m[0]), old.msgstr)
    flags = old.flags if len(new) == len(pairs) else ["fuzzy"]
    return polib.POEntry(msgid=message, msgstr=text, flags=flags)


def updated(old: list[polib.POEntry], messages: list[str], text: str) -> polib.POFile:
    """Return a page's po file: kept, renumbered, fuzzy and new entries, in the page's order."""
    known, new = {entry.msgid: entry for entry in old}, polib.POFile(wrapwidth=0)
    new.metadata = HEADER | {"X-Source": text_hash(text)}
    lost = {e.msgid: e for e in old if e.msgstr and e.msgid not in messages}
    shapes = {NUMBER.sub("0", key): entry for key, entry in lost.items()}
    for message in messages:
        entry = known.get(message) or renumbered(shapes.get(NUMBER.sub("0", message)), message)
        if entry is None:
            entry = polib.POEntry(msgid=message)
            for close in difflib.get_close_matches(message, lost, n=1, cutoff=0.6):
                entry.msgstr, entry.flags, entry.previous_msgid = (
                    lost[close].msgstr,
                    ["fuzzy"],
                    close,
                )
        new.append(entry)
    return new


def in_order(messages: list[str], text: str) -> list[str]:
    """Return a page's messages that have words, and the texts in its HTML, in the page's order."""
    words = [*messages, *(match[3].strip() for match in HTML.finditer(text))]
    place, places = 0, {}
    for message in dict.fromkeys(filter(has_words, words)):
        pattern = as_pattern(message)
        match = re.search(f"{LEAD}{pattern}{TAIL}", text, re.M) or re.search(pattern, text)
        place = places[message] = match.start() if match else place
    return sorted(places, key=places.get)


def collect_sources(folder: Path) -> None:
    """Copy the site's pages, the README and the slides into a folder."""
    from docs._ext.build import collect

    collect(folder)
    for name in ("README.md", "slides/slides.md"):
        (folder / name).write_bytes((ROOT / name).read_bytes())


def extract(work: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the messages, and the Markdown, of each page, the README and the slides."""
    from sphinx.cmd.build import main as sphinx

    source, kept = work / "source", work / "messages.json"
    collect_sources(source)
    settings = f"exclude_patterns={','.join(CODE_PAGES)}", f"messages_file={kept}"
    options = [option for setting in settings for option in ("-D", setting)]
    if sphinx(["-Q", "-b", "gettext", "-c", str(HERE), *options, str(source), str(work / "pot")]):
        sys.exit("Sphinx could not read the pages; `make site` shows its messages.")
    texts = {}
    for path in [*source.rglob("*.md"), *source.rglob("*.ipynb")]:
        texts[str(path.relative_to(source).with_suffix(""))] = source_text(path)
    messages = json.loads(kept.read_text(encoding="utf-8"))
    return {name: found for name, found in messages.items() if not ENGLISH_ONLY.match(name)}, texts


def update() -> None:
    """Update the po files from the English sources."""
    with tempfile.TemporaryDirectory() as work:
        pages, texts = extract(Path(work))
    code = "".join(p.read_text(encoding="utf-8") for p in sorted(HERE.glob("_ext/*.py")))
    said = re.findall(r'\b(?:say|words)\(\s*((?:"[^"]*"\s*)+)[,)]', code)
    pages["site"] = ["".join(re.findall('"([^"]*)"', one)) for one in said]
    pages |= {"exercises": exercise_messages.messages(), "figures": figures.messages()}
    for name in ("site", "exercises", "figures"):
        texts[name] = "\n\n".join(pages[name])
    seen = set()
    for name in sorted(pages, key=lambda name: name.startswith("notebooks/scratch/")):
        messages = pages[name]
        if name not in ("exercises", "figures"):
            messages = in_order(messages, texts[name])
        if name.startswith("notebooks/scratch/"):  # recorded runs of the same notebooks
            messages = [message for message in messages if message not in seen]
        seen |= {*messages}
        path = PO / f"{name}.po"
        path.parent.mkdir(parents=True, exist_ok=True)
        old = polib.pofile(str(path)) if path.exists() else []
        path.write_text(str(updated(old, messages, texts[name])) + "\n", encoding="utf-8")
    for path in files():
        if str(path.relative_to(PO).with_suffix("")) not in pages:
            path.unlink()
    counted = [entry for path in files() for entry in polib.pofile(str(path))]
    print(f"{len(counted)} messages, {sum(map(done, counted))} translated")


@cache
def translated_figures() -> dict[str, str]:
    """Return the Chinese SVG of each figure, by the English figure's title."""
    pairs = ((p.read_text("utf-8"), p.parent / "zh" / p.name) for p in ROOT.glob("figs/*.svg"))
    return {TITLE.search(svg)[1]: zh.read_text("utf-8") for svg, zh in pairs if zh.exists()}


def translate_code(cell: dict) -> None:
    """Translate, in place, a stub's docstring, and replace the course's figures in outputs."""
    if cell["metadata"].get("exercise", {}).get("part") == "answer":
        stubs = catalog("exercises")
        source = DOCSTRING.sub(
            lambda match: stubs.get(" ".join(match[0].split()), match[0]),
            "".join(cell["source"]),
            1,
        )
        cell["source"] = source.splitlines(True)
    for output in cell["outputs"]:
        title = TITLE.search("".join(output.get("data", {}).get("image/svg+xml", "")))
        if title and (chinese := translated_figures().get(title[1])):
            output["data"]["image/svg+xml"] = chinese.splitlines(True)


def notebook_in_chinese(path: Path, up: str = "") -> dict:
    """Return a notebook with its Markdown, its stubs' docstrings and its figures translated.

    Links out of the notebooks' folder start with ``up``.
    """
    from docs._ext.build import for_site

    name = str(path.relative_to(ROOT).with_suffix("")).removesuffix("_solved")
    translated = translator(catalog(name), messages_of(name))

    def link(match: re.Match) -> str:
        target = match[1]
        if not (path.parent / target).exists():  # the site's pages are one folder up
            target = re.sub(r"^((?:\.\./)+)", r"\1site/", target)
        inside = (path.parent / target).resolve().is_relative_to(ROOT / "notebooks")
        return f"]({'' if inside else up}{target}"

    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = with_figures(translated(for_site("".join(cell["source"]))))
            cell["source"] = re.sub(r"\]\((\.\./[^)#\s]*)", link, text).splitlines(True)
        elif cell["cell_type"] == "code":
            translate_code(cell)
    return notebook


def with_figures(text: str) -> str:
    """Return Markdown that shows the Chinese figures."""
    return re.sub(r"\bfigs/(?=\w+\.svg)", "figs/zh/", text)


def readme_in_chinese() -> str:
    """Return the text of README.zh.md."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("[中文](README.zh.md)", "[English](README.md)")
    chinese = translator(catalog("README"), messages_of("README"))(text)
    return with_figures(chinese).replace("slides/slides.pdf", "slides/slides.zh.pdf")


def slides_in_chinese() -> str:
    """Return the Markdown of the Chinese slides; speaker notes stay in English."""
    text = (ROOT / "slides" / "slides.md").read_text(encoding="utf-8")
    text = text.replace("\nlang: en\n", "\nlang: zh-CN\n", 1)
    return with_figures(translator(catalog("slides/slides"), messages_of("slides/slides"))(text))


def write(folder: Path = ROOT / "build" / "zh", up: str = "../../") -> None:
    """Write the Chinese notebooks, and the messages of `check`, with the course's layout."""
    paths = [p for p in ROOT.glob("notebooks/**/*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    for path in paths:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(notebook_in_chinese(path, up), ensure_ascii=False, indent=1)
        target.write_text(text + "\n", encoding="utf-8")
    said = finished(PO / "exercises.po")
    text = json.dumps(said, ensure_ascii=False, indent=0)
    (folder / CHECK_MESSAGES).write_text(text + "\n", encoding="utf-8")


def write_all() -> None:
    """Write README.zh.md, the figures in figs/zh, and the Chinese notebooks into build/zh."""
    figures.draw(ROOT / "figs" / "zh", catalog("figures"))
    (ROOT / "README.zh.md").write_text(readme_in_chinese(), encoding="utf-8")
    write()
    print("README.zh.md, figs/zh, build/zh/notebooks")


def check(*names: str) -> None:
    """Exit with the problems of all translations, or of the translations in the named po files."""
    found = []
    for path in [Path(name) for name in names] or files():
        for entry in filter(done, polib.pofile(str(path))):
            found += [
                f"{path.name}: {entry.msgid[:60]!r}: {p}"
                for p in problems(entry.msgid, entry.msgstr)
            ]
    sys.exit("\n".join(found) or 0)


def release() -> None:
    """Exit with the number of missing and fuzzy translations per page, if there are any."""
    counts = {p: sum(not done(e) for e in polib.pofile(str(p))) for p in files()}
    sys.exit(
        "\n".join(f"{p.relative_to(PO)}: {n} missing or fuzzy" for p, n in counts.items() if n) or 0
    )


if __name__ == "__main__":
    commands = {"po": update, "write": write_all, "check": check, "release": release}
    if sys.argv[1:2] == [] or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
