"""Practice 1 to 4: a reference solution passes, and lazy answers are rejected for a reason."""

import nbformat
import pytest

from rlhf_course.course.presets import ROOT

FOLDER = ROOT / "notebooks" / "practice"
import planted_lines  # noqa: E402
import practice1  # noqa: E402
import practice2  # noqa: E402
import practice3  # noqa: E402
import practice4  # noqa: E402


def witnesses_of(run, fault, first):
    """Return two statistics that separate, the first and the last in the order of the table."""
    keys = [key for key in run if fault != "healthy" and practice1.separates(run, key, first)]
    return [*keys[:1], *keys[-1:]]


def diagnosis(seed, shift=0, witnesses=None):
    keys, plan = ("fault", "first", "witnesses"), practice1.plan(seed).items()
    said, runs = {}, practice1.runs(seed)
    for run, (_, fault, first) in plan:
        said[run] = fault, first + shift, witnesses or witnesses_of(runs[run], fault, first)
    return {run: dict(zip(keys, values, strict=True)) for run, values in said.items()}


def test_diagnose():
    assert practice1.verdict(diagnosis(0)) == {}
    plan, runs = practice1.plan(0), practice1.runs(0)
    shared = [practice1.separates(runs[x], "objective/kl", plan[x][2]) for x in "ABCDEF"]
    assert sum(shared) >= 3  # the page names the KL as a witness of several runs
    assert practice1.verdict(diagnosis(0, shift=2)) == {}
    lazy = {"fault": "healthy", "first": None, "witnesses": []}
    assert len(practice1.verdict(dict.fromkeys("ABCDEF", lazy))) == 5
    for shift, witnesses, reason in (
        (3, None, "first step"),
        (0, ["time/ppo/total", "objective/kl"], "not a column"),
        (0, ["objective/kl", "objective/kl"], "two different"),
        (0, ["tokens/queries_len_mean", "tokens/queries_len_std"], "healthy range"),
    ):
        found = practice1.verdict(diagnosis(0, shift, witnesses))
        assert len(found) >= 4 and all(reason in problem for problem in found.values())


def test_every_planted_line_changes_numbers():
    clean = planted_lines.clean_source(0)
    right = practice2.run_step(clean)
    for before, after in planted_lines.MUTATIONS:
        assert clean.count(before) == 1
        found = practice2.run_step(clean.replace(before, after))
        assert any(abs(found[key] - right[key]) > 1e-4 * abs(right[key]) for key in right), after


def test_debug():
    line = planted_lines.planted(1)
    fixed = planted_lines.clean_source(1).splitlines()[line - 1]
    wrong = planted_lines.source(1).splitlines()[line - 1]
    assert practice2.verdict({"line": line}, 1) is None
    assert practice2.verdict({"line": line, "fixed": fixed}, 1) is None
    for answer, reason in (
        ({"line": 1}, "clean line"),
        ({"line": list(range(200))}, "one number"),
        ({"line": line, "fixed": wrong}, "without a change"),
    ):
        assert reason in practice2.verdict(answer, 1), answer


ACTING, PRAISE = {"acting", "actors", "cast", "performance"}, {"good", "great", "superb", "best"}


def counts_pairs(texts):
    rows = [text.lower().replace(",", " ").replace(".", " ").split() for text in texts]
    return [
        sum(abs(i - j) < 5 for i, x in enumerate(row) if x in ACTING for j in places)
        for row in rows
        for places in [[j for j, y in enumerate(row) if y in PRAISE]]
    ]


def test_design_and_defeat():
    beats = "good acting " * 10
    assert practice3.verdict(counts_pairs, beats) is None
    natural = "I think the acting in this film is great and the cast is superb."
    for reward, text, reason in (
        (lambda texts: [1.0] * len(texts), beats, "one number for all"),
        (lambda texts: list(map(practice3.gold, texts)), beats, "gold itself"),
        (counts_pairs, "", "fewer than five"),
        (counts_pairs, natural, "gold is 1"),
        (counts_pairs, "the of is a an but", "not beaten"),
        (lambda texts: list(map(len, texts)), beats, "too rarely"),
    ):
        assert reason in practice3.verdict(reward, text), reason


def test_policy_beats_a_count(capsys):
    practice3.attack(counts_pairs)
    best, policy = [line.split() for line in capsys.readouterr().out.splitlines()[:2]]
    assert float(policy[2].strip(",")) > float(best[4].strip(","))
    assert float(policy[-1]) < float(best[-1])


def test_budget(monkeypatch):
    monkeypatch.setattr(practice4, "UNSEEN", 1)
    budget, good = practice4.Budget(), {"init_kl_coef": 0.2, "learning_rate": 3e-3, "ppo_epochs": 4}
    budget.try_run(good, 2)
    with pytest.raises(ValueError, match="18 are left"):
        budget.try_run(good, 19)
    assert practice4.verdict({"settings": good, "steps": 12}, budget) is None
    for settings, steps, reason in (
        (practice4.DEFAULT, 18, "do not clearly beat the default"),
        (good | {"learning_rate": 0.3}, 3, "from the reference"),
        (good, 19, "more than 20"),
        (good, 0, "whole number"),
    ):
        found = practice4.verdict({"settings": settings, "steps": steps}, budget)
        assert reason in found, found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[1-4]_*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_have_two_hints_and_no_outputs(path):
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells)
    assert text.count("<summary>Hint") == 2 and "<summary>What you have learned" in text
    assert not any(cell.get("outputs") for cell in cells)
