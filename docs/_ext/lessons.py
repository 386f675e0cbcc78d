"""Write the tables of lessons-on-text.md, which compare the toy language with text.

python docs/_ext/lessons.py
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from math import atan, cos, log, pi
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
PAGE = HERE / "lessons-on-text.md"
CARDS = ROOT / "figs" / "measured" / "lessons"
START = "## Lesson by lesson\n"
END = "\n## What the tables show"
BETA = 0.5  # the KL variants' β
ERROR = 0.05  # probability of at least one false verdict among all comparisons (Holm)
STUDENT = {2: 4.303, 3: 3.182, 4: 2.776}  # 97.5 % quantile of t by degrees of freedom
SIGNS = {-1: "lower", 0: "no difference", 1: "higher"}
NAMES = {
    "ppo": "PPO", "kl": "`kl`, β = 0.5", "abs": "`abs`", "mse": "`mse`", "full": "`full`",
    "lam-0": "λ = 0", "lam-1": "λ = 1", "no-clip": "no clip", "no-whitening": "no whitening",
    "epochs-1": "one epoch", "epochs-1-step-4": "one epoch, 4 × step",
    "epochs-16": "16 epochs, a quarter of the batches", "epochs-16-no-clip": "16 epochs, no clip",
    "k1": "k1 as a loss", "k2": "k2 as a loss", "k3": "k3 as a loss",
}  # fmt: skip
BASES = dict.fromkeys(("abs", "mse", "full", "k1", "k2", "k3"), "kl")
BASES |= {"epochs-16-no-clip": "epochs-16"}  # the base of all other variants is ppo
PENALTIES = "five penalties § 4"
NOTEBOOKS = {
    "02": "02_why_ppo",
    "five penalties": "deeper/five_penalties",
    "parts of PPO": "deeper/parts_of_ppo",
    "estimates of KL": "deeper/kl_estimates",
}
COLUMNS = ("J", "score", "KL", "second judge")


def measured(notebook: str) -> dict:
    """Return a notebook's run card."""
    path = ROOT / "figs" / "measured" / f"{notebook}.json"
    return json.loads(path.read_text(encoding="utf-8"))


Lesson = tuple[str, str, str, int, str]


def toy() -> list[Lesson]:
    """Return a row per lesson: variant, statistic, the toy's numbers, a sign, and the source.

    The sign is that of the variant's J or KL minus the base's; 0 means no difference.
    """
    return [*penalty_lessons(), *lambda_lessons(), *ablation_lessons(), *gradient_lessons()]


def penalty_lessons() -> list[Lesson]:
    """Return the lessons of deeper/five_penalties about penalties in the reward."""
    table = measured("five_penalties")["curves"]["placements"]
    share = {}
    kl = {}
    for row, penalty in enumerate(table["penalty"]):
        if table["place"][row] == "in the reward" and table["β"][row] == BETA:
            share[penalty] = table["share"][row]
            kl[penalty] = table["KL"][row]
    lessons = []
    for kind in ("abs", "mse", "full"):
        words = f"share of the gain {share[kind]:.2f}; `kl` {share['kl']:.2f}"
        lessons.append((kind, "J", words, sign(share[kind] - share["kl"], 0.01), PENALTIES))
    words = f"KL {kl['full']:.2f}; `kl` {kl['kl']:.2f}"
    lessons.append(("full", "KL", words, sign(kl["full"] - kl["kl"], 0.01), PENALTIES))
    return lessons


def lambda_lessons() -> list[Lesson]:
    """Return the lessons of notebook 02, section 6, about GAE's λ."""
    curve = measured("02_why_ppo")["curves"]["lambda"]
    points = zip(curve["critic"], curve["λ"], curve["error"], strict=True)
    error = {round(lam, 1): value for critic, lam, value in points if critic == "always 0"}
    error[0.95] = (error[0.9] + error[1.0]) / 2
    lessons = []
    for lam in (0, 1):
        words = f"untrained critic: squared error {error[lam]:.2f}; {error[0.95]:.2f} at λ = 0.95"
        expected = sign(error[0.95] / error[lam] - 1, 0.1)
        lessons.append((f"lam-{lam}", "J", words, expected, "02 § 6"))
    return lessons


