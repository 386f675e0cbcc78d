"""Write the tables of RESULTS.md from the cards of the six results.

python docs/_ext/results.py
"""

from __future__ import annotations

import json
import textwrap
from math import exp
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "RESULTS.md"
CARDS = ROOT / "figs" / "measured" / "results"
NAMES = (
    "length_drift",
    "engine_corrections",
    "lambda_length_critic",
    "grpo_fixed_point",
    "penalty_placement",
    "silent_faults",
)


def read(name: str) -> dict:
    """Return the card of a result."""
    return json.loads((CARDS / f"{name}.json").read_text(encoding="utf-8"))


def table(titles: list[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table in lines."""
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def words(text: str) -> list[str]:
    """Return a paragraph in lines."""
    return textwrap.wrap(text, 120, break_on_hyphens=False)


def fixed(x: float, digits: int = 2) -> str:
    """Return a number with this many decimals, and 0 without a sign."""
    text = f"{x:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def length_drift(card: dict) -> list[str]:
    """Return the drift of wrong answers by divisor and group size, and two sentences."""
    sizes = (2, 8, 64)
    rows = []
    for divisor in dict.fromkeys(row["divisor"] for row in card["drift"]):
        drift = {
            row["group"]: row["wrong"]
            for row in card["drift"]
            if row["divisor"] == divisor and row["share"] == 0.5
        }
        changes = []
        for prompt in ("solved", "unsolved"):
            path = card["paths"][f"{prompt}, {divisor}"]
            changes.append(f"{fixed(path[0][2], 1)} → {fixed(path[-1][2], 1)}")
        rows.append([divisor, *(fixed(drift[size]) for size in sizes), *changes])
    titles = ["divisor", *(f"group of {size}" for size in sizes)]
    titles += ["learned prompt", "prompt held at 20 %"]
    spread = largest_spread(card)
    return [
        *table(titles, rows),
        "",
        *words(
            "The columns for groups show by how many tokens wrong answers get longer while the "
            "log-odds of the right answer rise by 1; right answers get shorter by as much. "
            "Between 20 %, 50 % and 80 % right answers, these drifts differ by less than "
            f"{spread:.0e}. The last two columns show the expected length of all answers, in "
            "tokens, over 100 steps of groups of 8, from 20 % right answers on: on a prompt "
            "that the policy learns, and with the share of right answers held at 20 %. With a "
            f"shared EOS logit the push is at most {card['shared EOS']:.0e}, which is rounding."
        ),
    ]


def largest_spread(card: dict) -> float:
    """Return a bound on how much the share of right answers changes a drift, a power of ten."""
    spreads = []
    for row in card["drift"]:
        same = [
            other["wrong"]
            for other in card["drift"]
            if other["divisor"] == row["divisor"] and other["group"] == row["group"]
        ]
        spreads.append(max(same) - min(same))
    bound = 1e-12
    while bound < max(spreads):
        bound *= 10
    return bound


FORMS = ("no weight", "per token", "per response", "per response, at most 2")


def engine_corrections(card: dict) -> list[str]:
    """Return median errors, in how many languages they exceed those of no weight, and E[w²]."""
    forms = {(row["noise"], row["weight"]): row for row in card["forms"]}
    rows = []
    for noise in (0.1, 0.3, 1.0):
        for place, size in enumerate(card["batches"]):
            fields = [f"{noise:g}", str(size)]
            for form in FORMS:
                row = forms[noise, form]
                worse = "" if form == FORMS[0] else f" ({row['worse than none'][place]})"
                fields.append(fixed(row["median error"][place]) + worse)
            rows.append(fields)
    lines = table(["noise", "responses", *FORMS], rows)
    lines += [
        "",
        *words(
            "Squared error of a batch's gradient, relative to that of as many samples from "
            f"the trainer's own policy: medians of {card['languages']} languages with four "
            "tokens. In parentheses: the number of languages in which the weight is worse "
            "than no weight."
        ),
        "",
    ]
    rows = []
    for length in dict.fromkeys(row["tokens"] for row in card["by length"]):
        fields = [str(length)]
        for noise in ("0.3", "1.0"):
            parts = [row[noise] for row in card["by length"] if row["tokens"] == length]
            left, second, kl = (median(column) for column in zip(*parts, strict=True))
            fields += [fixed(left), fixed(kl), fixed(second), fixed(exp(2 * kl))]
        rows.append(fields)
    titles = ["tokens"]
    for noise in ("0.3", "1"):
        titles += [f"bias left, noise {noise}", "KL", "E[w²]", "exp(2 KL)"]
    worse = {}
    for noise in ("0.3", "1.0"):
        long = [row[noise][0] for row in card["by length"] if row["tokens"] > 1]
        worse[noise] = f"{sum(left > 1 for left in long)} of {len(long)}"
    return [
        *lines,
        *table(titles, rows),
        "",
        *words(
            "*Bias left* is the bias with weights per token divided by the bias without "
            "weights (medians of 20 languages with two tokens). It exceeds 1 in "
            f"{worse['0.3']} cases at a noise of 0.3 and in {worse['1.0']} cases at a noise of "
            "1 (cases with more than one token)."
        ),
    ]


def lambda_length_critic(card: dict) -> list[str]:
    """Return the best λ and the excess error at 0.95, mostly for batches of 1,024."""
    rows = []
    for critic in dict.fromkeys(row["critic"] for row in card["table"]):
        fields = [critic]
        for tokens in (4, 64, 256):
            row = next(
                row
                for row in card["table"]
                if (row["critic"], row["batch"], row["tokens"]) == (critic, 1024, tokens)
            )
            fields.append(f"{row['best']:.3f} ({fixed(row['excess'], 3)})")
        rows.append(fields)
    small = {}
    for critic in ("known = 0.5", "known = 0"):
        small[critic] = " and ".join(
            fixed(row["excess"], 3)
            for row in card["table"]
            if (row["critic"], row["batch"]) == (critic, 64) and row["tokens"] > 4
        )
    return [
        *table(["critic", "4 tokens", "64 tokens", "256 tokens"], rows),
        "",
        *words(
            "The best λ for batches of 1,024 responses, and in parentheses the excess error "
            "at λ = 0.95: how much larger the error is than at the best λ. A best λ of 1.000 is "
            f"the largest value tried, {1 - 1 / card['horizons'][-1]:.4f}. In batches of 64, the "
            f"excess errors at 64 and 256 tokens are {small['known = 0.5']} with known = 0.5, and "
            f"{small['known = 0']} with known = 0. The formulas agree with sums over all "
            f"responses and critics of five tokens to {card['gap']:.0e}."
        ),
    ]


def grpo_fixed_point(card: dict) -> list[str]:
    """Return the gap between law and training and the share of the gain, for each loss."""
    betas = sorted({row["β"] for row in card["table"]})
    lines = []
    for penalty in ("k3", "ratio × k3"):
        for divides in (False, True):
            part = [
                row
                for row in card["table"]
                if row["penalty"] == penalty and row["divides"] == divides
            ]
            gap = max(row["gap"] for row in part if row["gap"] is not None)
            fields = [penalty, "yes" if divides else "no", f"{gap:.0e}"]
            for beta in betas:
                here = [row for row in part if row["β"] == beta]
                share = fixed(mean(row["share"] for row in here))
                is_law = all(row["law exists"] for row in here)
                lowest = min(row["largest probability"] for row in here)
                fields.append(
                    share if is_law else f"{share}; collapsed, p ≥ {fixed(lowest - 5e-4, 3)}"
                )
            lines.append(fields)
    titles = ["penalty", "÷ σ", "law − training", *(f"β = {beta:g}" for beta in betas)]
    return [
        *table(titles, lines),
        "",
        *words(
            "*Law − training* is the largest difference between two probabilities of a token, "
            "over the settings in which the law exists. The columns for β show the share of "
            "the possible gain (means of three languages, four tokens). *Collapsed*: the "
            "passes of the law drive σ to 0, and at its last step training gives one response "
            "at least the probability p, in each of the three languages."
        ),
    ]


def penalty_placement(card: dict) -> list[str]:
    """Return which combinations reach the optimum, and the best of the others."""
    lowest: dict[tuple[str, str], float] = {}
    for row in card["table"]:
        key = row["penalty"], row["place"]
        lowest[key] = min(row["share"], lowest.get(key, 1.0))
    reach = [key for key, share in lowest.items() if share > 0.999]
    rest = {key: share for key, share in lowest.items() if key not in reach}
    rows = []
    for penalty in ("kl", "mse", "k3", "full", "abs"):
        fields = [penalty]
        for place in ("in the reward", "as a loss", "in both"):
            share = lowest[penalty, place]
            fields.append(f"**{fixed(share, 4)}**" if share > 0.999 else fixed(share))
        rows.append(fields)
    best = max(rest, key=rest.get)
    return [
        *table(["penalty", "in the reward", "as a loss", "in both"], rows),
        "",
        *words(
            "The smallest share of the possible gain over four values of β and three "
            f"languages. Shares above 0.999 are bold: {len(reach)} of {len(lowest)} "
            f"combinations. The best of the others is {best[0]} {best[1]}, with "
            f"{fixed(rest[best])}."
        ),
    ]


def silent_faults(card: dict) -> list[str]:
    """Return a row per fault, and one for cuDNN's attention in float32."""
    lost = card["whitening"]["lost"]
    positions = card["positions"]
    last = positions["padding"][-1]
    device, torch = card["gpu"]
    rows = [
        [
            "one token whitened on its own",
            f"{100 * lost['one empty']:.0f} % of the weights are NaN after one step",
            f"{100 * lost['eight words']:.0f} % without an empty answer",
        ],
        *(
            [
                f"cuDNN's attention allowed while sampling in {precision}"
                f" ({device}, torch {torch})",
                f"{fixed(allowed)} s per batch",
                f"{fixed(excluded)} s with current code, which excludes this kernel",
            ]
            for precision, (allowed, excluded) in reversed(card["cuDNN"].items())
        ),
        [
            f"no positions for GPT-2, padded on the left (1 and {last} tokens)",
            f"log-probability of a response off by {fixed(positions['without'][1])} and"
            f" {fixed(positions['without'][-1])} nats",
            f"{max(positions['with']):.0e} nats with positions",
        ],
    ]
    return table(["fault", "with the fault", "without"], rows)


WRITERS = {name: globals()[name] for name in NAMES}


def marks(name: str) -> tuple[str, str]:
    """Return the marks around a result's generated part."""
    return f"<!-- {name}: written by python docs/_ext/results.py -->\n", f"<!-- end of {name} -->\n"


def page() -> str:
    """Return the page with its tables as the cards have them."""
    text = PAGE.read_text(encoding="utf-8")
    for name in NAMES:
        start, end = marks(name)
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"{PAGE.name} needs one pair of marks for {name}.")
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        card = read(name)
        lines = [*WRITERS[name](card), "", f"Computed in {card['seconds']} s.", ""]
        text = f"{before}{start}\n" + "\n".join(lines) + f"\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
