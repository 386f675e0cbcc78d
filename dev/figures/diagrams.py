"""Draw diagrams of models and data flow, without measurements."""

from matplotlib.figure import Figure

from dev.figures.kit import (
    COLORS,
    QUIET,
    Box,
    arrow,
    canvas,
    data,
    figure,
    model,
    panel,
    step,
    words,
)
from rlhf_course.course.presets import load_preset

LEGEND = (
    "rounded: a model, dashed where frozen",
    "square: data",
    "gray pill: a computation",
)


SMALL = {"color": QUIET, "ha": "right"}


def _legend(axis, x: float, y: float) -> None:
    words(axis, x, y, "  ·  ".join(LEGEND), **SMALL)


@figure(
    "RLHF in three stages",
    "Supervised fine-tuning makes an answering model, from which policy and reference start;"
    " preference pairs train a reward model; PPO trains the policy on score minus KL penalty, while"
    " reference and reward model stay frozen.",
)
def rlhf_stages() -> Figure:
    """Draw RLHF in three stages."""
    drawing, axis = canvas(438)
    panel(axis, 20, 20, 262, 314, "1  SFT", "learn the form of an answer")
    panel(axis, 297, 20, 262, 314, "2  Reward model", "learn what people prefer")
    panel(axis, 574, 20, 406, 314, "3  PPO", "score higher, and stay near the reference")

    for x, role, rows, name, below, loss in (
        (
            151,
            "policy",
            "questions and answers",
            "language model",
            "pretrained before",
            "−log p(answer | question)",
        ),
        (
            428,
            "reward",
            "chosen ≻ rejected",
            "reward model",
            "+ score head",
            "−log σ(chosen − rejected)",
        ),
    ):
        source = data(axis, Box(x, 100, 206, 36), rows)
        learner = model(axis, Box(x, 184, 180, 58), name, role, below)
        loss = step(axis, Box(x, 292, 238, 54), "loss", loss)
        arrow(axis, source.bottom, learner.top)
        arrow(axis, (x - 20, 213), (x - 20, 265))
        arrow(axis, (x + 20, 265), (x + 20, 213), color=COLORS[role], lw=2.2)
        words(axis, x + 30, 239, "gradient", color=COLORS[role], ha="left")

    queries = data(axis, Box(630, 106, 86, 36), "queries")
    policy = model(axis, Box(772, 106, 140, 58), "policy", "policy", "+ value head")
    responses = data(axis, Box(919, 106, 104, 36), "responses")
    reference = model(
        axis, Box(832, 201, 152, 58), "reference", "reference", "the SFT model", frozen=True
    )
    judge = model(
        axis, Box(832, 292, 152, 58), "reward model", "reward", "from stage 2", frozen=True
    )
    update = step(axis, Box(652, 247, 128, 56), "PPO step", "score − β·KL")
    arrow(axis, queries.right, policy.left)
    arrow(axis, policy.right, responses.left)
    for frozen, at, word, word_y in ((reference, 237, "KL", 190), (judge, 257, "score", 304)):
        arrow(axis, (940, responses.bottom[1]), (940, frozen.y), frozen.right)
        arrow(axis, frozen.left, (738, frozen.y), (738, at), (717, at))
        words(axis, 752, word_y, word, color=QUIET, ha="right")
    arrow(
        axis,
        update.top,
        (update.x, 163),
        (policy.x, 163),
        policy.bottom,
        color=COLORS["policy"],
        lw=2.2,
    )
    words(axis, 662, 151, "gradient", color=COLORS["policy"], ha="left")

    arrow(axis, (428, 334), (428, 363), (680, 363), (680, 334), lw=2)
    words(axis, 440, 350, "gives the scores", ha="left")
    arrow(axis, (151, 334), (151, 394), (840, 394), (840, 334), lw=2)
    words(axis, 163, 381, "policy and reference start as the SFT model", ha="left")
    _legend(axis, 980, 417)
    return drawing


