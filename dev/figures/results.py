"""Compute and draw the six results of RESULTS.md.

    python dev/figures/results.py            # lists the results
    python dev/figures/results.py NAME …     # computes NAME, prints its table, draws its figure
    python dev/figures/results.py --draw     # draws all figures again from the committed cards

The script runs cells of the course's notebooks, so the figures show what the notebooks compute. It
writes ``figs/measured/results/NAME.json`` and ``figs/results/NAME.svg``. Then
``python docs/_ext/results.py`` copies the cards' numbers into RESULTS.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("svg")  # no window; before pyplot is imported

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from dev.figures import kit
from dev.figures.kit import COLORS, on_card
from rlhf_course.course.presets import ROOT, load_preset
from rlhf_course.runtime.files import atomic_file

CARDS = ROOT / "figs/measured/results"
FOLDER = ROOT / "figs/results"
# name: (compute, draw, title, description)
RESULTS: dict[str, tuple[Callable[[], dict], Callable[[dict], Figure], str, str]] = {}


def result(compute: Callable[[], dict], title: str, description: str) -> Callable:
    """Return a decorator that registers a figure's function with the function that computes it."""

    def register(draw: Callable[[dict], Figure]) -> Callable[[dict], Figure]:
        RESULTS[draw.__name__] = compute, draw, title, description
        return draw

    return register


def run_cells(notebook: str, *marks: str, **names) -> dict:
    """Run, in order, a notebook's code cells that contain a mark; return their global names.

    The notebook is in notebooks/ or in notebooks/deeper/. ``names`` are global names that exist
    before the first cell. Prints and plots are dropped.
    """
    path = ROOT / f"notebooks/{notebook}.ipynb"
    if not path.exists():
        path = ROOT / f"notebooks/deeper/{notebook}.ipynb"
    cells = nbformat.read(path, as_version=4).cells
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    for mark in marks:
        if not any(mark in source for source in sources):
            raise ValueError(f"{notebook} has no cell with {mark!r}; adapt {Path(__file__).name}.")
    settings = load_preset(notebook, "tiny", {})
    found = {"settings": settings, "seed": 0, "torch": torch, "np": np, "pd": pd} | names
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for source in sources:
            if any(mark in source for mark in marks):
                exec(compile(source, notebook, "exec"), found)
    return found


