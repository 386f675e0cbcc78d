"""The page `live` in a real browser: its numbers are Python's, and it asks nobody else."""

import functools
import http.server
import re
import shutil
import threading

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_course.course.presets import ROOT
from rlhf_course.rewards import NgramSentiment, SentimentReward
from rlhf_course.runtime.files import read_json

EXACT = 1e-3
MODELS = ROOT / "models"
TEXTS = [
    "This movie",
    "I saw this film in 1984, and it's the WORST I've ever seen!!",
    "Ein Film über Züge; 一部关于火车的电影 🎬\u2028\tкино  ",
    "<|endoftext|>[CLS] so\n\nso [PAD]",
    "x",
    "the acting was not bad at all, " * 90,
]


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        """Nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page alone, with its files."""
    pytest.importorskip("mistune")
    folder = tmp_path_factory.mktemp("live")
    from docs._ext import live

    live.write_alone(folder)
    return folder


@pytest.fixture(scope="module")
def page(folder):
    """The page, loaded; ``page.troubles`` collects errors and requests to other hosts."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs docs/requirements.txt")
    if not shutil.which("chromium"):
        pytest.skip("needs Debian's package chromium")
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Silent, directory=folder)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    with server, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.troubles = []
        page.route(lambda url: not url.startswith((address, "file:")), lambda route: route.abort())
        page.on("requestfailed", lambda request: page.troubles.append(request.url))
        page.on("pageerror", lambda error: page.troubles.append(str(error)))
        page.route("**/favicon.ico", lambda route: route.fulfill(body=""))
        page.goto(address)
        page.evaluate("live.ready")
        yield page
        browser.close()
        server.shutdown()


@pytest.fixture(scope="module")
def names(page) -> list[str]:
    """The policies, all loaded."""
    names = page.evaluate(
        "JSON.parse(document.getElementById('live-data').textContent).map(run => run.name)"
    )
    for name in names:
        page.evaluate("name => live.call('policy', name)", name)
    return names


def logits(page, text: str, name: str, count: int = 0) -> tuple[torch.Tensor, list[int]]:
    """The page's logits of the next token, and its draws."""
    code = """async ([text, name, count]) => {
        const { logits, draws } = await live.call("logits", text, name, count);
        return { logits: [...logits], draws };
    }"""
    answer = page.evaluate(code, [text, name, count])
    return torch.tensor(answer["logits"]), answer["draws"]


def test_the_policies_show_what_the_page_says():
    runs = [read_json(path) for path in sorted(MODELS.glob("imdb-live-policies/*/run.json"))]
    assert [run["beta"] for run in runs] == [0.0, 0.16, 0.6]
    free, middle, close = (run["after"] for run in runs)
    best = max(runs[0]["path"], key=lambda point: point["second"])
    assert free["score"] > best["score"] and free["kl"] > best["kl"]
    assert free["second"] + free["second_ci"] < best["second"] - best["second_ci"]
    assert middle["score"] > 1.1 and middle["kl"] < 10 and close["kl"] < middle["kl"]


def test_all_models_compute_what_python_computes(page, names):
    base = MODELS / "gpt2-imdb-mini"
    tokenizer = AutoTokenizer.from_pretrained(base)
    policies = {"reference": AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)}
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        policies[name] = PeftModel.from_pretrained(model, MODELS / "imdb-live-policies" / name)
    for name, policy in policies.items():
        for text in TEXTS:
            ids = torch.tensor([tokenizer(text)["input_ids"][-180:]])
            with torch.no_grad():
                exact = policy(input_ids=ids).logits[0, -1]
            assert (logits(page, text, name)[0] - exact).abs().max() < EXACT, (name, text)
    scores = torch.tensor(page.evaluate("texts => live.call('score', texts)", [*TEXTS, ""]))
    first = SentimentReward(str(MODELS / "distilbert-imdb-mini"))
    second = NgramSentiment.from_pretrained(MODELS / "ngram-imdb-judge")
    exact = torch.stack([first([*TEXTS, ""]), second([*TEXTS, ""])], 1)
    assert (scores - exact).abs().max() < EXACT


def test_draws_have_the_policys_distribution(page, names):
    exact, draws = logits(page, "I saw this movie", names[-1], 2000)
    p = exact.softmax(0)
    counts = torch.tensor(draws).bincount(minlength=len(exact))
    common = p > 0.005  # the others count together
    expected = 2000 * torch.cat([p[common], p[~common].sum()[None]])
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    n = len(counts) - 1
    limit = n * (1 - 2 / (9 * n) + 3.09 * (2 / (9 * n)) ** 0.5) ** 3  # chi-square's 99.9 %
    assert n > 20 and ((counts - expected) ** 2 / expected).sum() < limit


def test_the_page_writes_reads_and_judges(page):
    page.fill("#live-prompt", "")
    page.click("#live-write button")
    page.wait_for_function("document.getElementById('live-status').textContent.includes('per sec')")
    print(page.inner_text("#live-status"))
    rows = page.locator("#live-strip tbody tr").all()
    steps = [[*map(number, row.locator("td").all_text_contents()[1:])] for row in rows]
    assert len(steps) > 1 and all(abs(new - ref - gap) < 0.02 for ref, new, gap, _ in steps)
    assert abs(sum(step[2] for step in steps) - steps[-1][3]) < 0.02 * len(steps)
    page.locator("#live-n").fill("2")
    page.click("#live-best button")
    page.wait_for_function(
        "document.getElementById('live-best-verdict').textContent.includes('kept')"
    )
    scores = page.locator("#live-best-table tbody td:nth-child(2)").all_text_contents()
    assert len(scores) == 4 and number(scores[0]) == max(map(number, scores))


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def test_it_is_small_and_asks_nobody_else(page, folder):
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert sum(size for path, size in sizes.items() if "gpt2-imdb-mini" not in path.parts) < 8e6
    lines = [line for path in folder.glob("live/*.js") for line in path.read_text().splitlines()]
    code = [line for line in lines if not re.match(r"\s*(//|/?\*|$)", line)]
    assert len(code) <= 400 and max(map(len, lines)) <= 160
    children = psutil.Process().children(recursive=True)
    renderers = [child for child in children if "--type=renderer" in child.cmdline()]
    assert max(child.memory_full_info().uss for child in renderers) < 300e6
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    unnamed = (
        "[...document.querySelectorAll('input, select, textarea')].filter(x => !x.labels.length)"
    )
    assert page.evaluate(f"{unnamed}.length") == 0 and page.troubles == []


def test_a_file_says_that_it_needs_a_server(page, folder):
    page.goto((folder / "index.html").as_uri())
    page.evaluate("live.ready")
    assert "file://" in page.inner_text("#live-status")
