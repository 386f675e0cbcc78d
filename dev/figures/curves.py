"""Plot numbers from the project's functions, or from runs in ``measured/``."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from dev.figures import benchmark_plots
from dev.figures.kit import COLORS, FOLDER, QUIET, figure, on_card
from rlhf_course.audit import PASS
from rlhf_course.course import plots
from rlhf_course.ppo.algorithm import AdaptiveKLController, policy_loss
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.runtime.files import read_json

# --- computed


@figure(
    "The clipped objective",
    "The objective over the ratio of new to old probability: for a positive advantage it rises with"
    " the ratio up to 1 + ε and is flat beyond; for a negative advantage it is flat below 1 − ε and"
    " then falls.",
)
def clip_objective() -> Figure:
    """Plot a token's objective against the ratio, for each sign of the advantage."""
    epsilon = PPOConfig.cliprange
    ratio = torch.linspace(0.4, 1.6, 481, dtype=torch.float64)  # rounds the same on every CPU
    drawing, axes = plt.subplots(1, 2, sharey=True)
    for axis, advantage in zip(axes, (1.0, -1.0), strict=True):
        loss, _, clipped = policy_loss(
            ratio.log(), torch.tensor(0.0), torch.tensor(advantage), epsilon
        )
        axis.axvspan(1 - epsilon, 1 + epsilon, color="0.93", zorder=0)
        axis.plot(
            ratio,
            advantage * ratio,
            color=COLORS["reference"],
            ls="--",
            lw=1.6,
            label="ρ·A, not clipped",
        )
        axis.plot(
            ratio,
            np.where(clipped, np.nan, -loss),
            color=COLORS["policy"],
            lw=2.8,
            label="clipped objective",
        )
        dotted = {"color": COLORS["reward"], "lw": 2.8, "ls": (0, (1.4, 0.7))}
        axis.plot(ratio, np.where(clipped, -loss, np.nan), **dotted, label="clipped: no gradient")
        axis.plot(1, advantage, color=COLORS["policy"], marker="o", ms=7)
        side = "above 1 + ε" if advantage > 0 else "below 1 − ε"
        axis.set(
            title=f"A {'> 0' if advantage > 0 else '< 0'}: flat {side}",
            xlabel="ratio ρ = new / old probability",
        )
        axis.set_xticks(
            [0.5, 1 - epsilon, 1, 1 + epsilon, 1.5], ["0.5", "1 − ε", "1", "1 + ε", "1.5"]
        )
    axes[0].set_ylabel("objective, |A| = 1")
    handles, labels = axes[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=3)
    return on_card(drawing, 312, legend="below")


@figure(
    "The adaptive KL controller",
    "Left: in one step, β changes in proportion to the distance of the measured KL from the target;"
    " the distance is clipped at one fifth of the target. Right: over a run, β falls while KL is"
    " below the target and rises while KL is above it.",
)
def adaptive_kl() -> Figure:
    """Plot β's change in one update against KL, and β during three runs, each at a constant KL."""
    config = PPOConfig()

    def change(kl: float) -> float:
        controller = AdaptiveKLController(1.0, config.target, config.horizon)
        controller.update(kl, config.batch_size)
        return 100 * (controller.value - 1)

    drawing, (one, many) = plt.subplots(1, 2)
    kl = np.linspace(0, 2 * config.target, 241)
    one.plot(kl, [change(x) for x in kl], color=COLORS["kl"], lw=2.6)
    one.axvline(config.target, color="0.3", ls=":", lw=1.2)
    one.axhline(0, color="0.3", lw=0.8)
    one.annotate(
        "target", (config.target, change(0)), xytext=(6, 2), textcoords="offset points", color=QUIET
    )
    one.set(
        title="One update", xlabel="KL to the reference, nats per response", ylabel="change of β, %"
    )
    for times, color, style in (
        (2, "reward", "--"),
        (1, "reference", "-"),
        (1 / 3, "policy", "-."),
    ):
        controller = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
        path = []
        for _ in range(200):
            path.append(controller.value)
            controller.update(times * config.target, config.batch_size)
        many.plot(path, color=COLORS[color], ls=style, lw=2.2)
        place = {
            "xytext": (0, -18 if times < 1 else 9),
            "textcoords": "offset points",
            "ha": "right",
        }
        many.annotate(
            f"KL = {times * config.target:g} nats", (160, path[160]), color=COLORS[color], **place
        )
    many.set(title="A run with constant KL", xlabel="PPO step", ylabel="coefficient β")
    many.set_ylim(0, 2 * config.init_kl_coef)
    small_print = (
        f"batch {config.batch_size}, target {config.target:g} nats, horizon {config.horizon:,.0f}"
        " samples"
    )
    return on_card(drawing, 312, small_print=small_print)