def ablation_lessons() -> list[Lesson]:
    """Return the lessons of deeper/parts_of_ppo, section 5, about what PPO can do without."""
    table = measured("parts_of_ppo")["curves"]["after 10 batches"]
    columns = (table[name] for name in ("variant", "share", "minus PPO", "±"))
    ablation = {variant: numbers for variant, *numbers in zip(*columns, strict=True)}
    lessons = []
    for variant in ("no-clip", "no-whitening", "epochs-1", "epochs-1-step-4"):
        _, gap, width = ablation[NAMES[variant]]
        words = f"share of the gain {gap:+.3f} ± {width:.3f}"
        lessons.append((variant, "J", words, sign(gap, width), "parts of PPO § 5"))
    gap = ablation["16 epochs, no clip"][0] - ablation["16 epochs"][0]
    words = f"share of the gain {gap:+.3f}"
    lessons.append(("epochs-16-no-clip", "J", words, sign(gap), "parts of PPO § 5"))
    return lessons


def gradient_lessons() -> list[Lesson]:
    """Return the lessons of deeper/kl_estimates, section 4, about KL as a loss."""
    metrics = measured("kl_estimates")["metrics"]
    lessons = []
    for kind, statistic in {"k1": "KL", "k2": "J"}.items():
        size = metrics[f"{kind} as a loss: share of KL's gradient"]
        words = f"{size:.2f} of KL's gradient"
        lessons.append((kind, statistic, words, sign(1 - size, 0.01), "estimates of KL § 4"))
    return lessons


def sign(gap: float, noise: float = 0.0) -> int:
    """Return the sign of ``gap`` as -1 or 1, or 0 if its size is at most ``noise``."""
    return 0 if abs(gap) <= noise else (1 if gap > 0 else -1)


def runs() -> dict[str, list[dict]]:
    """Return variant → recorded cards, sorted by seed."""
    cards = [json.loads(path.read_text(encoding="utf-8")) for path in CARDS.glob("*.json")]
    cards.sort(key=lambda card: (card["name"], card["seed"]))
    return {name: [*group] for name, group in groupby(cards, lambda card: card["name"])}


def change(card: dict, column: str) -> float:
    """Return a statistic's change from the start to the end of a run; J uses the base's β."""
    before = card["held_out"][0]
    after = card["held_out"][-1]
    if column == "J":
        return (after["score"] - before["score"]) - beta(card) * (after["KL"] - before["KL"])
    return after[column] - before[column]


def beta(card: dict) -> float:
    """Return the coefficient β in a run's J."""
    on_kl = card["name"] == "kl" or BASES.get(card["name"]) == "kl"
    return BETA if on_kl else card["settings"]["text_beta"]


def difference(cards: dict, variant: str, column: str) -> tuple[float, float]:
    """Return the mean across paired seeds of variant minus base, and its 95 % half-width."""
    pairs = zip(cards[variant], cards[BASES.get(variant, "ppo")], strict=True)
    gaps = [change(a, column) - change(b, column) for a, b in pairs]
    return mean(gaps), STUDENT[len(gaps) - 1] * stdev(gaps) / len(gaps) ** 0.5


def p_value(cards: dict, variant: str, column: str) -> float:
    """Return the two-sided p-value of Student's t for the mean paired difference.

    With x = √df · tan θ, the density of t is proportional to cos(θ)^(df − 1).
    """
    gap, width = difference(cards, variant, column)
    df = len(cards[variant]) - 1
    t = STUDENT[df] * abs(gap) / width
    steps = [(step + 0.5) / 10_000 for step in range(10_000)]
    whole = mean(cos(x * pi / 2) ** (df - 1) for x in steps) * pi / 2
    start = atan(t / df**0.5)
    length = pi / 2 - start
    tail = mean(cos(start + x * length) ** (df - 1) for x in steps) * length
    return tail / whole


def holm(p_values: dict) -> set:
    """Return the keys whose differences are significant after Holm's correction."""
    significant = set()
    for rank, key in enumerate(sorted(p_values, key=p_values.get)):
        if p_values[key] > ERROR / (len(p_values) - rank):
            break
        significant.add(key)
    return significant


def verdict(toy_sign: int, text_sign: int) -> str:
    """Return a phrase that states whether toy and text agree."""
    if toy_sign == text_sign:
        return "agree" if toy_sign else "neither shows a difference"
    if text_sign == 0:
        return "undecided"
    return "disagree" if toy_sign else "differs on text only"


def entropy(row: dict) -> float:
    """Return the policy's entropy per token: the log of its perplexity, minus KL per token."""
    return log(row["perplexity"]) - row["KL"] / row["length"]


