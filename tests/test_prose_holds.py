"""Sentences about results in notebooks 01, 04, 05 and deeper/calibration hold for every run.

A sentence in a markdown cell that states a result names the `tiny` preset, and the committed run
supports it; or the sentence is general, and listed below. A printed sentence follows the results.
"""

import json
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from rlhf_course.audit import ARGUABLE, PASS, RISKS, audit_change
from rlhf_course.course.presets import ROOT, load_preset
from rlhf_course.evaluation import mean_ci

pytestmark = pytest.mark.quick
NAMES = {
    "01": "01_reward_modeling",
    "calibration": "deeper/calibration",
    "04": "04_gpt2_imdb_ppo",
    "05": "05_lora_rlhf_baichuan",
}
NOTEBOOKS = {
    number: json.loads((ROOT / f"notebooks/{name}.ipynb").read_text("utf-8"))["cells"]
    for number, name in NAMES.items()
}

# --- the search for sentences that state a result

OUTCOME = re.compile(
    r"\b(ris(es?|en)|rose|falls?|fell|fallen|shrinks?|grows?|grew|improves?|increases?|decreases?"
    r"|levels? off|approach(es)?|fluctuates?|passes|fails?|fixes|beats?|exceeds?|lost|ignores?"
    r"|closer|higher|lower|highest|lowest|better|worse|smaller|larger|shorter|longer|nearly|close|almost"
    r"|near|most of|most often|some of|answers some|small (share|minority)|clearly|barely|rarely"
    r"|takes away|starts? (at|near|close)|stops|not always|first steps|together|drifted|incoherent"
    r"|guessing|shifts|more than half|(less|more|as) accurate|overlap|often occurs)\b",
    re.IGNORECASE,
)
CONDITION = re.compile(r"\b(if|when|whether|unless|where|until|requires?)\b|\?|\*\*Pred", re.I)
HEDGE = re.compile(r"\b(may|might|can|cannot|could|should|would|must|usually)\b", re.I)
TINY = re.compile(r"`tiny`|this preset")
REST_OF_PARAGRAPH = "The rest of this paragraph describes"
GENERAL = {  # beginnings of sentences that define, cite or argue, and state no result of a run
    "01": (
        "People agree more often on which",
        "*Chosen* means better than the rejected",
        "Its derivative by the difference",
        "The table lists the frequent words",
        "We now score all held-out pairs, and",
        "We need few new labels",
        "Bars show the share of audit prompts",
    ),
    "calibration": (
        "The **temperature** is the divisor",
        "We fit it on one half",
        "*Centering* adds the term",
        "So the share of pairs on which",
        "With few pairs that share",
        "We group the pairs by",
        "Over all pairs, no judge",
        "In the synthetic world the longer answer",
        "Compare the reward model with gold",
        "The half-width falls",
        "Near the ceiling, a better model",
        "* Two labelers' agreement",
    ),
    "04": (
        "A rise of the loss on reviews by x nats",
        "The table shows the five texts",
        "At 0, the critic is no better",
        "Boxes are models",
    ),
    "05": (
        "$B$ starts at 0",
        "For a small chat model, see",
        "The table compares the reward model, on held-out",
        "Horizontal: share of prompts",
        "By step 100, answers had shrunk",
        "Like the score, gold",
        "* SFT teaches the form",
        "* A rising score shows only",
    ),
}
ONCE_FALSE = (  # sentences that these notebooks stated for every preset
    "**You will see** the loss fall from ln 2 and the accuracy approach a ceiling.",
    "You will see an audit that the model fails, and how added data fixes at least one failure.",
    "The program that wrote the dialogues has few templates, so the same question often occurs in "
    "both the training split and the held-out split.",
    "The untrained model has almost no preference: it gives both answers nearly the same score.",
    "Accuracy levels off near the ceiling that the labels set, while the margin may keep growing.",
    "Yes: even the lower end of the interval for *longer wins* in the table lies above 50 %.",
    "No. The last column shows that gold is less accurate.",
    "The normal answer does not always have the higher gold:",
    "Some of the probes that failed still fail.",
    "In our run no finding stops PPO, so the verdict begins with *Start PPO*.",
    "Adding training pairs fixes some failures, but the shares of other probes may fall.",
    "Near 0. Half of the openings come from positive reviews.",
    "The coefficient β barely moves, because this run uses fewer samples than `horizon`.",
    "Length fluctuates without a trend, because each response's length is drawn beforehand.",
    "Compare its last row with its first: in our run the KL penalty takes away most of the gain.",
    "Some of the small model's sentences are incoherent even before PPO.",
    "The share is near 0, because nearly every draw of 8 queries shows a gain.",
    "The mean score fell from 0.559 to 0.350, a change that is smaller than this margin of error.",
    "In this run the share falls; if you use another seed, compare the two rows.",
    "Only a small share of the weights changes, as the table's first row shows.",
    "In pure bfloat16, most of the weights do not change.",
    "**You will see** a base model that ignores the question.",
    "A text that ends is not necessarily an answer: the base also ends most of its texts.",
    "The base here answers some questions, so PPO could begin without SFT.",
    "This is the case in the first steps, because the value head starts with random weights.",
    "Unlike in that experiment, the answers have not become shorter.",
)


