"""Extend Sphinx: add source pages, fit notebooks to every screen, and link definitions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from bs4 import BeautifulSoup, NavigableString, Tag
from docutils import nodes
from sphinx.addnodes import index
from sphinx.application import Sphinx
from sphinx.parsers import Parser
from sphinx.transforms import SphinxTransform
from sphinx.util.images import get_image_size

from docs._ext.address import addresses, open_in
from docs._ext.catalog import catalog, say
from docs._ext.home import ARCHIVE, cost, table
from docs._ext.languages import mark_english
from docs._ext.metrics import anchor
from rlhf_course.ppo.stats import MEANING

SCRIPTS = {  # notebook → the equivalent commands
    "01_reward_modeling": ["train_reward_model"],
    "04_gpt2_imdb_ppo": ["train_ppo"],
    "05_lora_rlhf_baichuan": ["convert_baichuan", "train_sft", "train_reward_model", "train_ppo"],
}
TEXT = 22  # characters; a table column with a longer cell contains text
GLOSSARY = Path(__file__).parents[1].joinpath("glossary.md")
GENERATED = ("index", "404", "search", "quiz")  # pages without prose of their own
HEADINGS = ["h1", "h2", "h3", "h4", "dt", "th", "summary"]
CHINESE = re.compile(
    r"((?:[\u3000-\u303f\uff00-\uffef]*[\u3400-\u9fff]+[\u3000-\u303f\uff00-\uffef]*)+)"
)
WIDE = 760  # pixels; on a phone, wider figures stay readable and scroll


class SourceParser(Parser):
    """Parse a source file into a page with the path as title; the search skips the code."""

    supported = ("source",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        env = document.settings.env
        path = Path(env.doc2path(env.docname, base=False))
        if env.config.language != "en":
            inputstring = ""  # all languages share the English source pages
        code = nodes.literal_block(inputstring, inputstring, language=path.suffix[1:], linenos=True)
        document += nodes.section(
            "", nodes.title(text=str(path)), code, ids=["source"], names=["source"]
        )
        env.metadata[env.docname]["nosearch"] = "true"


class StatsFirst(SphinxTransform):
    """Index stats by full name and by its last part; the search ranks index entries first."""

    default_priority = 840  # just before Sphinx collects index entries

    def apply(self, **kwargs) -> None:
        if self.env.docname != "metrics":
            return
        for section in self.document.findall(nodes.section):
            key = section[0].astext()
            if "/" in key:
                names = dict.fromkeys([key, key.rsplit("/")[-1]])
                entries = [("single", name, anchor(key), "main", None) for name in names]
                section.insert(1, index(entries=entries))


def polish(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Finish a page in place: images, tables, a notebook's header, links to terms and stats, and
    languages.
    """
    if "body" not in context:
        return
    body = BeautifulSoup(context["body"], "html.parser")
    _fit_images(body, app)
    _fit_tables(body)
    for summary in body.select("summary[aria-label]"):
        del summary["aria-label"]  # the visible text is clearer
    if re.fullmatch(r"notebooks/.*\d_\w+", pagename):
        _head(body, pagename.removeprefix("notebooks/"), app)
    if pagename not in GENERATED:
        _link_stats(body, pagename, app)
        _link_terms(body, pagename, app)
    if app.config.language == "en":
        _mark_chinese(body)
    elif pagename != "404":
        mark_english(app, pagename, body)
    context["body"] = str(body)
    if pagename == "404":  # served at any depth
        root = urlsplit(addresses().get("homepage", "")).path
        context["metatags"] = f'<base href="{root}/">\n{context["metatags"]}'


def _fit_images(body: BeautifulSoup, app: Sphinx) -> None:
    """Give images their size, so that the page does not jump, and wide ones room to scroll."""
    files = {name: path for path, (_, name) in app.env.images.items()}
    for number, image in enumerate(body.find_all("img")):
        size = get_image_size(Path(app.srcdir, files.get(Path(image["src"]).name, "")))
        if size:
            image["width"], image["height"] = size
        if number:
            image["loading"] = "lazy"
        is_wide = bool(size) and size[0] > WIDE
        is_output = image.find_parent(class_="cell_output") is not None
        if is_output:
            image["alt"] = _caption(image) or "Figure"
        if is_output or is_wide:
            kind = "figure wide" if is_wide else "figure"
            image.wrap(body.new_tag("span", attrs={"class": kind}))


