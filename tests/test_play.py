"""The page to play with shows what the package and notebook 03 compute."""

import math
import shutil

import pytest
import torch

from rlhf_course.course.presets import ROOT
from rlhf_course.ppo.algorithm import gae, policy_loss

EXACT = 1e-4


@pytest.fixture(scope="module")
def play():
    from docs._ext import play

    return play


@pytest.fixture(scope="module")
def toy(play) -> dict:
    """The toy language as the page has it, in float64."""
    return {
        name: torch.tensor(play.data()["toy"][name], dtype=torch.float64)
        for name in ("log_ref", "rewards")
    }


@pytest.fixture(scope="module")
def page(play, tmp_path_factory):
    """The page alone, opened as a file; ``page.troubles`` collects errors and requests to
    elsewhere.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs docs/requirements.txt")
    if not shutil.which("chromium"):
        pytest.skip("needs Debian's package chromium")
    mistune = pytest.importorskip("mistune")
    folder = tmp_path_factory.mktemp("play")
    shutil.copytree(ROOT / "docs/static", folder / "_static")
    body = mistune.html(play.play_page())
    head = (
        "<!DOCTYPE html><html lang='en'><meta charset='utf-8'><meta name='viewport'"
        " content='width=device-width'>"
    )
    (folder / "play.html").write_text(f"{head}<title>Play</title>{body}</html>", encoding="utf-8")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page()
        page.address = (folder / "play.html").as_uri()
        page.troubles = []
        page.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
        page.on("requestfailed", lambda request: page.troubles.append(request.url))
        page.on("pageerror", lambda error: page.troubles.append(str(error)))
        page.goto(page.address)
        yield page
        browser.close()


def show(page, **settings) -> None:
    """Open the page with these sliders."""
    page.goto("about:blank")
    page.goto(f"{page.address}#{'&'.join(f'{name}={value}' for name, value in settings.items())}")


def table(page, name: str) -> list[list[str]]:
    rows = page.locator(f"#play-{name} tbody tr").all()
    return [
        [text.replace("−", "-") for text in row.locator("td").all_text_contents()] for row in rows
    ]


def optimum(toy: dict, beta: float) -> tuple[float, float]:
    """KL and expected reward of π*."""
    best = (toy["log_ref"] + toy["rewards"] / beta).log_softmax(0)
    return (best.exp() @ (best - toy["log_ref"])).item(), (best.exp() @ toy["rewards"]).item()


@pytest.mark.parametrize(
    ("epsilon", "ratio"), [(0.2, 1.3), (0.2, 0.5), (0.05, 0.97), (0.8, 1.9), (0, 1.01)]
)
def test_the_clipped_objective_is_the_packages(page, epsilon, ratio):
    show(page, epsilon=epsilon, ratio=ratio)
    rows = table(page, "clip")
    for advantage, (name, value, gradient) in zip((1, -1), rows, strict=True):
        loss, _, clipped = policy_loss(
            torch.tensor([[math.log(ratio)]]),
            torch.zeros(1, 1),
            torch.tensor([[float(advantage)]]),
            epsilon,
        )
        assert name == f"A = {advantage}" and abs(float(value) + loss.item()) < EXACT
        assert ("clipped" in gradient) == clipped.item()


@pytest.mark.parametrize("beta", [0.051, 0.2, 0.5, 1, 3.3, 19.5])
def test_the_optimum_is_the_exact_one(page, toy, beta):
    show(page, beta=beta)
    (name, kl, reward, value), (nearest, *_), _ = table(page, "frontier")
    exact = optimum(toy, beta)
    assert (
        name == "π*" and abs(float(kl) - exact[0]) < EXACT and abs(float(reward) - exact[1]) < EXACT
    )
    closed_form = beta * torch.logsumexp(toy["log_ref"] + toy["rewards"] / beta, 0).item()
    assert abs(float(value) - closed_form) < EXACT
    assert nearest == {0.051: "PPO, β = 0.2", 3.3: "PPO, β = 2", 19.5: "PPO, β = 2"}.get(
        beta, f"PPO, β = {beta}"
    )


@pytest.mark.parametrize("lam", [0, 0.5, 0.95, 1])
def test_advantages_are_the_packages(page, play, lam):
    show(page, **{"lambda": lam})
    strip = play.data()["strip"]
    rewards, values = (
        torch.tensor([strip[name]], dtype=torch.float64) for name in ("reward", "value")
    )
    advantages, _ = gae(rewards, values, torch.ones_like(rewards), gamma=1.0, lam=lam)
    rows = table(page, "gae")
    assert [row[0] for row in rows] == strip["token"] and len(rows) > 3
    for row, *exact in zip(
        rows, strip["kl"], strip["reward"], strip["value"], advantages[0].tolist(), strict=True
    ):
        assert (
            max(abs(float(text) - number) for text, number in zip(row[1:], exact, strict=True))
            < EXACT
        )


def test_the_language_is_notebook_03s(play, toy):
    """And the page's frontier is the one that its run recorded."""
    definitions = play.definitions(play.LANGUAGE | {"objective"})
    assert torch.allclose(definitions["toy_ref"], toy["log_ref"], atol=1e-5)
    assert torch.allclose(definitions["toy_rewards"].double(), toy["rewards"], atol=1e-7)
    card = play.read_json(play.RUN)["curves"]["toy"]
    for beta, best in zip(card["β"], card["J*"], strict=True):
        kl, reward = optimum(toy, beta)
        assert abs(reward - beta * kl - best) < EXACT


def test_nothing_is_fetched_and_it_fits_a_phone(page):
    show(page, beta=0.5)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.troubles == []