def paragraphs(number: str):
    """Yield a notebook's paragraphs and list items; tables, headings and code are left out."""
    for cell in NOTEBOOKS[number]:
        if cell["cell_type"] == "markdown":
            text = re.sub(r"</?[a-z]+[^>]*>", " ", "".join(cell["source"]))
            for paragraph in re.split(r"\n\s*\n|\n(?=\* )", text):
                paragraph = " ".join(paragraph.split())
                if paragraph and not paragraph.startswith(("|", "#", "```")):
                    yield paragraph


def sentences(paragraph: str):
    """Yield each sentence, and whether it is about the `tiny` preset."""
    rest = False
    for sentence in re.split(r"(?<=[.?!])[*\"”)]*\s+(?=[\"“*(`$A-Z0-9])", paragraph):
        yield sentence, rest or bool(TINY.search(sentence))
        rest = rest or REST_OF_PARAGRAPH in sentence


def states_a_result(sentence: str) -> bool:
    """Return whether a sentence has an outcome word without a condition or a hedge.

    A condition covers its part of the sentence, up to a semicolon; a hedge covers its clause.
    """
    for part in re.split(r";\s", sentence):
        if CONDITION.search(part):
            continue
        if re.match(r"(yes|no)[:.,]", part, re.IGNORECASE):
            return True
        for clause in re.split(r"[,:]\s", part):
            if OUTCOME.search(clause) and not HEDGE.search(clause):
                return True
    return False


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_a_sentence_about_a_result_names_the_preset(number):
    used = set()
    for paragraph in paragraphs(number):
        for sentence, about_tiny in sentences(paragraph):
            if about_tiny or not states_a_result(sentence):
                continue
            general = [start for start in GENERAL[number] if sentence.startswith(start)]
            assert general, f"{number} states a result for every preset: {sentence}"
            used |= {*general}
    assert used == {*GENERAL[number]}, "these sentences are gone"


@pytest.mark.parametrize("paragraph", ONCE_FALSE)
def test_the_search_finds_sentences_that_were_false(paragraph):
    found = [s for s, about_tiny in sentences(paragraph) if not about_tiny and states_a_result(s)]
    assert found


# --- sentences about `tiny`, and the committed runs