def _fit_tables(body: BeautifulSoup) -> None:
    """Let tables of outputs scroll, and turn empty headers into plain cells."""
    for grid in body.select(".output.text_html table"):
        grid.wrap(body.new_tag("div", attrs={"class": "table-wrapper"}))
        _mark_text(grid)
    for cell in body.find_all("th", string=lambda text: not (text or "").strip()):
        cell.name = "td"


def term_id(term: str) -> str:
    """Return a term's anchor on the glossary page, as Sphinx generates it."""
    return re.sub("[^a-zA-Z0-9._]+", "-", term).strip("-")


def _link_stats(body: BeautifulSoup, pagename: str, app: Sphinx) -> None:
    """Link each stat's name to its section of the page about metrics."""
    if pagename == "metrics":
        return
    page = app.builder.get_relative_uri(pagename, "metrics")
    for name in body.find_all(string=list(MEANING)):
        is_named = name.find_parent(["code", "th", "td"])
        is_elsewhere = name.find_parent(["a", "pre", "summary", "h1", "h2", "h3", "h4"])
        if is_named and not is_elsewhere:
            link = body.new_tag("a", href=f"{page}#{anchor(name)}", title=MEANING[name])
            name.wrap(link)


def _link_terms(body: BeautifulSoup, pagename: str, app: Sphinx) -> None:
    """Link each glossary term's first occurrence to its entry."""
    if pagename == "glossary":
        return
    page = app.builder.get_relative_uri(pagename, "glossary")
    terms, pattern = _glossary(app.config.language)
    linked = set()
    for text in _prose(body):
        pieces = []
        end = 0
        for match in pattern.finditer(text):
            name = _term_of(match[0], terms)
            if name in linked:
                continue
            linked.add(name)
            english, meaning = terms[name]
            link = body.new_tag("a", href=f"{page}#term-{term_id(english)}", title=meaning)
            link["class"] = "term"
            link.string = match[0]
            pieces += [text[end : match.start()], link]
            end = match.end()
        if pieces:
            text.replace_with(*pieces, text[end:])


def _prose(body: BeautifulSoup) -> list[NavigableString]:
    """Return the texts of paragraphs, lists and tables, without links, code and headings."""
    skipped = ["a", "code", "pre", "figcaption", "details", *HEADINGS]
    texts = []
    for tag in body.select("p, li, td"):
        for text in tag.find_all(string=True, recursive=False):
            if not text.find_parent(skipped):
                texts.append(text)
    return texts


def _term_of(word: str, terms: dict) -> str:
    """Return the glossary's term for a word, which may be capitalized or plural."""
    candidates = (word, word.removesuffix("s"), word.lower(), word.lower().removesuffix("s"))
    return next(name for name in candidates if name in terms)


def _glossary(language: str) -> tuple[dict[str, tuple[str, str]], re.Pattern]:
    """Map each term to its English term and first sentence; also return a pattern for terms."""
    translations = {} if language == "en" else catalog("glossary")
    terms = {}
    text = GLOSSARY.read_text(encoding="utf-8")
    for names, definition in re.findall(r"^((?:\S.*\n)+)((?:  .*\n?)+)", text, re.M):
        english = " ".join(definition.split())
        meaning = _first_sentence(translations.get(english, english))
        for name in names.splitlines():
            if not name.startswith("`"):
                shown = re.sub("（.*", "", translations.get(name, name))
                terms[shown] = (name, meaning)
    return terms, _terms_pattern(terms)


def _first_sentence(definition: str) -> str:
    """Return a definition's first sentence without its Markdown."""
    plain = re.sub(r"\{term\}|\[([^]]*)\]\([^)]*\)|[`*]|(?<=\w|）) <[^>]*>", r"\1", definition)
    return re.split(r"(?<=[.;:])\s|(?<=[。；：])", plain)[0]


def _terms_pattern(terms: Iterable[str]) -> re.Pattern:
    """Return a pattern that finds terms, the longest first; English ones may be plural."""
    longest = sorted(terms, key=len, reverse=True)
    words = []
    chinese = []
    for term in longest:
        if CHINESE.search(term):
            if len(term) > 1:
                chinese.append(re.escape(term))
        elif len(term) > 2 or term.isupper():
            words.append(term)
    words += [word.capitalize() for word in words if word.islower()]
    english = rf"(?<![\w-])(?:{'|'.join(map(re.escape, words))})s?(?![\w-])"
    return re.compile("|".join([english, *chinese]))