@figure(
    "One PPO step as data flow",
    "The policy answers queries, and the reward model scores the texts; policy and reference give"
    " log-probabilities, the value head gives values, all (B, R); KL and score become rewards, GAE"
    " computes advantages and returns from them, mini-batches of clipped losses update the policy,"
    " and the statistics move β.",
)
def ppo_step() -> Figure:
    """Draw one PPO step as data flow, with shapes."""
    drawing, axis = canvas(872)
    panel(axis, 20, 20, 500, 150, "1  Sample", "trainer.generate")
    panel(axis, 532, 20, 448, 150, "2  Score", "your reward function")
    panel(
        axis,
        20,
        182,
        960,
        248,
        "3  Log-probabilities and values",
        "trainer.step, without gradient",
        indent=190,
    )
    panel(axis, 20, 444, 960, 180, "4  Rewards and advantages")
    panel(
        axis,
        20,
        638,
        680,
        168,
        "5  Update",
        "ppo_epochs × mini-batches of the tensors above",
        indent=190,
    )
    panel(axis, 712, 638, 268, 168, "6  Stats and β")

    queries = data(axis, Box(90, 117, 100, 54), "queries", "(B, Q)")
    sampler = model(axis, Box(255, 117, 130, 58), "policy", "policy", "samples")
    responses = data(axis, Box(425, 117, 120, 54), "responses", "(B, R)")
    texts = data(axis, Box(611, 117, 110, 54), "texts", "B strings")
    judge = model(axis, Box(762, 117, 148, 58), "reward model", "reward", frozen=True)
    scores = data(axis, Box(903, 117, 90, 54), "scores", "(B,)", "reward")
    for a, b in (
        (queries, sampler),
        (sampler, responses),
        (responses, texts),
        (texts, judge),
        (judge, scores),
    ):
        arrow(axis, a.right, b.left)
    words(axis, 520, 103, "decode", color=QUIET)

    data(axis, Box(105, 320, 154, 80), "query, response", "(B, T)\nT = Q + R")
    arrow(axis, (80, 144), (80, 280))
    arrow(axis, responses.bottom, (responses.x, 175), (130, 175), (130, 280))
    reference = model(axis, Box(275, 270, 130, 44), "reference", "reference", frozen=True)
    policy = model(axis, Box(275, 330, 130, 44), "policy", "policy")
    head = model(axis, Box(275, 394, 130, 44), "value head", "value")
    arrow(axis, (182, 330), policy.left)
    arrow(axis, (182, 330), (195, 330), (195, 270), reference.left)
    arrow(axis, policy.bottom, head.top)
    logprobs = {}
    for network, name, role, x in (
        (reference, "ref_logprobs", "reference", 895),
        (policy, "logprobs", "policy", 824),
    ):
        logits = data(axis, Box(450, network.y, 116, 52), "logits", "(B, R, V)")
        pick = step(axis, Box(634, network.y, 192, 50), "log softmax", "at the sampled token")
        logprobs[name] = data(axis, Box(x, network.y, 116, 52), name, "(B, R)", role)
        for a, b in ((network, logits), (logits, pick), (pick, logprobs[name])):
            arrow(axis, a.right, b.left)
    values = data(axis, Box(450, 394, 116, 52), "values", "(B, R)", "value")
    arrow(axis, head.right, values.left)

    kl = step(axis, Box(887, 516, 138, 54), "KL per token", "lp − ref_lp")
    reward = step(axis, Box(706, 516, 182, 74), "reward per token", "−β·KL,\n+ score at the end")
    rewards = data(axis, Box(552, 516, 84, 54), "rewards", "(B, R)", "reward")
    gae = step(axis, Box(450, 516, 76, 54), "GAE", "γ, λ")
    advantages = data(axis, Box(332, 516, 116, 54), "advantages", "(B, R)")
    returns = data(axis, Box(332, 584, 116, 54), "returns", "(B, R)", "value")
    whiten = step(axis, Box(207, 516, 96, 74), "whiten", "mean 0,\nvar 1")
    white = data(axis, Box(84, 516, 116, 54), "advantages", "(B, R)")
    arrow(axis, (855, 356), (855, 489))
    arrow(axis, (925, 296), (925, 489))
    arrow(axis, scores.right, (967, 117), (967, 573), (740, 573), (740, 553))
    for a, b in (
        (kl, reward),
        (reward, rewards),
        (rewards, gae),
        (gae, advantages),
        (advantages, whiten),
    ):
        arrow(axis, a.left, b.right)
    arrow(axis, whiten.left, white.right)
    arrow(axis, values.bottom, (values.x, 489))
    arrow(axis, gae.bottom, (gae.x, 584), returns.right)

    batch = step(axis, Box(105, 724, 152, 54), "mini-batch", "b rows, shuffled")
    arrow(axis, (70, 543), (70, 697))
    arrow(axis, returns.left, (130, 584), (130, 697))
    learner = model(axis, Box(278, 724, 144, 58), "policy", "policy", "and value head")
    new = data(axis, Box(438, 724, 110, 54), "lp, values", "(b, R)")
    loss = step(axis, Box(604, 724, 172, 54), "clipped losses", "policy and value")
    stats = data(axis, Box(764, 724, 84, 54), "stats", "41 keys")
    control = step(axis, Box(899, 724, 146, 54), "KL controller", "toward target")
    for a, b in ((batch, learner), (learner, new), (new, loss), (loss, stats), (stats, control)):
        arrow(axis, a.right, b.left)
    arrow(axis, loss.bottom, (604, 787), (278, 787), learner.bottom, color=COLORS["policy"], lw=2.2)
    words(axis, 440, 774, "gradient, Adam", color=COLORS["policy"])
    arrow(axis, (920, 697), (920, 595), (674, 595), (674, 553), color=COLORS["kl"], dashed=True)
    words(axis, 904, 610, "β of the next step", color=QUIET, ha="right")

    letters = (
        "B samples  ·  Q query, R response, T all tokens  ·  V vocabulary  ·  lp log-probability"
    )
    words(axis, 980, 826, letters, **SMALL)
    _legend(axis, 980, 850)
    return drawing