class Run:
    """A committed run's numbers: its card, and the outputs of its cells; ``change`` alters both."""

    def __init__(self, number: str, change=lambda values: values) -> None:
        name = NAMES[number].removeprefix("deeper/")
        card = json.loads((ROOT / f"figs/measured/{name}.json").read_text("utf-8"))
        self.cells = NOTEBOOKS[number]
        self.change = lambda values: change(np.array(values, float))
        self.metrics, self.checks, self.curves = card["metrics"], card["checks"], card["curves"]

    def metric(self, name: str) -> float:
        return self.change([self.metrics[name]])[0]

    def check(self, name: str) -> float:
        return self.change([self.checks[name]["value"]])[0]

    def curve(self, column: str, table: str = "history") -> np.ndarray:
        return self.change(self.curves[table][column])

    def audit(self, table: str) -> pd.DataFrame:
        """Return share and ci by probe."""
        columns = {name: self.curve(name, f"audit {table}") for name in ("share", "ci")}
        return pd.DataFrame(columns, index=self.curves[f"audit {table}"]["probe"])

    def text(self, code: str) -> str:
        """Return the text that the only cell with this code shows."""
        (outputs,) = (cell["outputs"] for cell in self.cells if code in "".join(cell["source"]))
        texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs]
        return "".join(map("".join, texts))

    def row(self, code: str, label: str) -> np.ndarray:
        """Return the numbers of a table's row."""
        (line,) = re.findall(rf"^{re.escape(label)} +(.*)$", self.text(code), re.MULTILINE)
        return self.change(re.findall(r"-?\d+(?:\.\d+)?", line))

    def numbers(self, code: str) -> np.ndarray:
        return self.change(re.findall(r"\d+", self.text(code)))


def rises(values) -> bool:
    return np.mean(values[-3:]) > np.mean(values[:3])


def falls(values) -> bool:
    return np.mean(values[-3:]) < np.mean(values[:3])


def gold_at_both_ends(run: Run) -> bool:
    """Compare gold's intervals where the chosen answer is much shorter and much longer."""
    ends = [run.row("by_length.rename_axis", f"over 100 {end}") for end in ("shorter", "longer")]
    (_, _, _, low, low_ci, *_), (_, _, _, high, high_ci, *_) = ends
    return low + low_ci < high - high_ci


def best_of_n_is_overrated(run: Run) -> bool:
    gold, score = (run.curve(name, "best_of_n") for name in ("gold", "score"))
    return rises(gold) and gold[-1] < score[-1]


def less_accurate_than_words(run: Run) -> bool:
    difference, half_width = run.row("audits = {", "after the fix minus word weights")
    return difference < -half_width < 0 < run.audit("after it").share["repeated"] < 0.6


def more_probes_at_the_cost_of_accuracy(run: Run) -> bool:
    difference, half_width = run.row("audits = {", "after the fix minus before the fix")
    more = run.metric("probes_passed_fixed") > run.metric("probes_passed_first")
    return more and difference < -half_width < 0


def gains(run: Run, first: int = 0) -> tuple[float, float, float]:
    """Return how score, KL and objective change from a step to the last evaluation."""
    row = [*run.curves["progress"]["PPO step"]].index(first)
    columns = (run.curve(name, "progress") for name in ("score", "kl", "objective"))
    return tuple(column[-1] - column[row] for column in columns)


def objective_rises_less(run: Run) -> bool:
    score, _, objective = gains(run)
    return 0 < objective < score


def only_the_score_rises_after_the_plateau(run: Run) -> bool:
    label = f"after step {run.metrics['plateau_step']:.0f}"
    score, score_ci, _, _, objective, objective_ci = run.row("rows[label] = change", label)
    return score > score_ci and abs(objective) <= objective_ci


def neutral_is_closer(run: Run) -> bool:
    names = re.findall(r"^(\S.*?)  +-?\d", run.text("plain = ["), re.MULTILINE)
    sizes = [abs(run.row("plain = [", name)[1]) for name in names]
    return len(sizes) == 8 and max(sizes[2:]) < min(sizes[:2]) < 1


def lengths_are_drawn(run: Run) -> bool:
    lengths = run.curve("tokens/responses_len_mean")
    settings = load_preset("04_gpt2_imdb_ppo", "tiny")
    drawn = (settings.response_min + settings.response_max - 1) / 2
    return abs(lengths.mean() - drawn) < 0.1 and abs(lengths[-8:].mean() - drawn) < 0.3


