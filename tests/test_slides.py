"""The slides: source, numbers and figures fit together, and in a browser nothing is cut off or
fetched.
"""

import importlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from dev.figures.kit import BODY
from rlhf_course.course.presets import ROOT, load_preset

FIGURES = ROOT / "figs"
pytest.importorskip("polib", reason="make site installs docs/requirements.txt")
build = importlib.import_module("dev.build_slides")

SOURCE = build.SOURCE.read_text(encoding="utf-8")
SLIDES = build.split_slides(SOURCE)
BROWSER = os.environ.get("CHROME_PATH") or next(
    filter(None, map(shutil.which, build.BROWSERS)), None
)


@pytest.mark.parametrize("language", build.NAMES)
def test_html_and_pdf_were_made_from_this_source(language):
    name = build.HERE / build.NAMES[language]
    content = build.content(FIGURES, language)
    wanted = build.fingerprint(content)
    stale = f"{name.name}: stale; run `make slides`"
    page = Path(f"{name}.html").read_text(encoding="utf-8")
    assert f'name="{build.STAMP}" content="{wanted}"' in page, stale
    assert Path(f"{name}.pdf").read_bytes().endswith(f"% {build.STAMP} {wanted}\n".encode()), stale


def test_a_placeholder_without_a_value_is_named_with_its_slide():
    cards = {
        "01": {"metrics": {"gain_0.2": 0.5, "a: b (c)": -1.0}, "checks": {"x": {"passed": True}}}
    }
    numbers = "{{01.metrics.gain_0.2:.0%}} {{01.metrics.a: b (c):.1f}} {{01.checks:passed}}"
    markdown = f"---\nmarp: true\n---\n# One\n{numbers}\n"
    assert "50% −1.0 1 of 1" in build.fill(markdown, cards)
    with pytest.raises(
        SystemExit, match=r"slide 2 \(Two\): {{01.metrics.other:.1f}}: not measured"
    ):
        build.fill(markdown + "\n---\n# Two\n{{01.metrics.other:.1f}}\n", cards)


def test_the_exercises_commands_name_settings_that_exist():
    commands = re.findall(r"^run --only (?:[^\n\\]|\\\n)*", SOURCE, re.M)
    assert len(commands) >= 4
    for command in commands:
        start = re.search(r"--only (\d+)", command)[1]
        (notebook,) = (
            path.stem for path in (ROOT / "rlhf_course/course/configs").glob(f"{start}_*.yaml")
        )
        overrides = dict(re.findall(r"--override[\s\\]+(\w+)=(\S+)", command))
        assert overrides
        load_preset(notebook, "tiny", {key: json.loads(value) for key, value in overrides.items()})


@pytest.fixture(scope="module")
def page():
    """The HTML opened from disk in Chromium without a network, and what was asked for or complained
    of.
    """
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="slides in a browser: needs pip install playwright"
    )
    if not BROWSER:
        pytest.skip("slides in a browser: needs Debian's package chromium, or CHROME_PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        context = browser.new_context(viewport={"width": 1280, "height": 720}, offline=True)
        page = context.new_page()
        page.problems = []
        page.on(
            "request",
            lambda r: (
                r.url.startswith(("file:", "data:")) or page.problems.append(f"asks for {r.url}")
            ),
        )
        page.on(
            "requestfailed", lambda request: page.problems.append(f"failed: {request.url[:100]}")
        )
        page.on(
            "console",
            lambda message: message.type == "error" and page.problems.append(message.text),
        )
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.goto((build.HERE / "slides.html").as_uri())
        yield page
        browser.close()


def test_nothing_is_fetched_and_every_formula_is_drawn(page):
    assert not page.problems
    assert page.locator("section").count() == len(SLIDES)
    formulas = page.locator("mjx-container")
    assert page.locator("mjx-container > svg").count() == formulas.count()
    source = re.sub(r"```.*?```|<!--.*?-->|`[^`]*`", "", SOURCE, flags=re.S)
    assert formulas.count() == len(re.findall(r"\$\$.+?\$\$|\$.+?\$", source, re.S))
    assert page.locator("[data-mml-node=merror], mjx-container [fill=red]").count() == 0, (
        "an error or unknown macro"
    )


def test_no_slide_overflows_and_no_text_is_too_small(page):
    problems = page.evaluate(
        """body => [...document.querySelectorAll('section')].flatMap((section, index) => {
            const problems = [], say = text => problems.push(`slide ${index + 1}: ${text}`)
            const frame = section.getBoundingClientRect()
            const scale = frame.width / section.offsetWidth
            const footer = section.querySelector('footer')
            const foot = footer?.getBoundingClientRect().top ?? frame.bottom
            if (section.scrollHeight > section.clientHeight) say('is too high')
            if (section.scrollWidth > section.clientWidth) say('is too wide')
            for (const part of section.querySelectorAll('*')) {
                if (part.closest('header, footer, mjx-container :not(mjx-container)')) continue
                const box = part.getBoundingClientRect(), tag = part.tagName
                const name = `${tag} ${part.textContent.slice(0, 40)}`
                if (box.bottom > foot + 1) say(`${name} reaches into the footer`)
                if (box.right > frame.right - 71 * scale) say(`${name} reaches into the margin`)
                if (tag == 'PRE' && part.scrollWidth > part.clientWidth) say(`${name} is too wide`)
                if (tag == 'IMG' && box.height < 250 * scale) say(`${part.alt} is too small`)
                if (tag == 'IMG') {  // a figure's smallest words are its body's
                    const ways = [part.clientWidth / part.naturalWidth,
                        part.clientHeight / part.naturalHeight]
                    const cut = getComputedStyle(part).objectFit == 'cover'
                    const size = body / 0.75 * (cut ? Math.max : Math.min)(...ways)
                    if (size < 18) say(`${part.alt}: words of ${size} px`)
                }
                const own = [...part.childNodes].some(n => n.nodeType == 3 && n.textContent.trim())
                const size = parseFloat(getComputedStyle(part).fontSize)
                if (own && size < 18) say(`${name}: text is too small`)
            }
            return problems
        })""",
        BODY,
    )
    assert not problems, "\n".join(problems)
