"""Extend Sphinx for the site's other language: messages, search, and links between languages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polib
from bs4 import BeautifulSoup
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.search.zh import SearchChinese
from sphinx.transforms import SphinxTransform
from sphinx.util.nodes import extract_messages

from docs._ext import translate
from docs._ext.translate import HEADER, LANGUAGE, catalog, has_words, in_html, say

ENGLISH_PAGES = r"rlhf_course/|scripts/|figs/(?!README)"  # sources
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
    for path in translate.files():
        name = path.relative_to(translate.PO).with_suffix("")
        target = folder / LANGUAGE / "LC_MESSAGES" / f"{name}.mo"
        target.parent.mkdir(parents=True, exist_ok=True)
        entries = [polib.POEntry(msgid=m, msgstr=t) for m, t in catalog(str(name)).items()]
        compiled = polib.POFile()
        compiled.metadata = HEADER
        compiled.extend(entries)
        compiled.save_as_mofile(str(target))


def translate_html(source: Path) -> None:
    """Translate the words in the collected pages' HTML; Sphinx does not see HTML."""
    for path in [*source.rglob("*.md"), *source.rglob("*.ipynb")]:
        found = catalog(str(path.relative_to(source).with_suffix("")))
        if path.suffix == ".md":
            text = in_html(path.read_text(encoding="utf-8"), found)
            path.write_text(text, encoding="utf-8")
            continue
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = in_html("".join(cell["source"]), found)
            elif cell["cell_type"] == "code":
                translate.translate_code(cell)
            if shown := cell["metadata"].get("mystnb"):
                shown["code_prompt_show"] = say(shown["code_prompt_show"], LANGUAGE)
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
        env, found = self.env, []
        is_english = self.config.language == "en"
        translations = {} if is_english else catalog(env.docname)
        english = env.metadata[env.docname]["english"] = []
        for node, message in extract_messages(self.document):
            if self.is_skipped(node) or not has_words(message) or IMAGE.fullmatch(message):
                continue
            if not is_english and CHINESE.search(message):
                continue  # already translated by in_html, such as an image's words
            found.append(message)
            whole = isinstance(node, nodes.image | addnodes.translatable)
            if is_english:
                continue
            if message not in translations or not (whole or node.get("translated")):
                english.append(message)
                if not whole:
                    node["classes"].append("untranslated")
        env.metadata[env.docname]["messages"] = found

    def is_skipped(self, node: nodes.Node) -> bool:
        """Return whether a node is a formula, HTML, a notebook's metadata, or a model's sample."""
        sample = isinstance(node.parent, nodes.block_quote) and self.env.docname == "index"
        kinds = nodes.math_block | nodes.raw | nodes.field_name
        return isinstance(node, kinds) or isinstance(node.parent, nodes.field_body) or sample


def keep_messages(app: Sphinx, exception: Exception | None) -> None:
    """Write all pages' messages to the file named by the setting ``messages_file``."""
    if app.config.messages_file and not exception:
        found = {name: app.env.metadata[name]["messages"] for name in sorted(app.env.found_docs)}
        Path(app.config.messages_file).write_text(json.dumps(found), encoding="utf-8")


def show(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Add a link to this page in the other language."""
    is_english = app.config.language == "en"
    if pagename == "404" or re.match(ENGLISH_PAGES, pagename):
        return
    start = "../" * pagename.count("/")
    target = f"{start}{'zh' if is_english else '..'}/{pagename}.html"
    code, name = ("zh-CN", "中文") if is_english else ("en", "English")
    link = f'<a class="language" lang="{code}" hreflang="{code}" href="{target}">{name}</a>'
    context["language_link"] = link
    alternate = f'<link rel="alternate" hreflang="{code}" href="{target}">'
    context["metatags"] = context.get("metatags", "") + alternate
    if "body" not in context:
        return
    context["body"] = f'<p class="language-line">{link}</p>\n{context["body"]}'


def mark_english(app: Sphinx, pagename: str, body: BeautifulSoup) -> None:
    """Mark a Chinese page's English parts in place, and count them at the foot."""
    summaries = body.find_all("summary")
    english = [tag for tag in summaries if has_words(tag.text) and not CHINESE.search(tag.text)]
    for tag in [*body.select(".untranslated, .cell_output, pre"), *english]:
        if not CHINESE.search(str(tag)):  # a stub's docstring or a figure may be Chinese
            tag["lang"] = "en"
    count = len(app.env.metadata[pagename].get("english", ())) + len(english)
    text = say("{count} paragraphs of this page are not translated yet.", app.config.language)
    if not (translate.PO / f"{pagename}.po").exists() and pagename in app.env.found_docs:
        text = say("This page exists only in English.", app.config.language)
    if count:
        foot = body.new_tag("p", attrs={"class": "untranslated-count"})
        foot.string = text.format(count=count)
        body.append(foot)


def skip_sources(app: Sphinx) -> None:
    """Neither write nor index source pages for the other language."""

    def skipping(method):
        return lambda name, *rest: None if re.match(ENGLISH_PAGES, name) else method(name, *rest)

    if app.config.language != "en":
        for method in ("write_doc", "index_page"):
            if found := getattr(app.builder, method, None):
                setattr(app.builder, method, skipping(found))


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
    app.connect("html-page-context", show, priority=450)  # after polish
    return {"parallel_read_safe": True}
