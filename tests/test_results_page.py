"""RESULTS.md: tables follow the cards, claims hold, and commands give the cards again."""

import json
import re
from math import exp

import pytest

from dev.figures import results
from docs._ext import results as tables
from rlhf_course.course.presets import ROOT

FAST = ("length_drift", "engine_corrections", "lambda_length_critic")
SLOW = ("grpo_fixed_point", "penalty_placement", "silent_faults")  # minutes on busy cores


def close(new, old, relative=1e-3, absolute=1e-6):
    """Assert that two cards agree, except for the seconds."""
    assert type(new) is type(old) or {type(new), type(old)} == {int, float}
    if isinstance(old, dict):
        assert new.keys() == old.keys()
        for key in old.keys() - {"seconds", "gap"}:  # a gap is rounding
            close(new[key], old[key], relative, absolute)
    elif isinstance(old, list):
        assert len(new) == len(old)
        for one, other in zip(new, old, strict=True):
            close(one, other, relative, absolute)
    elif isinstance(old, float | int) and not isinstance(old, bool):
        assert new == pytest.approx(old, rel=relative, abs=absolute)
    else:
        assert new == old


@pytest.mark.quick
def test_the_page_follows_the_cards():
    text = tables.PAGE.read_text(encoding="utf-8")
    assert text == tables.page(), "run python docs/_ext/results.py"


@pytest.mark.quick
def test_every_result_has_a_claim_a_figure_a_command_prior_work_and_limits():
    text = tables.PAGE.read_text(encoding="utf-8")
    sections = re.split(r"^## \d · ", text, flags=re.M)[1:]
    assert len(sections) == len(tables.NAMES) == len(results.RESULTS)
    for name, section in zip(tables.NAMES, sections, strict=True):
        for part in ("**Claim.**", "**Prior work.**", "**Limits.**", "s far as we know"):
            assert part in section or part == "s far as we know" and "We found neither" in section
        assert f"(figs/results/{name}.svg)" in section
        assert f".venv/bin/python dev/figures/results.py {name}\n" in section
        assert tables.marks(name)[0] in section


@pytest.mark.quick
def test_links_of_the_page_lead_to_files():
    links = re.findall(r"\]\(([^)#\s]+)", tables.PAGE.read_text(encoding="utf-8"))
    assert all((ROOT / link).exists() for link in links if "://" not in link)


@pytest.mark.parametrize("name", tables.NAMES)
def test_drawing_a_card_again_changes_nothing(name, tmp_path):
    file = results.draw_result(name, tmp_path)
    committed = (results.FOLDER / file.name).read_text(encoding="utf-8")
    assert file.read_text(encoding="utf-8") == committed, f"run dev/figures/results.py {name}"


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_the_command_computes_the_card_again(name):
    new = json.loads(json.dumps(results.rounded(results.RESULTS[name][0]())))
    old = results.read_result(name)
    close(new | {"seconds": 0}, old)
    assert old["seconds"] < 300


@pytest.mark.quick
def test_claim_1():
    card = results.read_result("length_drift")
    drift = {(row["divisor"], row["group"], row["share"]): row for row in card["drift"]}
    for (divisor, group, share), row in drift.items():
        assert row["wrong"] == pytest.approx(-row["right"], abs=1e-5)
        assert row["wrong"] == pytest.approx(drift[divisor, group, 0.5]["wrong"], abs=1e-5)
        if divisor == "mean per response":
            assert row["wrong"] == pytest.approx(drift[divisor, 8, share]["wrong"]) and row["wrong"]
        if divisor == "mean per token" and 8 <= group < 64:  # doubling the group halves the drift
            assert drift[divisor, 2 * group, share]["wrong"] / row["wrong"] == pytest.approx(
                0.5, abs=0.02
            )
        if divisor == "constant":
            assert abs(row["wrong"]) < 1e-9
    assert card["shared EOS"] < 1e-12


@pytest.mark.quick
def test_claim_2():
    card = results.read_result("engine_corrections")
    rows = {(row["noise"], row["weight"]): row for row in card["forms"]}
    losses = {}
    for noise in (0.1, 0.3, 1.0):
        for weight in ("per token", "per response"):
            worse = rows[noise, weight]["worse than none"]
            assert worse[0] >= card["languages"] / 2 and worse[-1] <= 2
            losses[noise, weight] = rows[noise, weight]["median error"][0]
            losses[noise, weight] /= rows[noise, "no weight"]["median error"][0]
    assert all(losses[0.1, weight] < 1.05 for weight in ("per token", "per response"))
    assert losses[1.0, "per token"] > 1.5 and losses[1.0, "per response"] > 5
    ratios = {"0.1": [], "0.3": [], "1.0": []}
    for row in card["by length"]:
        for noise, found in ratios.items():
            _, second, kl = row[noise]
            found.append(second / exp(2 * kl))
    middle = {noise: sorted(found)[len(found) // 2] for noise, found in ratios.items()}
    assert abs(middle["0.1"] - 1) < 0.01 and abs(middle["0.3"] - 1) < 0.03 and middle["1.0"] > 1.5


@pytest.mark.quick
def test_claim_3():
    card = results.read_result("lambda_length_critic")
    excess = {
        (row["critic"], row["tokens"]): row["excess"] for row in card["table"] if row["batch"] > 64
    }
    assert max(value for (_, tokens), value in excess.items() if tokens == 4) < 0.01
    assert excess["known = 0", 256] > 0.5
    assert max(value for (name, _), value in excess.items() if name != "known = 0") < 0.05


@pytest.mark.quick
def test_claim_4():
    for row in results.read_result("grpo_fixed_point")["table"]:
        collapses = row["penalty"] == "ratio × k3" and row["divides"] and row["β"] < 1
        assert row["law exists"] is not collapses
        assert row["largest probability"] > 0.95 if collapses else row["gap"] < 1e-3
        assert row["share"] < 0.995


@pytest.mark.quick
def test_claim_5():
    lowest = {}
    for row in results.read_result("penalty_placement")["table"]:
        key = row["place"], row["penalty"]
        lowest[key] = min(row["share"], lowest.get(key, 1.0))
    reach = {key for key, share in lowest.items() if share > 0.999}
    assert reach == {("in the reward", "kl")} | {("in both", n) for n in ("kl", "k3", "full")}
    assert min(lowest.values()) < 0


@pytest.mark.quick
def test_claim_6():
    card = results.read_result("silent_faults")
    assert (
        card["whitening"]["lost"]["eight words"] == 0 < 0.9 < card["whitening"]["lost"]["one empty"]
    )
    allowed, excluded = card["cuDNN"]["bf16"]
    assert allowed > 3 * excluded
    assert card["positions"]["without"][1] > 0.1 > 1e-3 > max(card["positions"]["with"])
