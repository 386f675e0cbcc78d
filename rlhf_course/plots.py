"""Figures, in one visual language: the same colour for the same thing everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import display
from matplotlib.figure import Figure

# Okabe and Ito's palette, readable for colour-blind eyes.
COLOURS = {
    "policy": "#0072B2",
    "reference": "#7F7F7F",
    "reward": "#D55E00",
    "value": "#009E73",
    "kl": "#CC79A7",
    "gold": "#E69F00",
}
CURVES = {  # stats key: (title, unit, colour)
    "ppo/mean_scores": ("score", "logit", "reward"),
    "objective/kl": ("KL to the reference", "nats per response", "kl"),
    "objective/kl_coef": ("KL coefficient β", "", "kl"),
    "tokens/responses_len_mean": ("response length", "tokens", "policy"),
    "ppo/policy/entropy": ("entropy", "nats per token", "policy"),
    "ppo/loss/value": ("value loss", "", "value"),
}

plt.rcParams.update(
    {
        "figure.dpi": 96,
        "figure.constrained_layout.use": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "font.size": 10,
        "legend.frameon": False,
    }
)


def training_curves(history: pd.DataFrame) -> Figure:
    """One panel per curve over PPO steps; history has a row per step and stats keys as columns."""
    figure, axes = plt.subplots(2, 3, figsize=(10, 5), sharex=True)
    for axis, (key, (title, unit, colour)) in zip(axes.flat, CURVES.items(), strict=True):
        if key in history:
            axis.plot(history.index, history[key], color=COLOURS[colour], lw=1.8)
        axis.set(title=title, ylabel=unit)
    for axis in axes[1]:
        axis.set_xlabel("PPO step")
    plt.close(figure)
    return figure


class LivePlot:
    """The training curves, redrawn in place while a loop runs."""

    def __init__(self, every: int = 5) -> None:
        self.every, self.history = every, pd.DataFrame(dtype=float)
        self._handle = None

    def update(self, stats: Mapping, last: bool = False) -> None:
        """Add one step's stats, and redraw at every ``every``-th step and at the last."""
        row = {key: value for key, value in stats.items() if isinstance(value, float | int)}
        self.history = pd.concat([self.history, pd.DataFrame([row])], ignore_index=True)
        if not last and len(self.history) % self.every:
            return
        figure = training_curves(self.history)
        if self._handle is None:
            self._handle = display(figure, display_id=True)
        else:
            self._handle.update(figure)


def before_after(before: Sequence[float], after: Sequence[float], name: str) -> Figure:
    """Histograms of a quantity before and after training, with their means."""
    figure, axis = plt.subplots(figsize=(6.5, 3.2))
    bins = np.histogram_bin_edges(np.concatenate([before, after]), 40)
    for values, label, colour in ((before, "before", "reference"), (after, "after", "policy")):
        axis.hist(values, bins, alpha=0.6, color=COLOURS[colour], label=f"{label}: mean {np.mean(values):.2f}")
        axis.axvline(np.mean(values), color=COLOURS[colour], lw=2)
    axis.set(xlabel=name, ylabel="held-out queries")
    axis.legend()
    plt.close(figure)
    return figure


def over_text(tokens: Sequence[str], rows: Mapping[str, Sequence[float]], n_query: int = 0) -> Figure:
    """Numbers drawn over the tokens of a text, one strip per quantity; the query's tokens stay blank.

    rows: quantity → one number per response token, in the order of tokens[n_query:].
    """
    figure, axes = plt.subplots(
        len(rows), 1, figsize=(max(7.0, 0.62 * len(tokens)), 1.15 * len(rows) + 0.5), sharex=True, squeeze=False
    )
    x = np.arange(n_query, len(tokens))
    for axis, (name, values) in zip(axes[:, 0], rows.items(), strict=True):
        values = np.asarray(values, dtype=float)
        axis.bar(x, values, color=np.where(values >= 0, COLOURS["policy"], COLOURS["reward"]), width=0.7)
        axis.axhline(0, color="0.3", lw=0.8)
        axis.axvspan(-0.5, n_query - 0.5, color="0.93", zorder=0)
        axis.set_ylabel(name, rotation=0, ha="right", va="center")
        axis.margins(y=0.15)
        axis.grid(axis="x", visible=False)
    labels = [repr(token)[1:-1].replace(" ", "␣") for token in tokens]
    axes[-1, 0].set_xticks(range(len(tokens)), labels, rotation=45, ha="right")
    axes[-1, 0].set_xlim(-0.5, len(tokens) - 0.5)
    plt.close(figure)
    return figure


def gold_against_proxy(table: pd.DataFrame) -> Figure:
    """Proxy and gold reward over KL; table has columns kl, proxy, proxy_ci, gold, gold_ci."""
    figure, axis = plt.subplots(figsize=(6.5, 3.4))
    for name, colour in (("proxy", "reward"), ("gold", "gold")):
        axis.errorbar(
            table["kl"], table[name], table[f"{name}_ci"], color=COLOURS[colour], marker="o", capsize=3, label=name
        )
    axis.set(xlabel="KL to the reference (nats per response)", ylabel="mean reward")
    axis.legend()
    plt.close(figure)
    return figure