@contextlib.contextmanager
def float64():
    """Use float64 by default, as the notebooks on exact sums do."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- 1: length drift

SHARES = (0.2, 0.5, 0.8)
GROUPS = (2, 4, 8, 16, 32, 64)


def compute_length_drift() -> dict:
    """Return the drift of lengths by divisor, group size and share of right answers; and paths."""
    with float64():
        cells = run_cells(
            "length_drift",
            "import matplotlib.pyplot as plt",
            "def answers(theta)",
            "def weights(p",
            "def expected_gradient(theta, divisor",
            "paths = {}",
        )
        drift = []
        shared = 0.0
        for divisor in cells["DIVISORS"]:
            for size in GROUPS:
                for share in SHARES:
                    theta = cells["initial_logits"](share)
                    gradient = cells["expected_gradient"](theta, divisor, size)
                    jacobian = torch.func.jacrev(cells["mean_lengths"])(theta)
                    right, wrong, every = (jacobian @ gradient / gradient[0]).tolist()
                    shared = max(shared, (gradient[1:].sum() / gradient[0]).abs().item())
                    drift.append([divisor, size, share, right, wrong, every])
        paths = {
            f"{prompt}, {divisor}": path.tolist()
            for (prompt, divisor), path in cells["paths"].items()
        }
    columns = ["divisor", "group", "share", "right", "wrong", "all"]
    rows = [dict(zip(columns, row, strict=True)) for row in drift]
    return {"drift": rows, "shared EOS": shared, "paths": paths}


@result(
    compute_length_drift,
    "Length drift by the divisor of the loss",
    "Left: the drift of wrong answers' length over the group size. It is constant with a mean per"
    " response, falls about as 1 over the group size with a mean per token, and is 0 with a"
    " constant. Middle: the drift of all answers' length over the share of right answers crosses 0"
    " at one half. Right: on a prompt that stays unsolved, length more than doubles with a mean per"
    " response, and stays the same with a constant.",
)
def length_drift(card: dict) -> Figure:
    """Draw the drift by group size and by share, and lengths on an unsolved prompt."""
    drift = pd.DataFrame(card["drift"])
    drawing, (by_size, by_share, path) = plt.subplots(1, 3)
    styles = {"mean per response": "reward", "mean per token": "policy", "constant": "reference"}
    for divisor, color in styles.items():
        rows = drift[drift["divisor"] == divisor]
        half = rows[rows["share"] == 0.5]
        by_size.plot(half["group"], half["wrong"], "o-", color=COLORS[color], label=divisor)
        eight = rows[rows["group"] == 8]
        by_share.plot(100 * eight["share"], eight["all"], "o-", color=COLORS[color])
        path.plot(np.array(card["paths"][f"unsolved, {divisor}"])[:, 2], color=COLORS[color], lw=2)
    by_size.set(xscale="log", xlabel="responses per group", title="wrong answers")
    by_size.set_xticks(GROUPS, [str(size) for size in GROUPS])
    by_size.minorticks_off()
    by_size.set_ylabel("drift of the length, tokens\nper unit of log-odds")
    by_share.axhline(0, color="0.3", lw=0.8)
    by_share.set(xlabel="right answers, %", title="all answers, groups of 8")
    path.set(xlabel="step", title="an unsolved prompt", ylabel="expected length, tokens")
    path.set_ylim(0, None)
    drawing.legend(*by_size.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return on_card(drawing, 330, legend="below")


# --- 2: engine corrections

NOISES = (0.1, 0.3, 1.0)
BATCHES = (16, 128, 1024, 8192)
LENGTHS = (1, 2, 4, 6, 8, 10)
CORRECTIONS = ("per token", "per token, at most 2", "per response", "per response, at most 2")


def compute_engine_corrections() -> dict:
    """Return in how many languages each correction is worse than none, and E[w²] against KL."""
    with float64():
        cells = run_cells(
            "engine_corrections",
            "import matplotlib.pyplot as plt",
            "def tree(V, L)",
            "def language(seed)",
            "def forms(ratio)",
            "def errors(theta, off",
        )
        errors = cells["errors"]
        tree = cells["tree"]
        places = cells["contexts"], cells["sequences"]
        tables = {}
        for seed in range(20):
            reference, rewards = cells["language"](seed)
            generator = torch.Generator().manual_seed(100 + seed)
            off = torch.randn(reference.shape, generator=generator)
            for noise in NOISES:
                tables[noise, seed] = errors(reference, noise * off, rewards, places)
        table = pd.concat(tables, names=["noise", "language", "weight"])
        for n in BATCHES:
            table[n] = n * (table["bias"] / table["own"]) ** 2 + table["spread"] ** 2
        rows = []
        for (noise, weight), part in table.groupby(["noise", "weight"], sort=False):
            none = table.loc[noise].xs("no weight", level="weight")
            part = part.droplevel(["noise", "weight"])
            row = {"noise": noise, "weight": weight}
            row["median error"] = [float(part[n].median()) for n in BATCHES]
            row["worse than none"] = [int((part[n] > none[n]).sum()) for n in BATCHES]
            row["more bias than none"] = int((part["bias"] > none["bias"]).sum())
            row |= {"bias": float(part["bias"].median()), "spread": float(part["spread"].median())}
            rows.append(row)
        by_length = []
        for length in LENGTHS:
            for seed in range(20):
                by_length.append(one_language(errors, tree(2, length), length, seed))
    return {"batches": BATCHES, "languages": 20, "forms": rows, "by length": by_length}


def one_language(errors: Callable, places: tuple, length: int, seed: int) -> dict:
    """Return bias left, E[w²] and KL for one language, as the notebook's ``at_length``."""
    generator = torch.Generator().manual_seed(seed)
    logits, off = torch.randn(2, 2**10, 2, generator=generator)[:, : 2**length - 1]
    by_token, noise = torch.randn(2, 2**10, 2, generator=generator)
    rewards = by_token[torch.arange(length), places[1]].sum(1)
    rewards += 0.3 * noise.flatten()[: 2**length]
    row = {"tokens": length, "language": seed}
    for size in NOISES:
        table = errors(logits, size * off, rewards, places)
        left = table["bias"]["per token"] / table["bias"]["no weight"]
        second_moment, kl = table[["E[w²]", "KL"]].iloc[0]
        row[str(size)] = [float(left), float(second_moment), float(kl)]
    return row