def keeps_language(card: dict) -> bool:
    """Return whether a run passes the language checks of methods_on_real_text, section 4."""
    before = card["held_out"][0]
    after = card["held_out"][-1]
    return (
        abs(entropy(after) - entropy(before)) <= 0.5
        and after["unknown words"] <= before["unknown words"] + 0.02
        and after["length"] >= 0.8 * before["length"]
        and after["distinct-2"] >= 0.4 * before["distinct-2"]
        and after["second judge"] > before["second judge"]
    )


def verdicts(cards: dict) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (variant, statistic) → (the toy's sign, the text's sign after Holm's correction)."""
    expected_signs = {(row[0], row[1]): row[3] for row in toy()}
    p_values = {key: p_value(cards, *key) for key in expected_signs}
    significant = holm(p_values)
    signs = {}
    for key, expected in expected_signs.items():
        gap, _ = difference(cards, *key)
        signs[key] = (expected, sign(gap) if key in significant else 0)
    return signs


def setting(cards: dict) -> str:
    """Return a paragraph about the runs' settings."""
    first = cards["ppo"][0]["settings"]
    seeds = len(cards["ppo"])
    responses = f"{first['text_batch']} responses of at most {first['response_tokens']} tokens"
    return f"""\
Unless its name or its base's name states otherwise, each run has {first["text_steps"]} batches of
{responses}, {first["text_epochs"]} epochs per batch, step size {first["learning_rate"]:g}, and β =
{first["text_beta"]:g}. The runs with a different penalty, or with KL in the loss, and their base,
`kl`, have β = {BETA:g}. The base of *16 epochs, no clip* is 16 epochs with the clip. PPO is the
base of all other variants. Each variant has {seeds} seeds, paired with the base's seeds, and
{first["text_eval"]} held-out openings. Every number on text is the change from the start to the end
of a run, or a difference between two such changes. The number after "±" is the half-width of the
95 % interval for a mean difference between changes, computed with Student's t, and not corrected
for the number of comparisons. The verdicts are corrected (Holm). J uses the base's
β. In the rows from the parts of PPO, *share of the gain* is the variant's share minus the
base's share; the toy's ± is corrected for its number of variants.
"""


def tables() -> str:
    """Return the generated part of the page."""
    cards = runs()
    phrases = {}
    for key, (toy_sign, text_sign) in verdicts(cards).items():
        phrases[key] = verdict(toy_sign, text_sign)
    lines = [setting(cards)]
    lines += ["| variant | source | toy | toy expects | text, minus base | verdict |"]
    lines += ["|---|---|---|---|---|---|"]
    for variant, column, words, expected, source in toy():
        gap, width = difference(cards, variant, column)
        what = f"{column} {SIGNS[expected]}" if expected else f"{SIGNS[0]} in {column}"
        notebook = NOTEBOOKS[source.partition(" §")[0]]
        source = f"[{source}](../notebooks/{notebook}.ipynb)"
        row = NAMES[variant], source, words, what, f"{column} {gap:+.2f} ± {width:.2f}"
        lines.append(f"| {' | '.join(row)} | {phrases[variant, column]} |")
    counts = [f"{count} × *{phrase}*" for phrase, count in Counter(phrases.values()).items()]
    lines += [f"\nThe verdicts of {len(phrases)} comparisons: {', '.join(counts)}.", ""]
    lines += ["### All measurements", ""]
    lines += [
        f"| variant | {' | '.join(COLUMNS)} | keeps the language |",
        "|---|---|---|---|---|---|",
    ]
    for name in NAMES:
        fields = [f"{mean(change(c, column) for c in cards[name]):+.2f}" for column in COLUMNS]
        if name not in ("ppo", *BASES.values()):
            gaps = (difference(cards, name, column) for column in COLUMNS)
            fields = [f"{x} ({g:+.2f} ± {w:.2f})" for x, (g, w) in zip(fields, gaps, strict=True)]
        kept = f"{sum(map(keeps_language, cards[name]))} of {len(cards[name])}"
        lines.append(f"| {' | '.join([NAMES[name], *fields, kept])} |")
    above = [NAMES[n] for n in NAMES if mean(change(card, "J") for card in cards[n]) > 0]
    lines.append(f"\nVariants whose mean J rises: {', '.join(above) or 'none'}.")
    return "\n".join(lines) + "\n"


def lessons_page() -> str:
    """Return the page with its tables made from the current cards."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    return f"{head}{START}\n{tables()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(lessons_page(), encoding="utf-8")
