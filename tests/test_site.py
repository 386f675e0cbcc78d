"""The site in a real browser that can reach nothing but it: built once, every page visited,
searched and measured.
"""

import functools
import gzip
import http.server
import shutil
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, unquote, urljoin, urlsplit

import pytest
from builders import python

from rlhf_course.ppo.stats import MEANING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "site"))
import node  # noqa: E402

PYTHON = [
    name
    for name in ("sphinx", "myst_nb", "furo", "sphinx_copybutton", "playwright")
    if not find_spec(name)
]
DEBIAN = [name for name in ("chromium", "npm") if not shutil.which(name)]
WANTED = [f"pip install -r site/requirements.txt ({', '.join(PYTHON)})"] if PYTHON else []
WANTED += [f"apt install {' '.join(DEBIAN)}"] if DEBIAN else []
pytestmark = pytest.mark.skipif(bool(WANTED), reason=f"the site's tests need: {'; '.join(WANTED)}")

QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
QUIET += ["--disable-component-update", "--disable-sync"]
SCREENS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
LOOK = """async () => {
    for (const image of document.images) image.loading = "eager";
    await Promise.all([...document.images].map(image => image.decode().catch(() => {})));
    const name = element => element.outerHTML.slice(0, 120);
    const images = [...document.querySelectorAll("main img, article img, .content img")];
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const raw = [];
    while (texts.nextNode()) {
        const hidden = texts.currentNode.parentElement.closest("pre, code, script, style, .katex");
        if (!hidden && /\\\\[(\\[]|\\$\\$/.test(texts.currentNode.data)) raw.push(texts.currentNode.data.slice(0, 80));
    }
    return {
        unsized: images.filter(i => !(i.getAttribute("width") && i.getAttribute("height"))).map(name),
        unloaded: images.filter(i => !i.naturalWidth).map(name),
        unnamed: images.filter(i => !i.alt).map(name),
        unset: [...document.querySelectorAll(".math")].filter(m => !m.querySelector(".katex math")).map(name),
        wrong: [...document.querySelectorAll(".katex-error")].map(name),
        raw: raw,
        formulas: document.querySelectorAll(".katex").length,
        images: images.length,
    };
}"""
TOO_WIDE = """() => Math.max(...["html", ".main", ".content"].flatMap(name =>
    [...document.querySelectorAll(name)].map(element => element.scrollWidth - element.clientWidth)))"""
SCROLLS = """() => [...document.querySelectorAll("pre, .table-wrapper")]
    .filter(element => element.scrollWidth > element.clientWidth && (innerWidth > 1000 || element.tabIndex != 0))
    .map(element => element.innerText.slice(0, 80))"""
AXE = "4.14.1"  # axe-core
KINDS = ("index", "404", "api", "glossary", "notebooks/00_hello_rlhf", "notebooks/exercises/00_hello_rlhf", "speed",
         "rlhf_course/ppo/trainer", "notebooks/scratch/01_reward_modeling")  # fmt: skip
CHECK = """async () => (await axe.run({exclude: [[".katex"]]}, {resultTypes: ["violations"]})).violations
    .filter(found => ["serious", "critical"].includes(found.impact))
    .map(found => found.id + ": " + found.nodes[0].html.slice(0, 200))"""


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
    done = python(ROOT / "site/build.py", "--output", output)
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
    """All pages, as paths."""
    slides = folder / "slides"  # a page of its own kind, with tests of its own
    return sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*.html") if slides not in p.parents
    )


@pytest.fixture(scope="module")
def soups(folder, names) -> dict:
    """All pages, parsed."""
    from bs4 import BeautifulSoup

    return {name: BeautifulSoup((folder / name).read_text(), "html.parser") for name in names}