@figure(
    "GPT-2 learns to write positive film reviews",
    "GPT-2 continues the first tokens of a film review; a frozen DistilBERT gives the score of the"
    " text, a frozen copy of GPT-2 gives the KL, and a PPO step updates the policy with both.",
)
def gpt2_imdb() -> Figure:
    """Draw GPT-2 on IMDB: the models, and the data that they exchange."""
    settings = load_preset("04_gpt2_imdb_ppo", "full")
    query = f"{settings.query_min} … {settings.query_max - 1} tokens"
    response = f"+ {settings.response_min} … {settings.response_max - 1} tokens"

    drawing, axis = canvas(390)
    review = data(axis, Box(76, 160, 108, 56), "film review")
    begin = data(axis, Box(222, 160, 138, 56), "query", query)
    policy = model(axis, Box(397, 160, 170, 62), "GPT-2", "policy", "policy, value head")
    text = data(axis, Box(588, 160, 168, 56), "query + response", response)
    judge = model(
        axis, Box(744, 70, 180, 62), "DistilBERT", "reward", "sentiment classifier", frozen=True
    )
    reference = model(
        axis, Box(744, 250, 180, 62), "GPT-2", "reference", "reference, a copy", frozen=True
    )
    score = data(axis, Box(914, 70, 90, 56), "score", "logit", "reward")
    kl = data(axis, Box(914, 250, 90, 56), "KL", "nats", "kl")
    update = step(axis, Box(906, 160, 132, 56), "PPO step", "score − β·KL")
    for a, b in ((review, begin), (begin, policy), (policy, text), (judge, score), (reference, kl)):
        arrow(axis, a.right, b.left)
    arrow(axis, text.top, (text.x, judge.y), judge.left)
    arrow(axis, text.bottom, (text.x, reference.y), reference.left)
    arrow(axis, score.bottom, (score.x, 132))
    arrow(axis, kl.top, (kl.x, 188))
    arrow(
        axis,
        update.right,
        (982, 160),
        (982, 310),
        (397, 310),
        policy.bottom,
        color=COLORS["policy"],
        lw=2.2,
    )
    words(axis, 411, 296, "gradient", color=COLORS["policy"], ha="left")
    hub = ", ".join((settings.dataset, settings.model, settings.reward_model))
    words(axis, 980, 341, f"preset full: {hub}  ·  tiny: small models, part of the course", **SMALL)
    _legend(axis, 980, 367)
    return drawing