# --- measured


def read(notebook: str) -> tuple[dict[str, pd.DataFrame], str]:
    """Return the curves of a notebook's run, and a sentence about their source.

    Raises ``FileNotFoundError`` if the notebook has not been run.
    """
    path = FOLDER / "measured" / f"{notebook}.json"
    if not path.exists():
        raise FileNotFoundError(f"figs/measured/{path.name} is missing. Run `make render`.")
    card = read_json(path)
    curves = {name: pd.DataFrame(columns) for name, columns in card["curves"].items()}
    return (
        curves,
        f"measured: notebook {notebook[:2]}, preset {card['preset']}, seed {card['seed']}",
    )


@figure(
    "Rewards over the words of a sample",
    "Four strips of bars over the tokens of one film review: every response token has a KL penalty,"
    " the last one also has the score, the value head predicts the remaining rewards, and GAE"
    " distributes the advantage over the tokens.",
)
def token_rewards() -> Figure:
    """Plot KL, reward, value and whitened advantage by token for one sample."""
    curves, source = read("03_ppo_step_by_step")
    sample = curves["sample"]
    response = sample.dropna()
    strips = {name: response[name] for name in sample.columns.drop("token")}
    drawing = plots.over_text(list(sample["token"]), strips, n_query=len(sample) - len(response))
    return on_card(drawing, 434, small_print=f"the query is shaded  ·  {source}")


@figure(
    "PPO on the exact frontier",
    "Expected reward over KL in a toy language whose best policies are known exactly: PPO's points"
    " for several values of β lie on or near the line that no policy can exceed.",
)
def oracle_frontier() -> Figure:
    """Plot PPO's results and the best results that any policy can reach."""
    curves, source = read("03_ppo_step_by_step")
    exact = curves["frontier"]
    reached = curves["toy"]
    drawing, axis = plt.subplots()
    right = exact["kl"].max() * 1.17
    top = exact["reward"].max() * 1.12
    kl = np.append(exact["kl"][::-1], right)
    best = np.append(exact["reward"][::-1], exact["reward"].max())
    axis.fill_between(kl, best, top, color="0.93", zorder=0, lw=0)
    axis.text(0.35, exact["reward"].max() * 0.93, "no policy can be here", color=QUIET)
    axis.plot(
        exact["kl"],
        exact["reward"],
        color=COLORS["reference"],
        lw=2.2,
        label="the exact optimum for every β",
    )
    axis.scatter(
        reached["KL"],
        reached["expected reward"],
        s=60,
        color=COLORS["policy"],
        edgecolor="white",
        zorder=3,
        label="PPO",
    )
    for _, row in reached.iterrows():
        share = f"β = {row['β']:g}\n{100 * row['share of the possible gain']:.2f} % of the gain"
        place = {"xytext": (12, -6), "textcoords": "offset points", "va": "top"}
        axis.annotate(share, (row["KL"], row["expected reward"]), **place)
    axis.set(
        xlabel="KL to the reference, nats",
        ylabel="expected reward",
        xlim=(-0.1, right),
        ylim=(None, top),
    )
    axis.legend(loc="lower right")
    return on_card(drawing, 380, small_print=source)


def read_benchmark(name: str, options: str) -> tuple[dict, str]:
    """Return the benchmark's results, and a sentence about their source.

    Raises ``FileNotFoundError`` if the benchmark has not been run.
    """
    path = FOLDER / "measured" / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"{path.name} is missing. Run benchmark_ppo.py {options}.")
    results = read_json(path)
    device = results.get("device") or results["variants"]["ours"]["device"]
    source = (
        f"measured: benchmark_ppo.py, {results['shape']} models, {device} with"
        f" {results['threads']} threads"
    )
    return results, f"{source}, medians of {results['rounds']}"


@figure(
    "One PPO step, here and in TRL 0.11",
    "Stacked bars of the seconds that generation, scores, forward passes and update take: a step of"
    " this course, the classic tutorial's loop that generates one response at a time, and that loop"
    " with batched generation.",
)
def step_phases() -> Figure:
    """Plot the benchmark's three loops on the same models and queries."""
    results, source = read_benchmark("benchmark", "without --costs")
    seconds = {entry["title"]: entry["median"] for entry in results["variants"].values()}
    small_print = f"{results['batch']} samples per step  ·  {source}"
    return on_card(
        benchmark_plots.step_phases(seconds), 300, small_print=small_print, legend="above"
    )


