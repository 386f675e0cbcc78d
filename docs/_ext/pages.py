"""Extend Sphinx: add source pages, fit notebooks to every screen, and link definitions."""

from __future__ import annotations

import re
from functools import partial
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

from bs4 import BeautifulSoup, Tag
from docutils import nodes
from sphinx.addnodes import index
from sphinx.application import Sphinx
from sphinx.parsers import Parser
from sphinx.transforms import SphinxTransform
from sphinx.util.images import get_image_size

from docs._ext.address import addresses, open_in
from docs._ext.home import ARCHIVE, cost, table
from docs._ext.languages import mark_english
from docs._ext.metrics import anchor
from docs._ext.translate import catalog, say
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
    """Finish a page in place: images, tables, a notebook's header, links to terms and stats,
    languages, and preview metadata.
    """
    if "body" not in context:
        return
    body = BeautifulSoup(context["body"], "html.parser")
    files = {name: path for path, (_, name) in app.env.images.items()}
    for number, image in enumerate(body.find_all("img")):
        size = get_image_size(Path(app.srcdir, files.get(Path(image["src"]).name, "")))
        if size:
            image["width"], image["height"] = size
        if number:
            image["loading"] = "lazy"
        wide, output = size and size[0] > WIDE, image.find_parent(class_="cell_output")
        if output:
            image["alt"] = _caption(image) or "Figure"
        if output or wide:
            image.wrap(body.new_tag("span", attrs={"class": "figure wide" if wide else "figure"}))
    for grid in body.select(".output.text_html table"):
        grid.wrap(body.new_tag("div", attrs={"class": "table-wrapper"}))
        _mark_text(grid)
    for cell in body.find_all("th", string=lambda text: not (text or "").strip()):
        cell.name = "td"  # empty header
    for summary in body.select("summary[aria-label]"):
        del summary["aria-label"]  # the visible text is clearer
    if re.fullmatch(r"notebooks/.*\d_\w+", pagename):
        _head(body, pagename.removeprefix("notebooks/"), app)
    if pagename not in GENERATED:
        _link_terms(body, pagename, app)
    if app.config.language == "en":
        _mark_chinese(body)
    elif pagename != "404":
        mark_english(app, pagename, body)
    context["body"] = str(body)
    context["metatags"] += _metatags(body, pagename, context)


def term_id(term: str) -> str:
    """Return a term's anchor on the glossary page, as Sphinx generates it."""
    return re.sub("[^a-zA-Z0-9._]+", "-", term).strip("-")


def _link_terms(body: BeautifulSoup, pagename: str, app: Sphinx) -> None:
    """Link each stat to its section, and each glossary term's first occurrence to its entry."""
    to = partial(app.builder.get_relative_uri, pagename)
    for name in body.find_all(string=list(MEANING)) if pagename != "metrics" else ():
        if name.find_parent(["code", "th", "td"]) and not name.find_parent(
            ["a", "pre", "summary", *HEADINGS[:4]]
        ):
            name.wrap(
                body.new_tag("a", href=f"{to('metrics')}#{anchor(name)}", title=MEANING[name])
            )
    if pagename == "glossary":
        return
    terms, names = _glossary(app.config.language)
    linked = set()
    for text in [
        text
        for tag in body.select("p, li, td")
        for text in tag.find_all(string=True, recursive=False)
    ]:
        if text.find_parent(["a", "code", "pre", "figcaption", "details", *HEADINGS]):
            continue
        parts, end = [], 0
        for found in names.finditer(text):
            name = next(
                name
                for name in (found[0], found[0].lower())
                if name.removesuffix("s") in terms or name in terms
            )
            name = name if name in terms else name.removesuffix("s")
            if name not in linked:
                english, says = terms[name]
                address = f"{to('glossary')}#term-{term_id(english)}"
                link = body.new_tag("a", href=address, title=says)
                link["class"], link.string = "term", found[0]
                parts += [text[end : found.start()], link]
                end = found.end()
                linked.add(name)
        if parts:
            text.replace_with(*parts, text[end:])


def _glossary(language: str) -> tuple[dict[str, tuple[str, str]], re.Pattern]:
    """Map each term to its English term and first sentence; also return a pattern for terms."""
    text = GLOSSARY.read_text(encoding="utf-8")
    found = {} if language == "en" else catalog("glossary")
    terms = {}
    for names, says in re.findall(r"^((?:\S.*\n)+)((?:  .*\n?)+)", text, re.M):
        says = found.get(" ".join(says.split()), " ".join(says.split()))
        says = re.sub(r"\{term\}|\[([^]]*)\]\([^)]*\)|[`*]|(?<=\w|）) <[^>]*>", r"\1", says)
        says = re.split(r"(?<=[.;:])\s|(?<=[。；：])", says)[0]
        for name in names.splitlines():
            if not name.startswith("`"):
                terms[re.sub("（.*", "", found.get(name, name))] = name, says
    longest = sorted(terms, key=len, reverse=True)
    words = [t for t in longest if not CHINESE.search(t) and (len(t) > 2 or t.isupper())]
    words += [word.capitalize() for word in words if word.islower()]
    words = "|".join(map(re.escape, words))
    chinese = "".join(f"|{re.escape(t)}" for t in longest if CHINESE.search(t) and len(t) > 1)
    return terms, re.compile(rf"(?<![\w-])(?:{words})s?(?![\w-]){chinese}")