def beta_barely_moves(run: Run) -> bool:
    beta = run.curve("objective/kl_coef")
    settings = {name: load_preset("04_gpt2_imdb_ppo", name) for name in ("tiny", "full")}
    samples = {name: chosen.steps * chosen.batch_size for name, chosen in settings.items()}
    assert samples["tiny"] < settings["tiny"].horizon and settings["full"].horizon < samples["full"]
    return max(beta) - min(beta) < 0.005


def change_of(run: Run, probe: str) -> tuple[float, float]:
    """Return a share's change by the fix in notebook 05, and its half-width, paired by prompt."""
    row = run.curves["audit change"]["probe"].index(probe)
    return tuple(run.curve(column, "audit change")[row] for column in ("change", "±"))


ADDED = "empty", "one word", "truncated", "repeated", "copied prompt", "flattery", "off topic"


def added_kinds_pass(run: Run) -> bool:
    shares = run.audit("with bad answers").share[[*ADDED]]
    return 2 * shares.between(PASS, 1).sum() > len(ADDED)


def two_gain_least(run: Run) -> bool:
    ranked = sorted(ADDED, key=lambda probe: change_of(run, probe)[0])
    return {*ranked[:2]} == {"repeated", "off topic"}


def style_drifts(run: Run) -> bool:
    before, after = (run.row("gold_table =", name) for name in ("SFT", "PPO 30"))
    return after[0] > before[0] and after[1] < before[1]


def gold_exceeds(run: Run) -> bool:
    before, after = (run.row("gold_table =", name) for name in ("SFT", "PPO 30"))
    return after[3] - before[3] > before[4] + after[4]


