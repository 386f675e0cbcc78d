"""The site in a real browser that can reach nothing but it: built once, every page visited,
searched and measured.
"""

import functools
import http.server
import shutil
import threading
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, unquote, urljoin, urlsplit

import pytest
import yaml
from builders import python

from rlhf_course.ppo.stats import MEANING

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("rlhf_course/", "scripts/", "dev/")  # their pages are in English only

PACKAGES = ("sphinx", "myst_nb", "furo", "sphinx_copybutton", "sphinx_reredirects", "playwright")
MISSING = [name for name in PACKAGES if not find_spec(name)]
MISSING += [name for name in ("chromium", "npm") if not shutil.which(name)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the site's tests need {MISSING}")

QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
).split()
SCREENS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
LOOK = """async () => {
    for (const image of document.images) image.loading = "eager";
    await Promise.all([...document.images].map(image => image.decode().catch(() => {})));
    const name = element => element.outerHTML.slice(0, 120);
    const images = [...document.querySelectorAll("main img, article img, .content img")];
    return {
        unsized: images.filter(i => !i.matches("[width][height]")).map(name),
        unloaded: images.filter(i => !i.naturalWidth).map(name),
        unnamed: images.filter(i => !i.alt).map(name),
        unset: [...document.querySelectorAll(".math:not(:has(.katex math))")].map(name),
        wrong: [...document.querySelectorAll(".katex-error")].map(name),
        formulas: document.querySelectorAll(".katex").length,
        images: images.length,
    };
}"""
TOO_WIDE = """() => Math.max(...[...document.querySelectorAll("html, .main, .content")]
    .map(element => element.scrollWidth - element.clientWidth))"""


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        """Nothing."""


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *arguments):
        """Nothing: a browser that goes on to the next page hangs up."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The site as `make site` builds it."""
    output = tmp_path_factory.mktemp("build") / "site"
    done = python(ROOT / "docs/_ext/build.py", "--output", output)
    assert done.returncode == 0, done.stderr[-2000:]
    return output


