"""Write the tables of real-model.md, and two examples in README.md, from the runs on a chat model.

python docs/_ext/real_model.py
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from statistics import mean

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS / "real-model.md"
README = DOCS.parent / "README.md"
CARDS = DOCS.parent / "figs" / "measured" / "small"
START = "<!-- tables: written by python docs/_ext/real_model.py -->\n"
END = "<!-- end of the tables -->\n"
README_START = "<!-- real model: written by python docs/_ext/real_model.py -->\n"
README_END = "<!-- end of the real model -->\n"
NOTEBOOK_ROWS = (  # notebook, what is measured, its metrics before and after
    ("04_gpt2_imdb_ppo", "04: score of the reward, logits", "score_before", "score_after"),
    ("04_gpt2_imdb_ppo", "04: second judge, mean P(POSITIVE)", "second_before", "second_after"),
    ("04_gpt2_imdb_ppo", "04: KL, nats per response", None, "kl_after"),
    ("04_gpt2_imdb_ppo", "04: rise of the loss on reviews, nats per token", None, "added_loss"),
    ("08_verifiable_rewards", "08: share that obeys", "pass@1_before", "pass@1_after"),
)
SEEDS = (0, 1, 2)
WISH_NOTEBOOK = "10_a_real_model"
WISH_METHODS = ("DPO", "PPO", "RLOO", "best of 4")
HIDDEN_ITEM = "names the subject"
COSTS = ("loss on reviews", "loss on preferred answers", "sums", "facts")
# Runs of notebook 04 with other KL coefficients, all at seed 0.
KL_COEFFICIENTS = {
    "0.05": "04_gpt2_imdb_ppo.json",
    "0.1": "04_kl_coef_0.1.json",
    "0.4": "04_kl_coef_0.4.json",
}
# Places of the examples among a run's thirty texts, fixed before the runs.
EXAMPLES = (0, 5, 13, 27)


def read_cards() -> list[dict]:
    """Return the cards of all seeds."""
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(CARDS.glob("08_?.json"))
    ]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def instruction_table(cards: list[dict]) -> list[str]:
    """Return a row per instruction: the share that obeys before, and each seed's difference."""
    seeds = [f"seed {card['settings']['seed']}" for card in cards]
    titles = ["instruction", "trained", "questions", "obeyed before", *seeds]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name, first in cards[0]["instructions"].items():
        fields = [name, "yes" if first["trained"] else "no"]
        fields += [str(first["questions"]), percent(first["before"])]
        for card in cards:
            row = card["instructions"][name]
            change = f"{100 * row['difference']:+.0f} ± {100 * row['interval']:.0f}"
            fields.append(f"{percent(row['after'])} ({change})")
        lines.append(f"| {' | '.join(fields)} |")
    return lines


def cost_table(cards: list[dict]) -> list[str]:
    """Return a row per statistic that shows what changed besides the reward."""
    titles = ["statistic", "before", *(f"seed {card['settings']['seed']}" for card in cards)]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]

    def add_row(title: str, before: float, after: list[float], digits: int) -> None:
        numbers = [f"{number:.{digits}f}" for number in (before, *after)]
        lines.append(f"| {' | '.join([title, *numbers])} |")

    def trained_mean(card: dict, key: str) -> float:
        return mean(row[key] for row in card["instructions"].values() if row["trained"])

    first = cards[0]
    for title, key, digits in (
        ("share of answers that ended", "ended", 2),
        ("tokens per answer", "tokens", 1),
        ("entropy, nats per token", "entropy", 2),
    ):
        after = [trained_mean(card, f"{key}_after") for card in cards]
        add_row(title, trained_mean(first, f"{key}_before"), after, digits)
    add_row("KL, nats per answer", 0.0, [trained_mean(card, "kl") for card in cards], 2)
    for name, before in first["text_losses"]["before"].items():
        after = [card["text_losses"]["after"][name] for card in cards]
        add_row(f"loss on {name}, nats per token", before, after, 3)
    rewards = [mean(row["reward"] for row in card["steps"][:3]) for card in cards]
    final = [mean(row["reward"] for row in card["steps"][-3:]) for card in cards]
    lines.append(f"| reward in the first three training steps | | {join(rewards)} |")
    lines.append(f"| reward in the last three training steps | | {join(final)} |")
    lines.append(f"| minutes of training | | {join([c['training_minutes'] for c in cards], 0)} |")
    return lines


def join(numbers: list[float], digits: int = 2) -> str:
    return " | ".join(f"{number:.{digits}f}" for number in numbers)


def setting(cards: list[dict]) -> list[str]:
    """Return a paragraph about the runs' settings, in lines."""
    settings = cards[0]["settings"]
    text = f"""
        Each run takes {settings["steps"]} steps. A step has {settings["questions"]} questions with
        {settings["answers"]} answers each, of at most {settings["new_tokens"]} tokens. The adapter
        has rank {settings["rank"]} (α = {settings["alpha"]}) on the linear layers of the upper
        {30 - settings["first_layer"]} of 30 blocks. AdamW's step size is
        {settings["learning_rate"]:g}, and the gradient's norm is clipped at {settings["clip"]:g}.
        In the second table, the statistics of answers are means over the trained instructions, on
        held-out questions."""
    return textwrap.wrap(" ".join(text.split()), 100)


