"""Extend Sphinx for the site's other language: messages, search, and links between languages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import polib
from bs4 import BeautifulSoup
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.search.zh import SearchChinese
from sphinx.transforms import SphinxTransform
from sphinx.util.nodes import extract_messages

from docs._ext.catalog import (
    HEADER,
    LANGUAGE,
    catalog,
    in_html,
    page_name,
    po_files,
    po_path,
    say,
)
from docs._ext.collect import SOURCE_PAGES
from docs._ext.compare import has_words
from docs._ext.editions import translate_code

CHINESE = re.compile("[\u3400-\u9fff]")
IMAGE = re.compile(r"!\[[^]]*\]\(\S+\)")  # an image's alternative text is a separate message
SPLIT = """
function splitQuery(query) {
    return (query.match(/[\\u3400-\\u9fff]+|[\\p{Letter}\\p{Number}_]+/gu) || []).flatMap(word =>
        /[\\u3400-\\u9fff]/.test(word) && word.length > 2
            ? [...word].slice(1).map((letter, i) => word[i] + letter) : [word]);
}
"""


def compile_for_sphinx(folder: Path) -> None:
    """Write finished translations in the format that Sphinx reads, one file per page."""
    for path in po_files():
        name = page_name(path)
        target = folder / LANGUAGE / "LC_MESSAGES" / f"{name}.mo"
        target.parent.mkdir(parents=True, exist_ok=True)
        compiled = polib.POFile()
        compiled.metadata = HEADER
        for message, translation in catalog(name).items():
            compiled.append(polib.POEntry(msgid=message, msgstr=translation))
        compiled.save_as_mofile(str(target))


def translate_html(source: Path) -> None:
    """Translate the words in the collected pages' HTML; Sphinx does not see HTML."""
    for path in source.rglob("*.md"):
        translations = catalog(str(path.relative_to(source).with_suffix("")))
        text = in_html(path.read_text(encoding="utf-8"), translations)
        path.write_text(text, encoding="utf-8")
    for path in source.rglob("*.ipynb"):
        translations = catalog(str(path.relative_to(source).with_suffix("")))
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = in_html("".join(cell["source"]), translations)
            elif cell["cell_type"] == "code":
                translate_code(cell)
            folded = cell["metadata"].get("mystnb")
            if folded:
                folded["code_prompt_show"] = say(folded["code_prompt_show"], LANGUAGE)
        path.write_text(json.dumps(notebook), encoding="utf-8")


class Pairs(SearchChinese):
    """Index Chinese text by pairs of neighboring characters; this needs no dictionary."""

    language_name = "English"  # Sphinx names the stemmer after this language
    js_splitter_code = SPLIT

    def split(self, input: str) -> list[str]:
        runs = re.findall("[\u3400-\u9fff]+", input)
        pairs = [run[i : i + 2] for run in runs for i in range(max(1, len(run) - 1))]
        return pairs + super().split(input)


class Messages(SphinxTransform):
    """Record a page's messages, and which of them are shown in English."""

    default_priority = 22  # just after Sphinx's translation

    def apply(self, **kwargs) -> None:
        env = self.env
        is_english = self.config.language == "en"
        translations = {} if is_english else catalog(env.docname)
        shown_in_english = []
        messages = []
        for node, message in extract_messages(self.document):
            if self.is_skipped(node) or not has_words(message) or IMAGE.fullmatch(message):
                continue
            if is_english:
                messages.append(message)
                continue
            if CHINESE.search(message):
                continue  # already translated by in_html, such as an image's words
            messages.append(message)
            is_whole = isinstance(node, nodes.image | addnodes.translatable)
            if message not in translations or not (is_whole or node.get("translated")):
                shown_in_english.append(message)
                if not is_whole:
                    node["classes"].append("untranslated")
        env.metadata[env.docname]["messages"] = messages
        env.metadata[env.docname]["english"] = shown_in_english

    def is_skipped(self, node: nodes.Node) -> bool:
        """Return whether a node is a formula, HTML, a notebook's metadata, or a model's sample."""
        sample = isinstance(node.parent, nodes.block_quote) and self.env.docname == "index"
        kinds = nodes.math_block | nodes.raw | nodes.field_name
        return isinstance(node, kinds) or isinstance(node.parent, nodes.field_body) or sample


def keep_messages(app: Sphinx, exception: Exception | None) -> None:
    """Write all pages' messages to the file named by the setting ``messages_file``."""
    if app.config.messages_file and not exception:
        pages = {name: app.env.metadata[name]["messages"] for name in sorted(app.env.found_docs)}
        Path(app.config.messages_file).write_text(json.dumps(pages), encoding="utf-8")


def link_languages(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Add a link to this page in the other language."""
    if pagename == "404" or re.match(SOURCE_PAGES, pagename):
        return
    start = "../" * pagename.count("/")
    if app.config.language == "en":
        code = "zh-CN"
        name = "中文"
        target = f"{start}zh/{pagename}.html"
    else:
        code = "en"
        name = "English"
        target = f"{start}../{pagename}.html"
    link = f'<a class="language" lang="{code}" hreflang="{code}" href="{target}">{name}</a>'
    context["language_link"] = link
    alternate = f'<link rel="alternate" hreflang="{code}" href="{target}">'
    context["metatags"] = context.get("metatags", "") + alternate
    if "body" in context:
        context["body"] = f'<p class="language-line">{link}</p>\n{context["body"]}'


def mark_english(app: Sphinx, pagename: str, body: BeautifulSoup) -> None:
    """Mark a Chinese page's English parts in place, and count them at the foot."""
    english_summaries = [
        tag
        for tag in body.find_all("summary")
        if has_words(tag.text) and not CHINESE.search(tag.text)
    ]
    for tag in [*body.select(".untranslated, .cell_output, pre"), *english_summaries]:
        if not CHINESE.search(str(tag)):  # a stub's docstring or a figure may be Chinese
            tag["lang"] = "en"
    english = app.env.metadata[pagename].get("english", ())
    count = len(english) + len(english_summaries)
    if not count:
        return
    if po_path(pagename).exists() or pagename not in app.env.found_docs:
        text = say("{count} paragraphs of this page are not translated yet.", app.config.language)
    else:
        text = say("This page exists only in English.", app.config.language)
    foot = body.new_tag("p", attrs={"class": "untranslated-count"})
    foot.string = text.format(count=count)
    body.append(foot)


def skip_sources(app: Sphinx) -> None:
    """Neither write nor index source pages for the other language, nor lead old addresses on."""
    if app.config.language == "en":
        return
    app.config.redirects = {}
    for name in ("write_doc", "index_page"):
        method = getattr(app.builder, name, None)
        if method:
            setattr(app.builder, name, without_sources(method))


def without_sources(method: Callable) -> Callable:
    """Return a builder's method that does nothing for a source page."""

    def skipping(pagename: str, *rest) -> None:
        if not re.match(SOURCE_PAGES, pagename):
            method(pagename, *rest)

    return skipping


def set_prompt(app: Sphinx, config) -> None:
    """Set the label of the button that folds a code cell again."""
    config.nb_code_prompt_hide = say("Hide the code", config.language)


def setup(app: Sphinx) -> dict:
    """Register the setting, the transform and the search."""
    app.add_config_value("messages_file", "", "")
    app.add_transform(Messages)
    app.add_search_language(Pairs)
    app.connect("config-inited", set_prompt)
    app.connect("builder-inited", skip_sources)
    app.connect("build-finished", keep_messages)
    app.connect("html-page-context", link_languages, priority=450)  # after polish
    return {"parallel_read_safe": True}
