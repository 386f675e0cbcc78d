"""Plot benchmark_ppo.py's measurements."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from rlhf_course.course.plots import COLORS, panels

PHASES = {
    "generate": "policy",
    "score": "reward",
    "forward": "reference",
    "update": "value",
}  # phase of a PPO step: color


def step_phases(seconds: Mapping[str, Mapping[str, float]]) -> Figure:
    """Plot one PPO step's seconds by phase as a stacked bar per implementation; return the figure.

    ``seconds`` maps each implementation to its seconds per phase and their total. The first
    implementation is the baseline.
    """
    table = pd.DataFrame.from_dict(seconds, orient="index")
    colors = [COLORS[name] for name in PHASES.values()]
    figure, axis = panels(figsize=(8, 1.2 + 0.6 * len(table)))
    table[list(PHASES)].plot.barh(stacked=True, legend=False, color=colors, ax=axis)
    for row, total in enumerate(table["total"]):
        times = f" ({total / table['total'].iloc[0]:.1f}×)" if row else ""
        axis.annotate(
            f" {total:.2f} s{times}", (table.iloc[row][list(PHASES)].sum(), row), va="center"
        )
    axis.set(xlim=(0, 1.25 * axis.get_xlim()[1]), xlabel="seconds per PPO step, medians")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=len(PHASES))
    return figure


def step_costs(costs: pd.DataFrame) -> Figure:
    """Plot a PPO step's seconds by phase against batch size and response length, on log axes.

    ``costs`` has the columns sweep (batch or response), batch, response, the phases, and total. A
    dotted line shows proportional growth.
    """
    figure, axes = panels(1, 2, figsize=(10, 4), sharey=True)
    sizes = {
        "batch": "batch size, responses of {} tokens",
        "response": "response length in tokens, batches of {}",
    }
    for axis, (swept, label), fixed in zip(axes, sizes.items(), ("response", "batch"), strict=True):
        part = costs[costs["sweep"] == swept]
        for (phase, color), marker in zip(PHASES.items(), "osD^", strict=True):
            axis.plot(
                part[swept], part[phase], color=COLORS[color], marker=marker, ms=4, label=phase
            )
        axis.plot(
            part[swept], part["total"], color="0.2", marker="o", ms=4, lw=2, label="whole step"
        )
        line = part["total"].iloc[-1] * part[swept] / part[swept].iloc[-1]
        axis.plot(part[swept], line, color="0.2", ls=":", lw=1, label="proportional")
        axis.set(xscale="log", yscale="log", xlabel=label.format(part[fixed].iloc[0]))
        axis.set_xticks(part[swept], part[swept])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("seconds")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=6)
    return figure