def _mark_chinese(body: BeautifulSoup) -> None:
    """Mark Chinese text as Chinese, for screen readers and fonts."""
    for text in [
        text
        for text in body.find_all(string=CHINESE)
        if text.parent.name not in ("title", "script", "style")
    ]:
        parts = CHINESE.split(text)  # every second part is Chinese
        tags = [
            body.new_tag("span", attrs={"lang": "zh"}) if odd % 2 else None
            for odd in range(len(parts))
        ]
        for tag, part in zip(tags, parts, strict=True):
            if tag:
                tag.string = part
        text.replace_with(*(tag or part for tag, part in zip(tags, parts, strict=True)))


def _metatags(body: BeautifulSoup, pagename: str, context: dict) -> str:
    """Return metadata for search engines and previews: title, first paragraph, and picture."""
    first = next(
        (
            p
            for p in body.find_all("p")
            if len(p.get_text()) > 40 and "page-links" not in p.get("class", [])
        ),
        None,
    )
    says = (
        " ".join(first.get_text().split())
        if first
        else f"{context['title']}, a page of {context['project']}"
    )
    says = escape(says if len(says) <= 160 else f"{says[:157].rsplit(' ', 1)[0]} …")
    title = escape(
        BeautifulSoup(context.get("title") or context["project"], "html.parser").get_text()
    )
    tags = {
        "og:title": title,
        "og:description": says,
        "og:type": "article",
        "og:site_name": context["project"],
    }
    if homepage := addresses().get("homepage"):  # og:url and og:image need absolute URLs
        tags |= {
            "og:url": f"{homepage}/{pagename}.html",
            "og:image": f"{homepage}/_images/rlhf_stages.svg",
        }
    lines = [
        f'<meta name="description" content="{says}">',
        '<meta name="twitter:card" content="summary">',
    ]
    lines += [f'<meta property="{name}" content="{value}">' for name, value in tags.items()]
    if pagename == "404":  # served at any depth
        lines.insert(0, f'<base href="{urlsplit(addresses().get("homepage", "")).path}/">')
    return "\n".join(lines)


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
    words = partial(say, language=app.config.language)
    links = [(words("The notebook"), f"{Path(name).name}.ipynb", True)]
    archive = f"{'../' * (1 + name.count('/'))}{ARCHIVE}"
    links += [(words("Everything it needs, as a zip"), archive, True)]
    if "/" not in name or name.startswith("scratch/"):
        takes = words("The notebook takes {cost} on two CPU cores.")
        takes = takes.format(cost=cost(name).removesuffix(" on two CPU cores"))
    if name.startswith("scratch/"):
        text = words(
            "This page runs the same cells on real data, at preset scratch. The text describes"
            " preset tiny: if it differs from the measurements here, trust the numbers."
        )
        _lead(body, f"{takes} {text}")
    if "/" not in name:
        repository = addresses().get("repository", "")
        services = open_in(repository, f"notebooks/{name}.ipynb").items()
        links += [(words(what), url, False) for what, url in services]
        links += [(words("Exercises"), f"exercises/{name}.html", False)]
        scripts = SCRIPTS.get(name, ())
        links += [(f"{script}.py", f"../scripts/{script}.html", False) for script in scripts]
        if "slides" in app.env.found_docs:
            links += [(words("Slides"), "../slides/slides.html", False)]
            links += [(words("Slides as a PDF"), "../slides/slides.pdf", False)]
        learn = table()[name]["learn"]
        learn = words(f"{learn[0].upper()}{learn[1:]}.")
        _lead(body, f"{learn} {takes}")
    line = body.new_tag("p", attrs={"class": "page-links"})
    for text, target, download in links:
        link = body.new_tag("a", href=target, attrs={"download": ""} if download else {})
        link.string = text
        line.append(link)
        line.append(" ")
    body.h1.insert_after(line)


def _lead(body: BeautifulSoup, text: str) -> None:
    """Add a paragraph under the title."""
    lead = body.new_tag("p", attrs={"class": "lead"})
    lead.string = text
    body.h1.insert_after(lead)


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
