"""The site's additions to Sphinx: pages of source files, notebooks that fit every screen, links to
the meaning of terms.
"""

from __future__ import annotations

import re
from functools import partial
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

from address import addresses, open_in
from bs4 import BeautifulSoup, Tag
from docutils import nodes
from home import ARCHIVE, cost, table
from metrics import anchor
from sphinx.addnodes import index
from sphinx.application import Sphinx
from sphinx.parsers import Parser
from sphinx.transforms import SphinxTransform
from sphinx.util.images import get_image_size

from rlhf_course.ppo.stats import MEANING

SCRIPTS = {  # notebook → the equivalent commands
    "01_reward_modeling": ["train_reward_model"],
    "04_gpt2_imdb_ppo": ["train_ppo"],
    "05_lora_rlhf_baichuan": ["convert_baichuan", "train_sft", "train_reward_model", "train_ppo"],
}
TEXT = 22  # characters; a table's column with a longer cell is text
GLOSSARY = Path(__file__).with_name("glossary.md")
GENERATED = ("index", "404", "search", "quiz")  # pages without prose of their own
HEADINGS = ["h1", "h2", "h3", "h4", "dt", "th", "summary"]
CHINESE = re.compile(
    r"((?:[\u3000-\u303f\uff00-\uffef]*[\u3400-\u9fff]+[\u3000-\u303f\uff00-\uffef]*)+)"
)
WIDE = 760  # pixels; a wider figure keeps a readable size on a phone, and scrolls