def _mark_chinese(body: BeautifulSoup) -> None:
    """Mark Chinese text as Chinese, for screen readers and fonts."""
    for text in body.find_all(string=CHINESE):
        if text.parent.name in ("title", "script", "style"):
            continue
        pieces = []
        for number, piece in enumerate(CHINESE.split(text)):
            if number % 2:  # every second piece is Chinese
                span = body.new_tag("span", attrs={"lang": "zh"})
                span.string = piece
                pieces.append(span)
            else:
                pieces.append(piece)
        text.replace_with(*pieces)


def _mark_text(table: Tag) -> None:
    """Add a class to text columns, so that they are not styled as numbers."""
    columns: dict[int, list[Tag]] = {}
    for row in table.find_all("tr"):
        for column, cell in enumerate(row.find_all(["th", "td"])):
            columns.setdefault(column, []).append(cell)
    for cells in columns.values():
        if any(len(cell.text.strip()) > TEXT for cell in cells if cell.find_parent("tbody")):
            for cell in cells:
                cell["class"] = [*cell.get("class", []), "text"]


def _caption(image: Tag) -> str:
    """Return the text after “**Figure 1.2.**” in an image's caption; mark the caption."""
    for paragraph in image.find_all_next("p", limit=3):
        if paragraph.strong and paragraph.strong.text.startswith(("Figure", "图")):
            paragraph["class"] = [*paragraph.get("class", []), "figure-caption"]
            return " ".join(paragraph.text.removeprefix(paragraph.strong.text).split())
    return ""


def _head(body: BeautifulSoup, name: str, app: Sphinx) -> None:
    """Add lines under a notebook's title: its goal, files, requirements, scripts, and slides."""
    lead = _lead_text(name, app.config.language)
    line = body.new_tag("p", attrs={"class": "page-links"})
    for text, target, is_download in _links(name, app):
        link = body.new_tag("a", href=target, attrs={"download": ""} if is_download else {})
        link.string = text
        line.append(link)
        line.append(" ")
    if lead:
        paragraph = body.new_tag("p", attrs={"class": "lead"})
        paragraph.string = lead
        body.h1.insert_after(paragraph)
    body.h1.insert_after(line)


def _lead_text(name: str, language: str) -> str:
    """Return the sentences under a notebook's title; exercises and practice have none."""
    recorded = {
        "scratch": "This page runs the same cells on real data, at preset scratch.",
        "small": "This page runs the same cells with a pretrained chat model, at preset small.",
    }
    folder = name.partition("/")[0]
    if "/" in name and folder not in recorded:
        return ""
    takes = say("The notebook takes {cost} on two CPU cores.", language)
    takes = takes.format(cost=cost(name).removesuffix(" on two CPU cores"))
    if folder in recorded:
        warning = say(
            "The text describes preset tiny: if it differs from the measurements here, trust the"
            " numbers.",
            language,
        )
        return f"{takes} {say(recorded[folder], language)} {warning}"
    learn = table()[name]["learn"]
    goal = f"{learn[0].upper()}{learn[1:]}."  # the README's table, which has translations
    return f"{say(goal, language)} {takes}"


def _links(name: str, app: Sphinx) -> list[tuple[str, str, bool]]:
    """Return the links under a notebook's title: text, target, and whether it is a download."""
    language = app.config.language
    archive = f"{'../' * (1 + name.count('/'))}{ARCHIVE}"
    links = [
        (say("The notebook", language), f"{Path(name).name}.ipynb", True),
        (say("Everything it needs, as a zip", language), archive, True),
    ]
    if "/" in name:
        return links
    repository = addresses().get("repository", "")
    for service, url in open_in(repository, f"notebooks/{name}.ipynb").items():
        links.append((say(service, language), url, False))
    if f"notebooks/exercises/{name}" in app.env.found_docs:
        links.append((say("Exercises", language), f"exercises/{name}.html", False))
    for script in SCRIPTS.get(name, ()):
        links.append((f"{script}.py", f"../scripts/{script}.html", False))
    if "slides" in app.env.found_docs:
        links.append((say("Slides", language), "../slides/slides.html", False))
        links.append((say("Slides as a PDF", language), "../slides/slides.pdf", False))
    return links


def name_levels(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Set the navigation headings' level, because the theme omits it."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )


def setup(app: Sphinx) -> dict:
    """Register the parser, the transform and the page hooks with Sphinx."""
    app.add_source_parser(SourceParser)
    app.add_transform(StatsFirst)
    app.connect("html-page-context", polish, priority=400)  # before the theme's
    app.connect("html-page-context", name_levels, priority=600)  # after the theme's
    return {"parallel_read_safe": True}