def examples() -> list[str]:
    """Return four held-out questions with the answers before and after seed 0's training."""
    texts = (CARDS / "08_0_texts.jsonl").read_text(encoding="utf-8").splitlines()
    lines = []
    for place in EXAMPLES:
        text = json.loads(texts[place])
        lines.append(f"* *{text['question']} {text['instruction']}*")
        for moment in ("before", "after"):
            answer = as_markdown(text[moment])
            verdict = "obeys" if text[f"obeys_{moment}"] else "does not obey"
            lines.append(f"  * {moment} ({verdict}): {answer}")
    return lines


def notebook_table() -> list[str]:
    """Return a row per statistic of notebooks 04 and 08 at preset small; a column per seed."""
    lines = [f"| notebook at `small` | {' | '.join(f'seed {seed}' for seed in SEEDS)} |"]
    lines.append("|---" * (1 + len(SEEDS)) + "|")
    for notebook, title, before, after in NOTEBOOK_ROWS:
        fields = [title]
        for seed in SEEDS:
            metrics = notebook_card(notebook, seed).get("metrics")
            if metrics is None:
                fields.append("not run")
            elif before is None:
                fields.append(f"{metrics[after]:.2f}")
            else:
                fields.append(f"{metrics[before]:.2f} → {metrics[after]:.2f}")
        lines.append(f"| {' | '.join(fields)} |")
    return lines


def notebook_card(notebook: str, seed: int) -> dict:
    """Return the run card of a notebook at preset small, or {} if this seed was not run."""
    file = CARDS / (f"{notebook}.json" if seed == 0 else f"{notebook}_{seed}.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def wish_table() -> list[str]:
    """Return rows about notebook 10 at preset small, with a column per seed."""
    cards = [notebook_card(WISH_NOTEBOOK, seed).get("metrics", {}) for seed in SEEDS]
    lines = [f"| notebook 10 at `small` | {' | '.join(f'seed {seed}' for seed in SEEDS)} |"]
    lines.append("|---" * (1 + len(SEEDS)) + "|")

    def add_row(title: str, text_of) -> None:
        fields = [text_of(card) if card else "not run" for card in cards]
        lines.append(f"| {' | '.join([title, *fields])} |")

    for column in ("gold", HIDDEN_ITEM):
        add_row(f"{column}, before training", lambda card, c=column: f"{card[f'before, {c}']:.2f}")
        for method in WISH_METHODS:
            name = f"{method}, change of {column}"
            add_row(name, lambda card, n=name: f"{card[n]:+.2f} ± {card[f'{n}, ±']:.2f}")
    for column in ("tokens", "KL"):
        for method in WISH_METHODS[:3]:
            name = f"{method}, {column}"
            add_row(name, lambda card, n=name: f"{card[n]:.1f}")
    for column in COSTS:
        for method in WISH_METHODS[:3]:
            name = f"{method}, change of {column}"
            add_row(name, lambda card, n=name: f"{card[n]:+.2f} ± {card[f'{n}, ±']:.2f}")
    return lines


def kl_coefficient_table() -> list[str]:
    """Return a row per run of notebook 04: what a KL coefficient gains and costs."""
    lines = [
        "| KL coefficient of 04 | score | second judge | KL, nats | rise of the loss on reviews |",
        "|---|---|---|---|---|",
    ]
    for coefficient, file in KL_COEFFICIENTS.items():
        card = json.loads((CARDS / file).read_text(encoding="utf-8"))
        numbers = card["metrics"]
        fields = [coefficient]
        for name in ("score", "second"):
            fields.append(f"{numbers[f'{name}_before']:.2f} → {numbers[f'{name}_after']:.2f}")
        fields += [f"{numbers['kl_after']:.1f}", f"{numbers['added_loss']:+.2f}"]
        lines.append(f"| {' | '.join(fields)} |")
    return lines


def readme_examples() -> list[str]:
    """Return seed 0's first two texts that obey their instruction only after training."""
    lines = ["| question | before | after |", "|---|---|---|"]
    for line in (CARDS / "08_0_texts.jsonl").read_text(encoding="utf-8").splitlines():
        text = json.loads(line)
        if text["obeys_after"] and not text["obeys_before"] and len(lines) < 4:
            question = f"{text['question']} *{text['instruction']}*"
            answers = [as_markdown(text[moment]) for moment in ("before", "after")]
            lines.append(f"| {' | '.join([question, *answers])} |")
    return lines


def as_markdown(answer: str) -> str:
    """Return an answer on one line, with ⏎ for line breaks and Markdown's marks escaped."""
    escaped = re.sub(r"([\\`*_\[\]<>#|~$])", r"\\\1", answer.strip())
    return re.sub(r"\s*\n\s*", " ⏎ ", escaped)


def tables() -> str:
    """Return the generated part of the page."""
    cards = read_cards()
    blocks = [setting(cards), instruction_table(cards), cost_table(cards)]
    blocks += [notebook_table(), kl_coefficient_table(), wish_table()]
    blocks += [["**Unedited answers of seed 0** (⏎ is a line break):"], examples()]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n\n"


def page() -> str:
    """Return the page with its tables as the cards have them."""
    return replaced(PAGE, START, f"\n{tables()}", END)


def readme() -> str:
    """Return the README with the examples of the recorded run."""
    return replaced(README, README_START, "\n".join(readme_examples()) + "\n", README_END)


def replaced(file: Path, start: str, content: str, end: str) -> str:
    """Return a file's text with ``content`` between two marks."""
    before, _, rest = file.read_text(encoding="utf-8").partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}{content}{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