@result(
    compute_engine_corrections,
    "Corrections for an engine's samples",
    "Left: the squared error of four corrections and of no correction over the batch size; with 16"
    " responses, no correction is best or nearly so. Middle: the second moment of a response's"
    " weight over the KL; points lie near exp(2 KL) at small KL and leave the line at large KL."
    " Right: the share of the bias that weights per token leave, over the response's length.",
)
def engine_corrections(card: dict) -> Figure:
    """Draw errors by batch size, second moments by KL, and the bias left by length."""
    drawing, (error, moment, left) = plt.subplots(1, 3)
    colors = ("reference", "policy", "reward", "value")
    shown = ("no weight", "per token", "per response", "per response, at most 2")
    rows = {row["weight"]: row for row in card["forms"] if row["noise"] == 0.3}
    for weight, color in zip(shown, colors, strict=True):
        error.plot(
            card["batches"], rows[weight]["median error"], "o-", color=COLORS[color], label=weight
        )
    error.set(xscale="log", yscale="log", xlabel="responses per batch", title="noise 0.3")
    error.set_ylabel("squared error ÷ that\nof own samples (median)")
    error.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    error.minorticks_off()
    for noise, color in zip(NOISES, ("value", "policy", "reward"), strict=True):
        points = np.array([row[str(noise)] for row in card["by length"]])
        moment.plot(points[:, 2], points[:, 1], ".", color=COLORS[color], label=f"noise {noise:g}")
    line = np.linspace(0, 2.5, 50)
    moment.plot(line, np.exp(2 * line), "k:", label="exp(2 KL)")
    moment.set(yscale="log", xlabel="KL(engine, trainer), nats", ylabel="E[w²]", title="weights")
    moment.set_xlim(0, 2.5)
    moment.set_ylim(0.9, 200)
    moment.legend()
    for noise, color in zip(NOISES, ("value", "policy", "reward"), strict=True):
        medians = []
        for length in LENGTHS:
            parts = [row[str(noise)][0] for row in card["by length"] if row["tokens"] == length]
            medians.append(np.median(parts))
        left.plot(LENGTHS, medians, "o-", color=COLORS[color])
    left.axhline(1, color="0.3", lw=0.8)
    left.set(xlabel="tokens per response", ylabel="share of the bias left", ylim=(0, 1.2))
    left.set_title("weights per token")
    drawing.legend(*error.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return on_card(drawing, 350, legend="below")


# --- 3: λ, length and critic


def compute_lambda_length_critic() -> dict:
    """Return the best λ and the excess error at 0.95 by critic, length and batch; and curves."""
    with float64():
        cells = run_cells(
            "lambda_length_critic", "def advantage_map", "def coin_error", "def coin_sums",
            "coin_critics = ", "best_lambda, excess_error",
        )  # fmt: skip
    keys = list(cells["excess_error"])
    rows = []
    for critic, size, tokens in keys:
        key = critic, size, tokens
        at_095 = cells["direction_error"](
            *cells["coin_error"](tokens, 0.95, **cells["coin_critics"][critic]), size
        )
        row = {"critic": critic, "batch": int(size), "tokens": int(tokens)}
        row |= {"best": float(cells["best_lambda"][key]), "error": float(at_095)}
        rows.append(row | {"excess": float(cells["excess_error"][key])})
    curves = {}
    for (critic, tokens), part in cells["coin"].groupby(["critic", "tokens"], sort=False):
        curves[f"{critic}, {tokens}"] = [round(float(x), 6) for x in part[1024]]
    horizons = [float(x) for x in cells["horizons"]]
    kept = float(cells["kept_variance"])
    gap = float(cells["coin_gap"])
    return {"table": rows, "horizons": horizons, "curves": curves, "kept": kept, "gap": gap}


@result(
    compute_lambda_length_critic,
    "λ, length and critic",
    "Error after the best rescaling over λ, for four critics, at 4, 64 and 256 tokens. At 256"
    " tokens, λ = 0.95 loses most of the gradient's direction with the critic that knows nothing,"
    " and little with the other critics.",
)
def lambda_length_critic(card: dict) -> Figure:
    """Draw the error against λ for four critics and three lengths (its notebook's figure 1)."""
    drawing, axes = plt.subplots(1, 3, sharey=True)
    colors = {"true values": "value", "noise = 0.5": "policy", "known = 0.5": "gold"}
    colors |= {"known = 0": "reference"}
    for axis, tokens in zip(axes, (4, 64, 256), strict=True):
        for critic, color in colors.items():
            curve = card["curves"][f"{critic}, {tokens}"]
            axis.plot(card["horizons"], curve, color=COLORS[color], label=critic, lw=2)
            best = int(np.argmin(curve))
            axis.plot(card["horizons"][best], curve[best], "o", color=COLORS[color])
        axis.axvline(20, color="0.6", ls=":")
        axis.set(title=f"{tokens} tokens", xlabel="λ", xscale="log", ylim=(-0.03, 1))
        axis.set_xticks([1, 10, 100, 1e3, 1e4], ["0", "0.9", "0.99", "0.999", "0.9999"])
        axis.minorticks_off()
    axes[0].set_ylabel("error after the best rescaling")
    drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return on_card(drawing, 340, legend="below", small_print="")


# --- 4: GRPO's fixed point


def compute_grpo_fixed_point() -> dict:
    """Return each loss's trained policy against the law, token by token, and its share of gain."""
    with float64():
        cells = run_cells(
            "fixed_points",
            "import matplotlib.pyplot as plt",
            "def tree(V, L)",
            "def token_logprobs(theta)",
            "def language(seed)",
            "def measure(logp",
            "def optimum(ref, rewards",
            "def hyperbola",
            "def predict(reference",
            "def grpo_losses",
            "def descend(",
            "def action_values",
        )
        rows = []
        for seed in range(cells["settings"].seeds):
            for beta in cells["settings"].betas:
                for kind in ("k3", "ratio × k3"):
                    for divide in (False, True):
                        rows.append(fixed_point(cells, seed, beta, kind, divide))
        curve = one_token_tilts(cells)
    return {"table": rows, "curve": curve}


def exponential_law(cells: dict, reference, rewards, beta: float, divide: bool):
    """Return the law for ratio × k3 as logits (C, V), from the last token to the first, and σ.

    With the division, σ may go to 0, because a sharper policy has a smaller σ and a smaller σ makes
    the policy sharper. Then the logits are not finite.
    """
    ref = reference.log_softmax(-1)
    vocabulary = cells["V"]
    length = cells["L"]
    contexts = cells["contexts"]
    policy = ref.clone()
    sigma = 1.0
    for _ in range(200 if divide else 1):
        value = rewards / sigma
        for t in reversed(range(length)):
            here = contexts[:: vocabulary ** (length - t), t]
            q = value.view(-1, vocabulary)
            policy[here] = (ref[here] + q / beta).log_softmax(-1)
            value = (policy[here].exp() * q).sum(1)
        p = cells["token_logprobs"](policy).sum(1).exp()
        sigma = (p @ (rewards - p @ rewards) ** 2).sqrt() if divide else 1.0
    return policy, sigma


def with_ratio(cells: dict, beta: float) -> Callable:
    """Return a loss per response as trl 1.16 has it by default: k3 is multiplied by the ratio."""

    def losses(new, old, ref, advantage, _):
        log_rho = ref - new
        ratio = (new - old).exp()
        k3 = log_rho.exp() - 1 - log_rho
        return (beta * ratio * k3 - cells["clipped"](ratio, advantage[:, None])).mean(1)

    return losses


def fixed_point(cells: dict, seed: int, beta: float, kind: str, divide: bool) -> dict:
    """Train by exact gradient descent, and compare the trained policy with the law."""
    reference, rewards = cells["language"](seed)
    token_logprobs = cells["token_logprobs"]
    measure = cells["measure"]
    start = token_logprobs(reference).sum(1)
    if kind == "k3":
        law, sigma = cells["predict"](reference, rewards, beta, divide)
        trained = cells["descend"](reference, rewards, beta, divide)
    else:
        law, sigma = exponential_law(cells, reference, rewards, beta, divide)
        kept = cells["grpo_losses"]
        cells["grpo_losses"] = with_ratio(cells, beta)
        steps = 400 if divide or beta >= 1 else 1200
        trained = cells["descend"](reference, rewards, beta, divide, steps=steps)
        cells["grpo_losses"] = kept
    law_p = law.softmax(-1)
    trained_p = trained.softmax(-1)
    exists = bool(law_p.isfinite().all())  # if not, σ went to 0 in the passes of the law
    best = cells["optimum"](start, rewards, beta)
    _, law_kl = measure(token_logprobs(law).sum(1), start, rewards)
    _, best_kl = measure(best, start, rewards)

    def gain(logp) -> float:
        reward, kl = measure(logp, start, rewards)
        return reward - beta * kl

    low = gain(start)
    high = gain(best)
    share = (gain(token_logprobs(trained).sum(1)) - low) / (high - low)
    row = {"seed": seed, "β": beta, "penalty": kind, "divides": divide, "law exists": exists}
    row["gap"] = (law_p - trained_p).abs().max().item() if exists else None
    row |= {"KL by the law": law_kl if exists else None, "KL of π*": best_kl}
    trained_kl = measure(token_logprobs(trained).sum(1), start, rewards)[1]
    largest = token_logprobs(trained).sum(1).exp().max().item()
    return row | {"KL trained": trained_kl, "largest probability": largest, "share": share}


def one_token_tilts(cells: dict) -> dict:
    """Return both tilts of a prompt with twenty answers of one token, without the division."""
    generator = torch.Generator().manual_seed(0)
    base = torch.full((20,), 0.05)
    x = torch.randn(20, generator=generator).sort().values
    curve = {"reward": x.tolist()}
    curve["k3, law"] = (cells["hyperbola"](base, x)[0] / base).tolist()
    curve["ratio × k3, law"] = (x.softmax(0) / base).tolist()
    for kind in ("k3", "ratio × k3"):
        logits = torch.zeros(20)
        for _ in range(600):
            now = logits.softmax(0)
            bracket = 1 - base / now if kind == "k3" else (now / base).log()
            bracket = bracket - (x - now @ x)
            step = now * (bracket - now @ bracket) / torch.maximum(base, now)
            logits = logits - step.clamp(-1, 1)
        curve[f"{kind}, trained"] = (logits.softmax(0) / base).tolist()
    return curve


@result(
    compute_grpo_fixed_point,
    "Where GRPO ends",
    "Left: for one-token answers, k3 as published ends at a hyperbolic tilt of the reference, and"
    " the ratio times k3 ends at the exponential tilt; trained points lie on both laws. Right: for"
    " answers of four tokens, the share of the possible gain over β; neither loss reaches 1.",
)
def grpo_fixed_point(card: dict) -> Figure:
    """Draw the two tilts for one token, and shares of the possible gain for four tokens."""
    drawing, (tilt, share) = plt.subplots(1, 2)
    curve = card["curve"]
    colors = {"k3": "policy", "ratio × k3": "reward"}
    for kind, color in colors.items():
        tilt.plot(curve["reward"], curve[f"{kind}, trained"], "o", color=COLORS[color])
        tilt.plot(curve["reward"], curve[f"{kind}, law"], color=COLORS[color], label=kind)
    tilt.set(xlabel="reward of an answer", title="one token, β = 1, σ = 1")
    tilt.set_ylabel("probability ÷ that of\nthe reference")
    tilt.legend(title="law; points: trained")
    table = pd.DataFrame(card["table"])
    for kind, color in colors.items():
        for divide, style in ((False, "o-"), (True, "s--")):
            rows = table[(table["penalty"] == kind) & (table["divides"] == divide)]
            means = rows.groupby("β")["share"].mean()
            label = f"{kind}{', ÷ σ' if divide else ''}"
            share.plot(means.index, means, style, color=COLORS[color], label=label)
    share.axhline(1, color="0.3", lw=0.8)
    share.set(xlabel="β", ylabel="share of the possible gain", title="four tokens, 3 languages")
    share.set_ylim(None, 1.02)
    share.legend()
    return on_card(drawing, 360)


# --- 5: penalty and placement

SEEDS = (0, 1, 2)


def compute_penalty_placement() -> dict:
    """Return the share of the gain for each penalty, place, β and language."""
    rows = []
    for seed in SEEDS:
        rows += one_toy_language(seed)
    return {"table": rows}


def one_toy_language(seed: int) -> list[dict]:
    """Run the deeper notebook's cells in one language."""
    found = run_cells(
        "five_penalties",
        "import matplotlib.pyplot as plt",
        "V, L = settings.toy_vocabulary",
        "def toy_policy",
        "def objective(logp",
        "def share_of_gain",
        "betas = settings.toy_betas",
        "ref_table = torch.zeros",
        "def five_penalties",
        "def ascend(",
        "final_logprobs = {",
        preset="tiny",
        overrides={},
        output_dir="build",
        seed=seed,
    )
    rows = []
    for (place, penalty), by_beta in found["shares"].iterrows():
        for beta, value in by_beta.items():
            row = {"seed": seed, "place": place, "penalty": penalty, "β": float(beta)}
            row |= {"share": float(value)}
            rows.append(row | {"KL": float(found["kls"].loc[(place, penalty), beta])})
    return rows


@result(
    compute_penalty_placement,
    "Five penalties in three places",
    "Heat maps of the smallest share of the possible gain over three languages: rows are penalties,"
    " columns are values of β, panels are places. With the penalty in one place, only kl in the"
    " reward reaches 1 at every β; with the penalty in both places, kl, k3 and full reach it.",
)
def penalty_placement(card: dict) -> Figure:
    """Draw the smallest share over the languages (the deeper notebook has one language)."""
    table = pd.DataFrame(card["table"])
    lowest = table.groupby(["place", "penalty", "β"])["share"].min().unstack()
    drawing, axes = plt.subplots(1, 3, sharey=True)
    names = ("kl", "mse", "k3", "full", "abs")
    for axis, place in zip(axes, ("in the reward", "as a loss", "in both"), strict=True):
        block = lowest.loc[place].loc[list(names)]
        axis.pcolormesh(
            block.clip(-1, 1), edgecolors="white", linewidth=2, cmap="RdBu", vmin=-1.6, vmax=1.6
        )
        for (row, column), share in np.ndenumerate(block):
            weight = "bold" if block.iloc[row].min() > 0.999 else "normal"
            style = {"ha": "center", "va": "center", "weight": weight}
            axis.text(column + 0.5, row + 0.5, f"{share:.2f}", **style)
        axis.set(title=place, xlabel="β")
        axis.set_xticks(np.arange(len(block.columns)) + 0.5, [f"{b:g}" for b in block.columns])
        axis.set_yticks(np.arange(len(names)) + 0.5, names)
        axis.grid(False)
    axes[0].invert_yaxis()
    return on_card(drawing, 330)


# --- 6: three silent faults

PADDING = (0, 1, 2, 4, 8, 16)
MODEL = ROOT / "models/gpt2-imdb-mini"


def compute_silent_faults() -> dict:
    """Return the effects of whitening one token, of cuDNN, and of missing positions."""
    recorded = json.loads((ROOT / "figs/measured/gpu_day.json").read_text(encoding="utf-8"))
    cudnn = {}
    for precision, columns in recorded["gpt2"].items():
        cudnn[precision] = [columns[name]["generate"] for name in ("cuDNN allowed", "now")]
    gpu = recorded["environment"]["device"], recorded["environment"]["torch"]
    card = {"whitening": one_token_whitened(), "positions": positions_left_out()}
    return card | {"cuDNN": cudnn, "gpu": gpu}


def one_token_whitened() -> dict:
    """Run one of TRL 0.4.7's steps without and with an empty answer among eight."""
    from transformers import AutoTokenizer

    from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
    from rlhf_course.ppo.algorithm import gae
    from rlhf_course.ppo.rollout import Samples, forward
    from rlhf_course.ppo.update import make_experience, minibatch_loss

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.eos_token
    names = {"Samples": Samples, "make_experience": make_experience, "gae": gae}
    names |= {"replace": replace, "minibatch_loss": minibatch_loss, "forward": forward}
    names |= {"eos": tokenizer.eos_token_id}
    whiten = function("deeper/silent_bugs", "whiten_minibatch")
    step = function("deeper/silent_bugs", "old_ppo_step", whiten_minibatch=whiten, **names)
    lost = {}
    queries = [torch.tensor(tokenizer("This film is")["input_ids"])] * 8
    answers = [torch.tensor(tokenizer(" a good film")["input_ids"])] * 8
    for title, last in (("eight words", answers[-1]), ("one empty", answers[-1][:0])):
        torch.manual_seed(0)
        policy = AutoModelForCausalLMWithValueHead.from_pretrained(MODEL, dtype=torch.float32)
        config = PPOConfig(batch_size=8, mini_batch_size=1, ppo_epochs=1, seed=0)
        trainer = PPOTrainer(config, policy, tokenizer=tokenizer)
        empty_is_eos = last if len(last) else torch.tensor([tokenizer.eos_token_id])
        step(trainer, queries, [*answers[:7], empty_is_eos], torch.zeros(8))
        weights = torch.cat([p.detach().flatten() for p in policy.parameters() if p.requires_grad])
        lost[title] = (~weights.isfinite()).double().mean().item()
    whitened = {}
    for n in (1, 2, 3):
        x = torch.tensor([[0.3, -0.1, 0.4][:n]])
        finite = whiten(x, torch.ones_like(x)).isfinite().all().item()
        whitened[str(n)] = "finite" if finite else "NaN"
    return {"lost": lost, "whitened": whitened}


@torch.no_grad()
def positions_left_out() -> dict:
    """Return how far log-probabilities are off, by the number of padding tokens on the left."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = pd.read_parquet(ROOT / "models/imdb-openings/test-00000-of-00001.parquet")["text"]
    rows = [tokenizer(text)["input_ids"][:24] for text in texts]
    ids = torch.tensor([row for row in rows if len(row) == 24][:64])
    true = token_logprobs_of(model, ids, torch.ones_like(ids), None)
    found = {"texts": len(ids), "tokens": ids.shape[1] - 8, "without": [], "with": []}
    for padding in PADDING:
        pad = torch.full((len(ids), padding), tokenizer.eos_token_id)
        padded = torch.cat([pad, ids], 1)
        mask = torch.cat([torch.zeros_like(pad), torch.ones_like(ids)], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for name, passed in (("without", None), ("with", positions)):
            off = token_logprobs_of(model, padded, mask, passed)[:, padding:] - true
            response = off[:, 7:]  # the first eight tokens are the query
            found[name].append(response.sum(1).abs().mean().item())
    return found | {"padding": PADDING}


def token_logprobs_of(model, ids, mask, positions) -> torch.Tensor:
    """Return the log-probability of each token after the first, (B, T − 1)."""
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@result(
    compute_silent_faults,
    "Three faults that raise no error where they happen",
    "Left: after a step of TRL 0.4.7's arithmetic, all weights are NaN if one answer of eight is"
    " empty, and none otherwise. Middle: seconds to sample on an H200 with and without cuDNN's"
    " attention kernel, in float32 and bf16. Right: the error of a response's log-probability over"
    " the number of padding tokens on the left, without and with position numbers.",
)
def silent_faults(card: dict) -> Figure:
    """Draw the share of lost weights, seconds of sampling, and errors of log-probabilities."""
    drawing, (lost, seconds, error) = plt.subplots(1, 3)
    shares = card["whitening"]["lost"]
    lost.bar(list(shares), [100 * share for share in shares.values()], color=COLORS["reward"])
    lost.set(ylabel="weights that are NaN, %", title="one token whitened", ylim=(0, 105))
    lost.set_xticks([0, 1], ["no answer\nis empty", "one of 8\nis empty"])
    for place, pair in enumerate(card["cuDNN"].values()):
        for shift, value, color in ((-0.2, pair[0], "reward"), (0.2, pair[1], "policy")):
            seconds.bar(place + shift, value, 0.4, color=COLORS[color])
    seconds.set_xticks(range(len(card["cuDNN"])), list(card["cuDNN"]))
    seconds.set(ylabel="seconds to sample a batch", title=f"recorded on an {card['gpu'][0][7:]}")
    seconds.bar(0, 0, color=COLORS["reward"], label="cuDNN allowed")
    seconds.bar(0, 0, color=COLORS["policy"], label="excluded")
    seconds.legend(loc="upper left")
    seconds.set_ylim(0, 0.6)
    positions = card["positions"]
    for name, color in (("without", "reward"), ("with", "policy")):
        label = f"{name} positions"
        error.plot(positions["padding"], positions[name], "o-", color=COLORS[color], label=label)
    error.set(xlabel="padding tokens on the left", title="left-padded GPT-2")
    error.set_ylabel("error of a response's\nlog-probability, nats")
    error.legend(loc="lower right", bbox_to_anchor=(1, 0.1))
    return on_card(drawing, 340)


# --- files


def function(notebook: str, name: str, **names) -> Callable:
    """Return a function that a notebook's cell defines, and nothing else of the cell."""
    cells = nbformat.read(ROOT / f"notebooks/{notebook}.ipynb", as_version=4).cells
    for cell in cells:
        if cell.cell_type == "code" and f"def {name}(" in cell.source:
            for part in ast.parse(cell.source).body:
                if isinstance(part, ast.FunctionDef) and part.name == name:
                    found = {"torch": torch, "np": np} | names
                    exec(compile(ast.Module([part], []), notebook, "exec"), found)
                    return found[name]
    raise ValueError(f"{notebook} does not define {name}; adapt {Path(__file__).name}.")


def rounded(value, digits: int = 6):
    """Return a card's content with floats at six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(part, digits) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part, digits) for part in value]
    return value


def read_result(name: str) -> dict:
    """Return a result's committed card."""
    return json.loads((CARDS / f"{name}.json").read_text(encoding="utf-8"))


def write_result(name: str) -> float:
    """Compute a result, and write its card; return the seconds that this took."""
    started = time.perf_counter()
    card = rounded(RESULTS[name][0]())
    seconds = time.perf_counter() - started
    card["seconds"] = round(seconds)
    CARDS.mkdir(parents=True, exist_ok=True)
    with atomic_file(CARDS / f"{name}.json") as path:
        path.write_text(json.dumps(card, ensure_ascii=False) + "\n", encoding="utf-8")
    return seconds


def draw_result(name: str, folder: Path = FOLDER) -> Path:
    """Draw a result's figure from its card; return the file."""
    _, draw, title, description = RESULTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    entry = {name: (lambda: draw(read_result(name)), title, description)}
    kept = kit.FIGURES
    kit.FIGURES = entry  # these figures are not in figs/, so `make figs` does not draw them
    try:
        kit.save(name, folder, endings=["svg"])
    finally:
        kit.FIGURES = kept
    return folder / f"{name}.svg"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(RESULTS)}")
    parser.add_argument("--draw", action="store_true", help="draw only, from the committed cards")
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.names} - {*RESULTS}):
        parser.error(f"unknown results {', '.join(unknown)}; choose from {', '.join(RESULTS)}")
    if not options.names and not options.draw:
        print("\n".join(f"{name}: {title}" for name, (_, _, title, _) in RESULTS.items()))
    for name in options.names or (RESULTS if options.draw else ()):
        if not options.draw:
            print(f"{name}: computed in {write_result(name):.0f} s")
        print(f"wrote {draw_result(name).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