FIX = "the fix makes a failing probe pass"
FOUND = "the audit finds a failing probe"
SHARES = 'card.metric("sft_loss_before"'
CHECKPOINTS = 'card.curve("history", live.history)'
DRAWS = "draws = gains["
REAL_ANSWERS = 'print(f"real answers, PPO − SFT'
OFF_TOPIC = 'measures = {"off topic"'
KL, SCORE = "objective/kl", "ppo/mean_scores"
CLAIMS = {  # beginnings of sentences about `tiny`, and what has to be true of the committed run
    "01": {
        "The program that wrote this preset's dialogues": lambda run: (
            50 < run.numbers("training_prompts = set")[0] <= 100
        ),
        "At `tiny`, held-out loss falls from ln 2, and": lambda run: (
            falls(run.curve("loss", "held_out"))
            and rises(run.curve("accuracy", "held_out"))
            and abs(run.metric("loss_at_start") - np.log(2)) < 0.02
            and abs(run.metric("accuracy_after") - run.metric("ceiling")) < 0.03
        ),
        "With the `tiny` preset, yes: even the lower end": lambda run: (
            np.subtract(*run.row("accuracies = {", "longer wins")) > 0.5
        ),
        "At `tiny`, the scores of chosen and rejected": lambda run: (
            run.metric("accuracy_after") > 0.5
        ),
        "With the `tiny` preset, the word weights are about as": lambda run: (
            0.7 < run.metric("word_weights") < 1
            and abs(run.metric("word_weights") - run.metric("accuracy_after")) < 0.03
        ),
        "In our run with the `tiny` preset, the share of prompts on which": lambda run: all(
            0 < row.share < 0.5 - row.ci
            for _, row in run.audit("before the fix")
            .loc[["repeated", "flattery", "very long"]]
            .iterrows()
        ),
        "With the `tiny` preset, the normal answer does not always": lambda run: (
            0 < run.row("gold_audit =", "very long")[0] < 1
        ),
        "In our run with the `tiny` preset, some of the probes that failed": lambda run: (
            run.check(FOUND) > run.check(FIX)
        ),
        "At `tiny`, after the fix, at least": lambda run: run.check(FIX) >= 1,
        "In our run with the `tiny` preset, no finding stops PPO": lambda run: (
            run.metric("findings that stop PPO") == 0
        ),
        "In our run with the `tiny` preset, the fixed model is less": less_accurate_than_words,
        "With the `tiny` preset, the fixed model passes": more_probes_at_the_cost_of_accuracy,
        "With the `tiny` preset, *flattery* is worse": lambda run: (
            0.75 < run.row("gold_audit =", "flattery")[0] < 0.87
        ),
        "At `tiny`, the gold of the selected answer rises": best_of_n_is_overrated,
        "In our run with the `tiny` preset, on roughly three": lambda run: (
            0.2 < run.metric("bad answers win") < 0.4
        ),
        "With the `tiny` preset, the gold of the selected answers": lambda run: (
            0 < run.metric("gold of the best with bad answers") < run.metric("gold of the best")
        ),
    },
    "calibration": {
        "At `tiny`, predicted probabilities": lambda run: abs(run.metric("temperature") - 1) < 0.1,
        "With the `tiny` preset, no: the column of gold": gold_at_both_ends,
    },
    "04": {
        "With the `tiny` preset, they do: in our run, the logit": neutral_is_closer,
        "Score and KL rise together": lambda run: rises(run.curve(SCORE)) and rises(run.curve(KL)),
        "The coefficient β barely moves": beta_barely_moves,
        "Length fluctuates": lengths_are_drawn,
        "Entropy falls": lambda run: falls(run.curve("ppo/policy/entropy")),
        "The value loss falls": lambda run: falls(run.curve("ppo/loss/value")),
        "At `tiny`, score and KL rise together": lambda run: (
            rises(run.curve(SCORE)) and rises(run.curve(KL))
        ),
        "At `tiny`, the score rises more than the objective": objective_rises_less,
        "With the `tiny` preset, the score still rises": only_the_score_rises_after_the_plateau,
        "In our run with the `tiny` preset, the share is below 1 %": lambda run: (
            run.row(DRAWS, "share of draws without a gain")[0] < 0.01
        ),
        "The quantile of the difference is above 1 logit": lambda run: (
            run.row(DRAWS, "95 % quantile: difference of two draws")[0]
            > max(1, (run.metric("score_after") - run.metric("score_before")) / 2)
        ),
        "At `tiny`, training shifts": lambda run: (
            run.metric("score_after") > run.metric("score_before")
        ),
        "In our run with the `tiny` preset, the second judge's mean rises": lambda run: (
            run.metric("second_after") > run.metric("second_before")
            and run.metric("added_loss") > run.metric("added_loss_ci")
        ),
    },
    "05": {
        "The base gives a real answer to only a small minority": lambda run: (
            0 <= run.row(SHARES, "is an answer")[0] < 0.25
        ),
        "Most often the base writes advice": lambda run: (
            0 <= run.row(SHARES, "is an answer")[0] < 0.5
        ),
        "At `tiny`, the loss per answer token": lambda run: (
            run.metric("sft_loss_after") < run.metric("sft_loss_before")
        ),
        "A text that ends is not necessarily an answer": lambda run: (
            run.row(SHARES, "ends on its own")[0] > 0.5
        ),
        "The base of the `tiny` preset answers some": lambda run: (
            run.row(SHARES, "is an answer")[0] > 0.05
        ),
        "The loss of a model": lambda run: (
            0 < run.row("losses = {", "reward model")[-1] < np.log(2)
        ),
        "At `tiny`, the reward model trained only": lambda run: (
            run.audit("pairs only").share.between(0, PASS, inclusive="left").all()
        ),
        "At `tiny`, the reward model after the fix": added_kinds_pass,
        "The share for `truncated` is higher": lambda run: (
            change_of(run, "truncated")[0] > 0
            and run.audit("with bad answers").share["truncated"] < PASS
        ),
        "Of the seven added kinds, `repeated` and `off topic` gain clearly less": two_gain_least,
        "In two runs, `repeated` changed": lambda run: (
            abs(change_of(run, "repeated")[0]) < change_of(run, "repeated")[1]
            and change_of(run, "off topic")[0] < 0
        ),
        "On `off topic`, the model is no better than guessing": lambda run: (
            run.audit("with bad answers").share["off topic"]
            - run.audit("with bad answers").ci["off topic"]
            < 0.5
        ),
        "The `tiny` preset's pairs have few distinct questions": lambda run: (
            2 * run.numbers("prompts held out from PPO are in")[2]
            > run.numbers("prompts held out from PPO are in")[1]
        ),
        "At `tiny`, score and KL rise together": lambda run: (
            rises(run.curve(SCORE)) and rises(run.curve(KL))
        ),
        "At `tiny`, the last checkpoint scores highest": lambda run: (
            run.row(CHECKPOINTS, "score").argmax() == 3
        ),
        "At `tiny`, at the end of PPO, the policy's gold": gold_exceeds,
        "At `tiny`, the style has drifted": style_drifts,
        "At `tiny`, PPO lost some real answers": lambda run: (
            np.add(*run.row(REAL_ANSWERS, "real answers, PPO − SFT:")) < 0
        ),
        "At `tiny`, the share of off-topic answers rises": lambda run: (
            np.subtract(*run.row(OFF_TOPIC, "off topic, held out")[2:]) > 0
        ),
        "At `tiny`, gold also rises on the new questions": lambda run: (
            np.subtract(*run.row(OFF_TOPIC, "gold, new")[2:]) > 0
        ),
    },
}
NOT_MEASURED = ("With the `tiny` preset, some of the model's sentences are incoherent",)
CLAIM = pytest.mark.parametrize(
    ("number", "start"), [(number, start) for number, claims in CLAIMS.items() for start in claims]
)