@figure(
    "One base, three adapters",
    "One frozen base has three adapters: policy, the only trained one, for responses,"
    " log-probabilities and, with the value head, values; ref, a frozen copy of the SFT adapter,"
    " for the reference's log-probabilities; and reward, frozen, with its score head for scores.",
)
def adapters() -> Figure:
    """Draw one base, three adapters and four heads; show the adapter and head for each result."""
    drawing, axis = canvas(342)
    for x, width, name, role, below in (
        (240, 400, "policy", "policy", "starts as a copy of the SFT adapter"),
        (566, 228, "ref", "reference", "a copy of the SFT adapter"),
        (828, 272, "reward", "reward", "from reward training"),
    ):
        model(axis, Box(x, 186, width, 52), f"{name} adapter", role, below, frozen=name != "policy")
    for x, name, role, frozen, result, shape, color in (
        (138, "vocabulary head", "reference", True, "responses, logprobs", "(B, R)", "policy"),
        (342, "value head", "value", False, "values", "(B, R)", "value"),
        (566, "vocabulary head", "reference", True, "ref_logprobs", "(B, R)", "reference"),
        (828, "score head", "reward", True, "scores", "(B,)", "reward"),
    ):
        head = model(
            axis,
            Box(x, 112, 184, 50),
            name,
            role,
            "of the base" if role == "reference" else "",
            frozen,
        )
        number = data(axis, Box(x, 40, 184, 50), result, shape, color)
        arrow(axis, (x, 160), head.bottom)
        arrow(axis, head.top, number.bottom)
    base = model(
        axis,
        Box(500, 234, 920, 36),
        "base: one copy for all, Baichuan as a Llama",
        "reference",
        frozen=True,
    )
    ids = data(axis, Box(500, 290, 240, 34), "query, response: (B, T)")
    arrow(axis, ids.top, base.bottom)
    words(
        axis,
        980,
        324,
        f"one adapter is switched on at a time  ·  {LEGEND[0]}  ·  {LEGEND[1]}",
        **SMALL,
    )
    return drawing


@figure(
    "The parts of PPO that each method drops",
    "While it trains, PPO samples, calls a reward model, keeps a critic, and clips a ratio."
    " Best-of-n trains nothing; DPO drops all four parts and learns from pairs; RLOO and GRPO drop"
    " only the critic, and RLOO's clip has no effect at one update per batch; Dr. GRPO also drops"
    " GRPO's divisions by deviation and length.",
)
def family() -> Figure:
    """Draw the family tree of notebook 07."""
    drawing, axis = canvas(466)
    used = ("samples", "reward model", "critic", "ratio and clip")
    no_critic = ("samples", "reward model", "ratio and clip")
    trunk = 152
    heads = {}
    model(axis, Box(500, 48, 150, 48), "PPO", "policy")
    words(axis, 95, 108, "used while\ntraining:", color=QUIET)
    for i, part in enumerate(used):
        step(axis, Box(500 + 170 * (i - 1.5), 108, 150, 30), part)
    columns = (
        ("best-of-n", "no training", "n answers are scored,\nthe best one is kept", ()),
        ("DPO", "2023", "pairs, made once;\nthe policy is its own\nreward model", ()),
        (
            "RLOO",
            "2024",
            "baseline: mean of\nother responses;\none update: no clipping",
            no_critic,
        ),
        (
            "GRPO",
            "2024",
            "baseline: group's mean;\ndivides by deviation\nand by length",
            no_critic,
        ),
        ("Dr. GRPO", "2025", "as GRPO, without\nthe two divisions", no_critic),
    )
    for i, (name, year, instead, kept) in enumerate(columns):
        x = 110 + 195 * i
        head = heads[name] = model(
            axis, Box(x, 205, 130, 48), name, "policy", year, frozen=name == "best-of-n"
        )
        for row, part in enumerate(used):
            if part in kept:
                step(axis, Box(x, 258 + 36 * row, 150, 28), part)
            else:
                words(axis, x, 258 + 36 * row, f"no {part}", color=QUIET)
        words(axis, x, 424, instead)
        if name != "Dr. GRPO":
            arrow(axis, (500, trunk - 20), (500, trunk), (x, trunk), head.top)
    arrow(axis, heads["GRPO"].right, heads["Dr. GRPO"].left)
    return drawing
