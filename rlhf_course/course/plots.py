"""Draw figures of runs. Policy, reference, reward, value, KL and gold each have one color."""

import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Color-blind people can distinguish Okabe and Ito's colors.
COLORS = {
    "policy": "#0072B2",
    "reference": "#7F7F7F",
    "reward": "#D55E00",
    "value": "#009E73",
    "kl": "#CC79A7",
    "gold": "#E69F00",
}
# Runs get these colors; the faulty run is first.
RUN_COLORS = [COLORS[name] for name in ("reward", "kl", "policy", "value")]
CURVES = {  # stats key: (title, unit, color)
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
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
    }
)


def panels(rows: int = 1, columns: int = 1, **options) -> tuple[Figure, Axes | np.ndarray]:
    """Return a closed figure and its axes; notebooks would show an open figure twice."""
    figure, axes = plt.subplots(rows, columns, **options)
    plt.close(figure)
    return figure, axes


def _legend_below(figure: Figure, axes: Sequence[Axes], columns: int) -> None:
    """Draw one legend for all axes below them; a label in several axes has one entry."""
    entries = {}
    for axis in axes:
        lines, labels = axis.get_legend_handles_labels()
        entries |= zip(labels, lines, strict=True)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)


def _histograms(axis: Axes, groups: Mapping[str, tuple[Sequence[float], str]]) -> None:
    """Draw histograms with the same bins; groups maps a label to (values, color name)."""
    all_values = np.concatenate([values for values, _ in groups.values()])
    bins = np.histogram_bin_edges(all_values, bins=40)
    for name, (values, color) in groups.items():
        label = f"{name}: mean {np.mean(values):.2f}"
        axis.hist(values, bins, alpha=0.6, color=COLORS[color], label=label)
    axis.legend()


def training_curves(history: pd.DataFrame, keys: Sequence[str] = tuple(CURVES)) -> Figure:
    """Draw each statistic by PPO step, in its own panel; history has a row per step."""
    columns = min(3, len(keys))
    rows = math.ceil(len(keys) / 3)
    figure, axes = panels(rows, columns, figsize=(10, 2.5 * rows), sharex=True, squeeze=False)
    steps = range(1, len(history) + 1)
    for axis, key in zip(axes.flat, keys, strict=False):
        title, unit, color = CURVES[key]
        axis.set(title=title, ylabel=unit)
        axis.plot(steps, history[key], color=COLORS[color], lw=1.8)
        if key == "objective/kl_coef":  # start at 0: a constant has no scale
            axis.set_ylim(0, 1.25 * history[key].max())
    plt.setp(axes[-1], xlabel="PPO step")
    return figure


class LivePlot:
    """Redraw training curves in place while a loop runs."""

    def __init__(self, every: int = 5) -> None:
        self.every = every
        self.history = pd.DataFrame(dtype=float)

    def update(self, stats: Mapping, last: bool = False) -> None:
        """Add one step's stats; redraw at each ``every``-th step and if ``last``."""
        numbers = {key: value for key, value in stats.items() if isinstance(value, float | int)}
        step = len(self.history) + 1
        row = pd.DataFrame([numbers], index=[step])
        self.history = pd.concat([self.history, row])
        if last or step % self.every == 0:
            is_shown = step > self.every
            display(training_curves(self.history), display_id=str(id(self)), update=is_shown)


def loss_curve(
    train: pd.DataFrame, held_out: Sequence[float], chance: float | None = None
) -> Figure:
    """Draw training loss by step, and held-out loss before and after training.

    train has columns step and loss, such as a trainer's log; rows without a loss are left out.
    chance, if given, is the loss of a model without preference, and becomes a dotted line.
    """
    train = train.dropna(subset="loss")
    figure, axis = panels(figsize=(6.5, 3))
    axis.plot(train["step"], train["loss"], color=COLORS["reference"], lw=1.2, label="training")
    ends = [0, train["step"].max()]
    axis.plot(ends, held_out, color=COLORS["policy"], marker="o", ls="none", label="held out")
    for step, loss in zip(ends, held_out, strict=True):
        axis.annotate(
            f"{loss:.2f}", (step, loss), xytext=(0, 7), textcoords="offset points", ha="center"
        )
    if chance is not None:
        axis.axhline(chance, color="0.3", ls=":", lw=1.2, label="ln 2")
    axis.set(xlabel="step", ylabel="loss, nats")
    axis.margins(y=0.15)
    axis.legend()
    return figure


def before_after(before: Sequence[float], after: Sequence[float], name: str) -> Figure:
    """Draw histograms of a quantity before and after training; mark the means."""
    figure, axis = panels(figsize=(6.5, 3.2))
    groups = {"before": (before, "reference"), "after": (after, "policy")}
    _histograms(axis, groups)
    axis.set(xlabel=name, ylabel="held-out queries")
    for values, color in groups.values():
        axis.axvline(np.mean(values), color=COLORS[color], lw=2)
    return figure