@figure(
    "The time of a PPO step",
    "Seconds per step and per phase over batch size and over response length, on logarithmic axes,"
    " with a line of proportional growth.",
)
def step_costs() -> Figure:
    """Plot the benchmark's two sweeps."""
    results, source = read_benchmark("costs", "--costs")
    return on_card(
        benchmark_plots.step_costs(pd.DataFrame(results["costs"])),
        440,
        small_print=source,
        legend="above",
    )


TWO_PANELS = "Mean score of a batch, and its KL to the reference, over the PPO steps."
SCORE_AND_KL = "ppo/mean_scores", "objective/kl"


@figure(
    "Training curves of GPT-2 on film reviews",
    TWO_PANELS,
)
def curves_imdb() -> Figure:
    """Plot notebook 04's run."""
    curves, source = read("04_gpt2_imdb_ppo")
    return on_card(plots.training_curves(curves["history"], SCORE_AND_KL), 380, small_print=source)


@figure(
    "Training curves of LoRA on Baichuan",
    TWO_PANELS,
)
def curves_lora() -> Figure:
    """Plot notebook 05's run."""
    curves, source = read("05_lora_rlhf_baichuan")
    return on_card(plots.training_curves(curves["history"], SCORE_AND_KL), 380, small_print=source)


@figure(
    "The reward model's audit before and after the fix",
    "For each kind of bad answer, the share of prompts at which the normal answer scores higher,"
    " before and after pairs with such answers were added; PPO may exploit the kinds whose bars"
    " still end left of the line.",
)
def reward_audit() -> Figure:
    """Plot notebook 01's audit."""
    curves, source = read("01_reward_modeling")
    runs = {"before the fix": "audit before the fix", "after the fix": "audit after it"}
    tables = {label: curves[name].set_index("probe") for label, name in runs.items()}
    return on_card(plots.audit_bars(tables, PASS), 380, small_print=source, legend="above")


@figure(
    "Over-optimization",
    "Proxy and gold reward over KL along runs with different KL penalties. Without a penalty the"
    " proxy rises to the end, and gold first rises a little, then falls below its start; with a"
    " penalty the run stays near the reference.",
)
def overoptimisation() -> Figure:
    """Plot notebook 06's runs with a reward model trained on few pairs."""
    curves, source = read("06_reward_hacking")
    runs = {name: curve for name, curve in curves.items() if name.startswith("β = ")}
    drawing, axes = plots.panels(1, 2, figsize=(9.5, 3.4), sharex=True)
    for axis, (column, title) in zip(axes, {"score": "proxy", "gold": "gold"}.items(), strict=True):
        for (label, curve), color, style in zip(
            runs.items(), plots.RUN_COLORS, ("o-", "s--", "^-."), strict=False
        ):  # color alone is not enough
            axis.plot(curve["KL"], curve[column], style, color=color, lw=2, label=label)
        axis.set(title=title, xlabel="KL to the reference, nats per answer")
    axes[0].set_ylabel("mean over held-out questions")
    axes[1].legend()
    return on_card(drawing, 368, small_print=source)


@figure(
    "After PPO: five methods and best-of-n on film reviews",
    "Mean score of held-out responses over KL to the reference, one point per method and seed;"
    " best-of-n, which trains nothing, has a fixed KL.",
)
def after_ppo() -> Figure:
    """Plot notebook 07's comparison on real text, with every seed."""
    curves, source = read("07_after_ppo")
    drawing, axis = plt.subplots()
    styles = dict(  # as in the notebook
        zip(
            ("best of 4", "PPO", "RLOO", "GRPO", "Dr. GRPO", "DPO"),
            zip(("reference", "policy", "value", "reward", "kl", "gold"), "*os^vD", strict=True),
            strict=True,
        )
    )
    rows = curves["text"]
    seeds = curves["text"]["seed"]
    for method, (color, marker) in styles.items():
        points = rows[rows["method"] == method]
        axis.scatter(
            points["KL"], points["score"], color=COLORS[color], marker=marker, s=55, label=method
        )
    start = curves["text"].query("method == 'reference'")["score"].mean()
    axis.axhline(start, color="0.6", ls="--", lw=1, label="reference")
    axis.set(xlabel="KL to the reference, nats per response", ylabel="score (POSITIVE logit)")
    axis.legend(ncols=2)
    return on_card(
        drawing,
        430,
        small_print=f"{source.rpartition(',')[0]}, seeds {seeds.min():g} to {seeds.max():g}",
    )