class SourceParser(Parser):
    """Parse a source file as a separate page: the path is the title, the code is the content. The
    search skips the code.
    """

    supported = ("source",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        env = document.settings.env
        path = Path(env.doc2path(env.docname, base=False))
        code = nodes.literal_block(inputstring, inputstring, language=path.suffix[1:], linenos=True)
        document += nodes.section(
            "", nodes.title(text=str(path)), code, ids=["source"], names=["source"]
        )
        env.metadata[env.docname]["nosearch"] = "true"


class StatsFirst(SphinxTransform):
    """Add index entries for the stats, by their full and their last name: the search ranks these
    first.
    """

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
    """Finish a page: images, tables, a notebook's header, links to terms and stats, languages, and
    the preview that other services show.
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
        cell.name = "td"  # an empty header
    for summary in body.select("summary[aria-label]"):
        del summary["aria-label"]  # its own words say more
    if pagename.startswith("notebooks/"):
        _head(body, pagename.removeprefix("notebooks/"), app)
    if pagename not in GENERATED:
        _link_terms(body, pagename, app)
    _mark_chinese(body)
    context["body"] = str(body)
    context["metatags"] += _metatags(body, pagename, context)


def term_id(term: str) -> str:
    """Return the end of a term's address on the page of the glossary, as Sphinx makes it."""
    return re.sub("[^a-zA-Z0-9._]+", "-", term).strip("-")


def _link_terms(body: BeautifulSoup, pagename: str, app: Sphinx) -> None:
    """Link each stat to its section, and the first occurrence of each glossary term to its entry,
    with its meaning.
    """
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
    terms, names = _glossary()
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
            if terms[name]:
                link = body.new_tag(
                    "a", href=f"{to('glossary')}#term-{term_id(name)}", title=terms[name]
                )
                link["class"], link.string = "term", found[0]
                parts += [text[end : found.start()], link]
                end, terms[name] = found.end(), ""
        if parts:
            text.replace_with(*parts, text[end:])


def _glossary() -> tuple[dict[str, str], re.Pattern]:
    """Return term → the first sentence of its definition, and a pattern that finds a term or its
    plural in a text.
    """
    entries = re.findall(
        r"^((?:\S.*\n)+)((?:  .*\n?)+)", GLOSSARY.read_text(encoding="utf-8"), re.M
    )
    terms = {}
    for names, says in entries:
        says = re.sub(r"\{term\}|\[([^]]*)\]\([^)]*\)|[`*]", r"\1", " ".join(says.split()))
        says = re.split(r"(?<=[.;:])\s", says)[0]
        terms |= {name: says for name in names.splitlines() if not name.startswith("`")}
    words = "|".join(
        re.escape(term)
        for term in sorted(terms, key=len, reverse=True)
        if len(term) > 2 or term.isupper()
    )
    capital = "|".join(word.capitalize() for word in words.split("|") if word.islower())
    return terms, re.compile(rf"(?<![\w-])(?:{words}|{capital})s?(?![\w-])")


def _mark_chinese(body: BeautifulSoup) -> None:
    """Mark Chinese text as Chinese: screen readers and fonts need this."""
    for text in [
        text
        for text in body.find_all(string=CHINESE)
        if text.parent.name not in ("title", "script", "style")
    ]:
        parts = CHINESE.split(text)  # every second one is Chinese
        tags = [
            body.new_tag("span", attrs={"lang": "zh"}) if odd % 2 else None
            for odd in range(len(parts))
        ]
        for tag, part in zip(tags, parts, strict=True):
            if tag:
                tag.string = part
        text.replace_with(*(tag or part for tag, part in zip(tags, parts, strict=True)))


def _metatags(body: BeautifulSoup, pagename: str, context: dict) -> str:
    """Return the metadata that search engines and shared links show: title, first paragraph,
    picture.
    """
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
    if homepage := addresses().get("homepage"):  # these accept only complete addresses
        tags |= {
            "og:url": f"{homepage}/{pagename}.html",
            "og:image": f"{homepage}/_images/rlhf_stages.svg",
        }
    lines = [
        f'<meta name="description" content="{says}">',
        '<meta name="twitter:card" content="summary">',
    ]
    lines += [f'<meta property="{name}" content="{value}">' for name, value in tags.items()]
    if pagename == "404":  # it replaces pages at any depth
        lines.insert(0, f'<base href="{urlsplit(addresses().get("homepage", "")).path}/">')
    return "\n".join(lines)


def _mark_text(table: Tag) -> None:
    """Give the columns that hold text a class, so that they are not set as numbers."""
    columns: dict[int, list[Tag]] = {}
    for row in table.find_all("tr"):
        for column, cell in enumerate(row.find_all(["th", "td"])):
            columns.setdefault(column, []).append(cell)
    for cells in columns.values():
        if any(len(cell.text.strip()) > TEXT for cell in cells if cell.find_parent("tbody")):
            for cell in cells:
                cell["class"] = [*cell.get("class", []), "text"]


def _caption(image: Tag) -> str:
    """The words of the paragraph «**Figure 1.2.** …» that follows an image's cell."""
    for paragraph in image.find_all_next("p", limit=3):
        if paragraph.strong and paragraph.strong.text.startswith("Figure"):
            paragraph["class"] = [*paragraph.get("class", []), "figure-caption"]
            return " ".join(paragraph.text.removeprefix(paragraph.strong.text).split())
    return ""


def _head(body: BeautifulSoup, name: str, app: Sphinx) -> None:
    """Add the lines under a notebook's title: what you learn, its file and requirements, scripts,
    and the slides.
    """
    links = [("The notebook", f"{Path(name).name}.ipynb", True)]
    links += [("Everything it needs, as a zip", f"{'../' * (1 + name.count('/'))}{ARCHIVE}", True)]
    if name.startswith("scratch/"):
        lead = body.new_tag("p", attrs={"class": "lead"})
        lead.string = (
            f"This page runs the same cells on real data, at preset scratch. It takes {cost(name)}."
            " The text describes preset tiny: if it differs from the measurements here, trust the"
            " numbers."
        )
        body.h1.insert_after(lead)
    if "/" not in name:
        repository = addresses().get("repository", "")
        links += [
            (what, url, False)
            for what, url in open_in(repository, f"notebooks/{name}.ipynb").items()
        ]
        links += [("Exercises", f"exercises/{name}.html", False)]
        links += [
            (f"{script}.py", f"../scripts/{script}.html", False) for script in SCRIPTS.get(name, ())
        ]
        if "slides" in app.env.found_docs:
            links += [
                ("Slides", "../slides/slides.html", False),
                ("Slides as a PDF", "../slides/slides.pdf", False),
            ]
        goal = table()[name]
        lead = body.new_tag("p", attrs={"class": "lead"})
        parts = [
            f"{goal['learn'][0].upper()}{goal['learn'][1:]}.",
            f" The notebook takes {cost(name)}.",
        ]
        lead.append("".join(parts))
        body.h1.insert_after(lead)
    line = body.new_tag("p", attrs={"class": "page-links"})
    for text, target, download in links:
        link = body.new_tag("a", href=target, attrs={"download": ""} if download else {})
        link.string = text
        line.append(link)
        line.append(" ")
    body.h1.insert_after(line)


def name_levels(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Give the headings of the theme's navigation the level that the theme omits."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )


def setup(app: Sphinx) -> dict:
    """Register the parser, the transform and the polish."""
    app.add_source_parser(SourceParser)
    app.add_transform(StatsFirst)
    app.connect("html-page-context", polish, priority=400)  # before the theme's
    app.connect("html-page-context", name_levels, priority=600)  # after it
    return {"parallel_read_safe": True}