@CLAIM
def test_a_sentence_about_tiny_is_true_of_the_committed_run(number, start):
    assert CLAIMS[number][start](Run(number)), start


@CLAIM
def test_a_sentence_about_tiny_would_be_false_of_other_results(number, start):
    """So the test before this one can fail."""
    changes = (lambda x: x[::-1], lambda x: -x, lambda x: 2 * x + 1)
    assert not all(CLAIMS[number][start](Run(number, change)) for change in changes)


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_each_sentence_about_a_result_at_tiny_is_compared_with_the_run(number):
    used = set()
    for paragraph in paragraphs(number):
        for sentence, about_tiny in sentences(paragraph):
            if about_tiny and OUTCOME.search(sentence) and not sentence.startswith(NOT_MEASURED):
                found = [start for start in CLAIMS[number] if sentence.startswith(start)]
                assert found, f"no number supports: {sentence}"
                used |= {*found}
    assert used == {*CLAIMS[number]}, "these sentences are gone"


# --- printed sentences, after results that no run had


@pytest.fixture
def printed(capsys):
    """Run the only code cell with ``code`` in its source; return what it prints."""

    def run(number: str, code: str, **names) -> str:
        (source,) = (
            text for cell in NOTEBOOKS[number] if code in (text := "".join(cell["source"]))
        )
        libraries = {"np": np, "pd": pd, "torch": torch, "mean_ci": mean_ci}
        exec(source, libraries | names)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("baseline", [0.2, 0.55, 0.7])
@pytest.mark.parametrize("accuracy_ci", [0.01, 0.1])
@pytest.mark.parametrize("accuracy", [0.3, 0.45, 0.5, 0.55, 0.75])
def test_the_verdict_on_a_reward_model_follows_its_accuracy(
    accuracy, accuracy_ci, baseline, printed
):
    numbers = {"accuracy": accuracy, "accuracy_ci": accuracy_ci}
    numbers |= {"lead": accuracy - baseline, "lead_ci": 0.02}
    said = printed("01", 'verdict = "better than chance"', **numbers)
    assert ("is better than chance" in said) == (accuracy - accuracy_ci > 0.5)
    assert ("is worse than chance" in said) == (accuracy + accuracy_ci < 0.5)
    assert ("covers one half" in said) == (abs(accuracy - 0.5) <= accuracy_ci)
    assert ("no gain over choosing the longer" in said) == (accuracy - baseline <= 0.02)