@pytest.fixture(scope="module")
def visits(page, address, names) -> dict[str, dict]:
    """What was found on each page; of the sources, which are all alike, on one per kind."""
    alike = ("rlhf_course/", "scripts/", "figs/")
    kinds = (
        "figs/README.html",
        "rlhf_course/ppo/trainer.html",
        "rlhf_course/course/configs/04_gpt2_imdb_ppo.html",
    )
    found = {}
    for name in (name for name in names if name in kinds or not name.startswith(alike)):
        page.goto(address + name)
        found[name] = page.evaluate(LOOK)
        found[name]["too wide"] = []
        for width, scheme in SCREENS:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            excess = page.evaluate(TOO_WIDE)
            if excess > 0:
                found[name]["too wide"].append(f"{excess} px at {width}, {scheme}")
        found[name]["scrolls"] = []
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate(
                "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )
            found[name]["scrolls"] += page.evaluate(SCROLLS)
    return found


def troubles(visits: dict[str, dict], *kinds: str) -> dict:
    return {
        f"{name}, {kind}": found[kind]
        for name, found in visits.items()
        for kind in kinds
        if found[kind]
    }


def test_the_pages_are_all_there(names):
    wanted = {
        "index.html",
        "metrics.html",
        "glossary.html",
        "ppo-api.html",
        "api.html",
        "404.html",
        "search.html",
        "rlhf_course/ppo/trainer.html",
    }
    assert wanted | {f"notebooks/{path.stem}.html" for path in ROOT.glob("notebooks/*.ipynb")} <= {
        *names
    }


def test_pages_load_without_errors_and_ask_nobody_else(visits, page):
    assert page.troubles == []


def test_images_have_a_size_and_words_and_are_loaded(visits):
    assert troubles(visits, "unsized", "unloaded", "unnamed") == {}
    assert sum(found["images"] for found in visits.values()) >= 19


def test_formulas_are_typeset(visits):
    assert troubles(visits, "unset", "wrong", "raw") == {}
    assert visits["metrics.html"]["formulas"] >= len(MEANING)


def test_no_page_is_wider_than_its_window(visits):
    assert troubles(visits, "too wide") == {}


def test_code_and_tables_fit_a_desktop_and_on_a_phone_the_keyboard_reaches_what_scrolls(visits):
    assert troubles(visits, "scrolls") == {}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_axe_finds_nothing_serious(page, address, width, scheme):
    script = node.package("axe-core", AXE) / "axe.min.js"
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    found = {}
    for name in KINDS:
        page.goto(f"{address}{name}.html")
        page.add_script_tag(path=script)
        found[name] = page.evaluate(CHECK)
    assert {name: problems for name, problems in found.items() if problems} == {}


def test_pages_are_small_and_say_what_they_are(folder, soups):
    for name in (name for name in soups if name != "search.html"):
        assert len(gzip.compress((folder / name).read_bytes())) < 200_000, name
        head = soups[name].head
        assert head.find("meta", attrs={"name": "description"})["content"], name
        assert head.find("meta", property="og:title")["content"], name


def test_a_formula_that_fails_stops_the_build(tmp_path):
    """With the file, the line and the formula."""
    (tmp_path / "index.md").write_text("# Title\n\nWords and $x_1$.\n\n$$\n\\nonsense{x}\n$$\n")
    conf = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'site')!r})\nextensions = ['myst_parser',"
        " 'formulas']\n"
    )
    (tmp_path / "conf.py").write_text(conf + "myst_enable_extensions = ['dollarmath']\n")
    done = python("-m", "sphinx", "-q", "-W", tmp_path, tmp_path / "out")
    assert done.returncode and "index.md:5" in done.stderr and "\\nonsense{x}" in done.stderr, (
        done.stderr
    )


def test_terms_stats_and_chinese_are_marked(soups):
    page = soups["notebooks/04_gpt2_imdb_ppo.html"]
    terms = [link["href"] for link in page.select("a.term")]
    assert (
        len(terms) > 10
        and len(terms) == len(set(terms))
        and all(link["title"] for link in page.select("a.term"))
    )
    assert soups["notebooks/06_reward_hacking.html"].select('[lang="zh"]')
    page = soups["notebooks/03_ppo_step_by_step.html"]
    linked = {
        link["href"].split("#")[1] for link in page.select('a[title][href^="../metrics.html#"]')
    }
    assert len(linked) == len(MEANING)  # its table has all of them
    home = soups["index.html"]
    links = {link["href"] for link in home.select(".content a[href]")}
    assert {
        "notebooks/00_hello_rlhf.html",
        "metrics.html",
        "running.html",
        "hands-on-rlhf.zip",
    } <= links
    assert len(home.select(".card img")) == len([*ROOT.glob("notebooks/0*.ipynb")])


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


def search(page, address, words: str) -> list[str]:
    """The addresses that a search finds, best first."""
    page.goto(f"{address}search.html?q={quote(words)}")
    page.wait_for_function(
        "document.querySelector('#search-results .search-summary')?.textContent.includes('found')"
    )
    return page.eval_on_selector_all(
        "#search-results li a", "links => links.map(link => link.href)"
    )


def test_the_search_finds_whitening(page, address):
    assert any(
        "glossary.html#term-whitening" in link for link in search(page, address, "whitening")[:2]
    )


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("PPOConfig", "api.html#rlhf_course.PPOConfig"),
        ("over-optimisation", "glossary.html#term-over-optimisation"),
        ("over-optimization", "glossary.html#term-over-optimization"),
    ],
)
def test_the_search_finds_names_and_both_spellings(page, address, words, place):
    assert any(place in link for link in search(page, address, words)[:3])


@pytest.mark.parametrize("key", [*MEANING, "env/reward_mean", "env/reward_std", "env/reward_dist"])
def test_a_stat_is_the_first_that_the_search_finds(page, address, key):
    anchor = key.replace("/", "-").replace("_", "-")
    assert urljoin(address, f"metrics.html#{anchor}") == search(page, address, key)[0].split("?")[0]


def test_a_click_on_the_first_result_shows_the_stat(page, address):
    assert any(
        link.endswith("#ppo-policy-clipfrac") for link in search(page, address, "clipfrac")[:2]
    )
    page.click("#search-results li a")
    page.wait_for_url("**/metrics.html*")
    place = f"document.getElementById('{urlsplit(page.url).fragment}').getBoundingClientRect().y"
    page.wait_for_function(f"0 <= {place} && {place} < innerHeight / 2")