@pytest.fixture(scope="module")
def address(folder):
    """Where the site is served."""
    with Server(("127.0.0.1", 0), functools.partial(Silent, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def page(address):
    """A browser's page that refuses every other address; ``page.troubles`` collects what went
    wrong.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=QUIET)
        page = browser.new_page()
        page.troubles = []

        def failed(request) -> None:
            if request.failure != "net::ERR_ABORTED":  # left for the next page before it was there
                page.troubles.append(f"{page.url}: no {request.url}")

        page.route(
            lambda url: not url.startswith((address, "data:", "blob:")), lambda route: route.abort()
        )
        page.on("pageerror", lambda error: page.troubles.append(f"{page.url}: {error}"))
        page.on("requestfailed", failed)
        page.on(
            "console",
            lambda m: page.troubles.append(f"{page.url}: {m.text}") if m.type == "error" else None,
        )
        yield page
        browser.close()


@pytest.fixture(scope="module")
def names(folder) -> list[str]:
    """All pages, as paths, except the slides, which have tests of their own, and old addresses."""
    moved = yaml.safe_load((ROOT / "docs/redirects.yaml").read_text(encoding="utf-8"))
    paths = {str(path.relative_to(folder)) for path in folder.rglob("*.html")}
    old = {f"{name}.html" for name in moved}
    return sorted(path for path in paths - old if not path.startswith("slides/"))


@pytest.fixture(scope="module")
def soups(folder, names) -> dict:
    """All pages, parsed."""
    from bs4 import BeautifulSoup

    return {name: BeautifulSoup((folder / name).read_text(), "html.parser") for name in names}


@pytest.fixture(scope="module")
def visits(page, address, names) -> dict[str, dict]:
    """What was found on each page; of the sources, which are all alike, on one per kind, and of
    the Chinese pages on a few.
    """
    alike = (*SOURCES, "zh/")
    kinds = (
        "rlhf_course/ppo/trainer.html",
        "rlhf_course/course/configs/04_gpt2_imdb_ppo.html",
        *(f"zh/{name}.html" for name in "index glossary notebooks/00_hello_rlhf".split()),
    )
    looks = {}
    for name in (name for name in names if name in kinds or not name.startswith(alike)):
        page.goto(address + name)
        looks[name] = page.evaluate(LOOK)
        looks[name]["too wide"] = []
        for width, scheme in SCREENS:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            excess = page.evaluate(TOO_WIDE)
            if excess > 0:
                looks[name]["too wide"].append(f"{excess} px at {width}, {scheme}")
    return looks


def troubles(visits: dict[str, dict], *kinds: str) -> dict:
    return {
        f"{name}, {kind}": looks[kind]
        for name, looks in visits.items()
        for kind in kinds
        if looks[kind]
    }


def test_the_pages_are_all_there(names):
    wanted = {"rlhf_course/ppo/trainer.html"}
    wanted |= {f"{name}.html" for name in "index metrics glossary ppo-api api 404 search".split()}
    assert wanted | {f"notebooks/{path.stem}.html" for path in ROOT.glob("notebooks/*.ipynb")} <= {
        *names
    }


def test_pages_of_both_languages_link_to_each_other(soups):
    pages = [n for n in soups if not n.startswith(SOURCES) and Path(n).name != "404.html"]
    for name in pages:
        twin = name.removeprefix("zh/") if name.startswith("zh/") else f"zh/{name}"
        links = soups[name].select("a.language")
        assert {urljoin(name, link["href"]) for link in links} == {twin}, name
        assert soups[name].html["lang"] == ("zh-CN" if name.startswith("zh/") else "en")


def test_pages_load_without_errors_and_ask_nobody_else(visits, page):
    assert page.troubles == []


def test_images_have_a_size_and_words_and_are_loaded(visits):
    assert troubles(visits, "unsized", "unloaded", "unnamed") == {}
    assert sum(looks["images"] for looks in visits.values()) >= 19


def test_formulas_are_typeset(visits):
    assert troubles(visits, "unset", "wrong") == {}
    assert visits["metrics.html"]["formulas"] >= len(MEANING)


def test_no_page_is_wider_than_its_window(visits):
    assert troubles(visits, "too wide") == {}


def test_links_lead_somewhere(folder, soups):
    ids = {
        name: {tag["id"] for tag in soup.find_all(id=True)} | {""} for name, soup in soups.items()
    }
    dead = []
    for name, soup in soups.items():
        for tag in soup.select("a[href], link[href]"):
            target = urlsplit(urljoin(f"http://site/{name}", tag["href"]))
            path = unquote(target.path[1:])
            exists = (folder / path).is_file() and unquote(target.fragment) in ids.get(
                path, {target.fragment}
            )
            if target.netloc == "site" and not exists:
                dead.append(f"{name}: {tag['href']}")
    assert dead == []


def test_an_old_address_leads_on(page, address):
    page.goto(f"{address}rlhf_course/worlds/chinese.html")
    page.wait_for_url(f"{address}rlhf_course/synthetic/chinese.html")


def search(page, address, words: str) -> list[str]:
    """The addresses that a search finds, best first."""
    page.goto(f"{address}search.html?q={quote(words)}")
    page.wait_for_function(
        "document.querySelector('#search-results .search-summary')?.textContent.match(/found|匹配/)"
    )
    return page.eval_on_selector_all(
        "#search-results li a", "links => links.map(link => link.href)"
    )


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("whitening", "glossary.html#term-whitening"),
        ("objective/kl", "metrics.html#objective-kl"),
        ("PPOConfig", "api.html#rlhf_course.PPOConfig"),
        ("over-optimisation", "glossary.html#term-over-optimisation"),
        ("over-optimization", "glossary.html#term-over-optimization"),
    ],
)
def test_the_search_finds_names_and_both_spellings(page, address, words, place):
    assert any(place in link for link in search(page, address, words)[:3])


def test_the_chinese_search_finds_words_inside_sentences(page, address):
    assert any("zh/notebooks/00" in link for link in search(page, f"{address}zh/", "奖励模型"))
    assert any("term-advantage" in link for link in search(page, f"{address}zh/", "advantage")[:3])