PASSED = {  # the probes that pass before and after the fix
    "all pass": (set(RISKS), set(RISKS)),
    "none passes": (set(), set()),
    "all pass after the fix": (set(), set(RISKS)),
    "none passes after the fix": (set(RISKS), set()),
    "one passes after the fix": ({"empty"}, {"empty", "repeated"}),
}


@pytest.mark.parametrize(("before", "after"), PASSED.values(), ids=PASSED)
def test_the_sentences_about_the_fix_follow_the_audits(before, after, printed):
    audits = [
        pd.DataFrame({"share": [0.95 if name in passed else 0.4 for name in RISKS], "ci": 0.05})
        .set_axis([*RISKS])
        .assign(passed=lambda table: table["share"] >= PASS)
        for passed in (before, after)
    ]
    for table, passed in zip(audits, (before, after), strict=True):
        table.attrs["wins"] = {name: [name in passed] * 20 for name in RISKS}
    failing = [name for name in RISKS if name not in before and name not in ARGUABLE]
    train_tokens = type("Pairs", (list,), {"select": lambda self, rows: [*rows]})(range(9))
    said = printed(
        "01",
        "failing probes that are not arguable",
        first_audit=audits[0],
        ARGUABLE=ARGUABLE,
        RISKS=RISKS,
        train_tokens=train_tokens,
        tokenizer=None,
        seed=0,
        settings=SimpleNamespace(fix_pairs=5, fix_share=1.0, max_length=9),
        add_negatives=lambda old, added, *rest: [*old, *added],
        tokenize_pairs=lambda rows, *rest: (rows, 0),
    )
    none = "none, so all kinds that are not arguable are added"
    assert f"not arguable: {', '.join(failing) or none}\n" in said
    added = failing or [name for name in RISKS if name not in ARGUABLE]
    assert f"{5 + len(added)} pairs, 5 of them old" in said
    said = printed(
        "01",
        "failing probes pass now",
        first_audit=audits[0],
        second_audit=audits[1],
        audit_change=audit_change,
        audits={"before the fix": audits[0], "after it": audits[1]},
        failing=failing,
        added=added,
    )
    now = [name for name in failing if name in after]
    assert f"{len(now)} of {len(failing)} failing probes pass now: {' '.join(now)}".strip() in said
    lower = [name for name in RISKS if name in before - after]
    assert f"lower share after the fix: {', '.join(lower) or 'no probe'}\n" in said


@pytest.mark.parametrize("moved", [True, False])
def test_an_adapter_that_moved_is_not_called_unmoved(moved, printed):
    weight = torch.zeros(2)
    base = SimpleNamespace(named_parameters=lambda: [("lora_A", weight + moved), ("head", weight)])
    card = SimpleNamespace(metric=lambda *_: None, metrics={"kl_step_1": 0.25})
    live = SimpleNamespace(history=pd.DataFrame({"objective/kl": [0.25]}))
    names = {"frozen": {"lora_A": weight}, "base": base, "card": card, "live": live}
    said = printed("05", "frozen adapters unmoved", **names)
    assert said == f"KL at step 1: 2.5e-01; frozen adapters unmoved: {not moved}\n"


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (1, 1)])
def test_the_change_in_real_answers_has_its_sign(before, after, printed):
    checkpoints = {"SFT": {"response": [before] * 4}, "PPO": {"response": [after] * 4}}
    said = printed(
        "05",
        "real answers, PPO − SFT",
        synthetic=True,
        side_by_side={"question": range(4)},
        checkpoints=checkpoints,
        final="PPO",
        chinese=SimpleNamespace(is_answer=lambda question, text: bool(text)),
        card=SimpleNamespace(metric=lambda *_: None),
    )
    assert said.startswith(f"real answers, PPO − SFT: {after - before:+.3f} ± ")