def over_text(
    tokens: Sequence[str], rows: Mapping[str, Sequence[float]], n_query: int = 0
) -> Figure:
    """Draw one bar per response token, in one strip per quantity.

    rows maps a quantity to one number per response token, in the order of
    tokens[n_query:].
    """
    width = max(7.0, 0.62 * len(tokens))
    height = 1.15 * len(rows) + 0.5
    figure, axes = panels(len(rows), figsize=(width, height), sharex=True, squeeze=False)
    for axis, (name, values) in zip(axes[:, 0], rows.items(), strict=True):
        colors = [COLORS["policy"] if value >= 0 else COLORS["reward"] for value in values]
        axis.bar(range(n_query, len(tokens)), values, color=colors, width=0.7)
        axis.axhline(0, color="0.3", lw=0.8)
        axis.axvspan(-0.5, n_query - 0.5, color="0.93", zorder=0)
        axis.set_ylabel(name, rotation=0, ha="right", va="center")
        axis.margins(y=0.15)
        axis.grid(axis="x", visible=False)
    labels = [repr(token)[1:-1].replace(" ", "␣") for token in tokens]
    axis.set_xticks(range(len(tokens)), labels, rotation=45, ha="right")
    axis.set_xlim(-0.5, len(tokens) - 0.5)
    return figure


def preference_curves(
    train: pd.DataFrame, held_out: pd.DataFrame, ceiling: float | None = None
) -> Figure:
    """Draw a reward model's loss, accuracy and margin against training steps.

    train has the columns step, loss, accuracy and margin; held_out also has {name}_ci.
    """
    figure, axes = panels(1, 3, figsize=(10, 3), sharex=True)
    units = {"loss": "nats per pair", "accuracy": "share of pairs", "margin": "chosen − rejected"}
    for axis, (name, unit) in zip(axes, units.items(), strict=True):
        if name in train:
            train.plot(
                x="step",
                y=name,
                ax=axis,
                legend=False,
                color=COLORS["reference"],
                lw=0.8,
                label="training",
            )
        held_out.plot(
            x="step",
            y=name,
            yerr=f"{name}_ci",
            ax=axis,
            legend=False,
            color=COLORS["reward"],
            capsize=3,
            marker="o",
            ms=4,
            label="held out",
        )
        axis.set(title=name, xlabel="step", ylabel=unit)
    axes[0].axhline(np.log(2), color="0.3", ls=":", lw=1.2, label="ln 2")
    if ceiling is not None:
        axes[1].axhline(ceiling, color=COLORS["gold"], ls="--", lw=1.5, label="ceiling")
    _legend_below(figure, axes, columns=4)
    return figure


def chosen_and_rejected(chosen: Sequence[float], rejected: Sequence[float]) -> Figure:
    """Draw histograms of chosen and rejected scores, and of their difference in each pair."""
    figure, (score_axis, difference_axis) = panels(1, 2, figsize=(10, 3.2))
    _histograms(score_axis, {"rejected": (rejected, "reference"), "chosen": (chosen, "reward")})
    score_axis.set(xlabel="score", ylabel="answers")
    difference = np.asarray(chosen) - np.asarray(rejected)
    bins = np.histogram_bin_edges(difference, bins=40)
    is_right = difference > 0
    for name, pairs, color in (("right", is_right, "value"), ("wrong", ~is_right, "kl")):
        label = f"{name}: {pairs.mean():.0%}"
        difference_axis.hist(difference[pairs], bins, color=COLORS[color], label=label)
    difference_axis.set(xlabel="score of chosen − score of rejected", ylabel="pairs")
    difference_axis.legend()
    return figure


def audit_bars(tables: Mapping[str, pd.DataFrame], wanted: float) -> Figure:
    """Draw the share of prompts for which the normal answer wins, by probe and run.

    tables maps a run to its table (columns share and ci, a row per probe); wanted is the target.
    """
    probes = next(iter(tables.values())).index
    figure, axis = panels(figsize=(8, 0.8 + 0.42 * len(probes)))
    positions = np.arange(len(probes))
    height = 0.8 / len(tables)
    colors = [COLORS[name] for name in ("reference", "policy", "value")]
    for run, (label, table) in enumerate(tables.items()):
        share = table["share"]
        offset = (run - (len(tables) - 1) / 2) * height  # a probe's bars are around its position
        axis.barh(
            positions + offset,
            share,
            height=0.9 * height,
            xerr=np.minimum(table["ci"], [share, 1 - share]),  # error bars stay in 0 … 1
            capsize=2,
            color=colors[run],
            label=label,
        )
    axis.axvline(wanted, color=COLORS["reward"], ls="--", lw=1.5, label=f"required: {wanted:.0%}")
    axis.set(xlim=(0, 1.02), xlabel="share of prompts at which the normal answer scores higher")
    axis.set_yticks(positions, probes)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=len(tables) + 1)
    return figure
