"""Write the tables of real-model.md from the cards of the runs on a real chat model.

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
CARDS = DOCS.parent / "figs" / "measured" / "small"
START = "<!-- tables: written by python docs/_ext/real_model.py -->\n"
END = "<!-- end of the tables -->\n"
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


def as_markdown(answer: str) -> str:
    """Return an answer on one line, with ⏎ for line breaks and Markdown's marks escaped."""
    escaped = re.sub(r"([\\`*_\[\]<>#|~$])", r"\\\1", answer.strip())
    return re.sub(r"\s*\n\s*", " ⏎ ", escaped)


def tables() -> str:
    """Return the generated part of the page."""
    cards = read_cards()
    blocks = [setting(cards), instruction_table(cards), cost_table(cards)]
    blocks += [["**Unedited answers of seed 0** (⏎ is a line break):"], examples()]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n\n"


def page() -> str:
    """Return the page with its tables as the cards have them."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{tables()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
