"""What the site adds to Sphinx: pages of source files, and notebooks that fit every screen."""

from __future__ import annotations

from pathlib import Path

from bs4 import BeautifulSoup, Tag
from docutils import nodes
from metrics import anchor
from sphinx.addnodes import index
from sphinx.application import Sphinx
from sphinx.parsers import Parser
from sphinx.transforms import SphinxTransform
from sphinx.util.images import get_image_size

SCRIPTS = {  # notebook → the scripts that do the same as commands
    "01_reward_modeling": ["train_reward_model"],
    "04_gpt2_imdb_ppo": ["train_ppo"],
    "05_lora_rlhf_baichuan": ["convert_baichuan", "train_sft", "train_reward_model", "train_ppo"],
}
TEXT = 22  # characters; a table's column with a longer cell is text
WIDE = 760  # pixels; a figure wider than that keeps a readable size on a phone, and scrolls


class SourceParser(Parser):
    """A source file as a page of its own: the path is the title, the code its content. The search skips the code."""

    supported = ("source",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        env = document.settings.env
        path = Path(env.doc2path(env.docname, base=False))
        code = nodes.literal_block(inputstring, inputstring, language=path.suffix[1:], linenos=True)
        document += nodes.section("", nodes.title(text=str(path)), code, ids=["source"], names=["source"])
        env.metadata[env.docname]["nosearch"] = "true"


class StatsFirst(SphinxTransform):
    """Index entries for the stats, by their whole and their last name: the search ranks these first."""

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
    """Sizes and alternative texts of images, tables that scroll by themselves, and a notebook's links."""
    if "body" not in context:
        return
    body = BeautifulSoup(context["body"], "html.parser")
    files = {name: path for path, (_, name) in app.env.images.items()}
    for image in body.find_all("img"):
        size = get_image_size(Path(app.srcdir, files.get(Path(image["src"]).name, "")))
        if size:
            image["width"], image["height"] = size
        if image.find_parent(class_="cell_output"):
            image["alt"] = _caption(image) or "Figure"
            image.wrap(body.new_tag("div", attrs={"class": f"figure{' wide' if size and size[0] > WIDE else ''}"}))
    for table in body.select(".output.text_html table"):
        table.wrap(body.new_tag("div", attrs={"class": "table-wrapper"}))
        _mark_text(table)
    for scrolls in body.select(".table-wrapper, .figure.wide"):
        scrolls["tabindex"] = "0"  # so that the keyboard can scroll it
    if pagename.startswith("notebooks/"):
        body.h1.insert_after(_links(body, pagename.removeprefix("notebooks/"), app))
    context["body"] = str(body)


def _mark_text(table: Tag) -> None:
    """Give the columns that hold text a class, so that they are set as text is and not as numbers."""
    columns: dict[int, list[Tag]] = {}
    for row in table.find_all("tr"):
        for column, cell in enumerate(row.find_all(["th", "td"])):
            columns.setdefault(column, []).append(cell)
    for cells in columns.values():
        if any(len(cell.text.strip()) > TEXT for cell in cells if cell.find_parent("tbody")):
            for cell in cells:
                cell["class"] = [*cell.get("class", []), "text"]


def _caption(image: Tag) -> str:
    """The words of the paragraph «*Figure: …*» that follows an image's cell."""
    for paragraph in image.find_all_next("p", limit=3):
        if paragraph.em and paragraph.em.text.startswith("Figure"):
            paragraph["class"] = [*paragraph.get("class", []), "figure-caption"]
            return " ".join(paragraph.em.text.removeprefix("Figure: ").split())
    return ""


def _links(body: BeautifulSoup, name: str, app: Sphinx) -> Tag:
    """The line under a notebook's title: its file, its scripts, the slides; under an exercise's its file."""
    links = [("The notebook", f"{Path(name).name}.ipynb", True)]
    links += [(f"{script}.py", f"../scripts/{script}.html", False) for script in SCRIPTS.get(name, ())]
    if "slides" in app.env.found_docs and "/" not in name:
        links += [("Slides", "../slides/slides.html", False), ("Slides as a PDF", "../slides/slides.pdf", False)]
    line = body.new_tag("p", attrs={"class": "page-links"})
    for text, target, download in links:
        link = body.new_tag("a", href=target, attrs={"download": ""} if download else {})
        link.string = text
        line.append(link)
        line.append(" ")
    return line


def setup(app: Sphinx) -> dict:
    """Register the parser, the transform and the polish."""
    app.add_source_parser(SourceParser)
    app.add_transform(StatsFirst)
    app.connect("html-page-context", polish, priority=400)  # before the theme's
    return {"parallel_read_safe": True}
