"""Figures of how things are wired; nothing in them is measured."""

from kit import COLOURS, QUIET, Box, arrow, canvas, data, figure, model, panel, step, words
from matplotlib.figure import Figure

from rlhf_course.course.presets import load_preset

LEGEND = (
    "rounded: a model, solid outline = trained here, dashed = frozen",
    "square: data",
    "grey pill: a computation",
)


SMALL = {"size": 8.5, "color": QUIET, "ha": "right"}


def _legend(axis, x: float, y: float) -> None:
    words(axis, x, y, "  ·  ".join(LEGEND), **SMALL)


@figure(
    "RLHF in three stages",
    "Supervised fine-tuning makes an answering model, which policy and reference start from; preference pairs "
    "make a reward model; PPO trains the policy on score minus KL penalty, "
    "while reference and reward model stay frozen.",
)
def rlhf_stages() -> Figure:
    """RLHF in three stages."""
    drawing, axis = canvas(455)
    panel(axis, 20, 20, 262, 325, "1  SFT", "learn the form of an answer")
    panel(axis, 297, 20, 262, 325, "2  Reward model", "learn what people prefer")
    panel(axis, 574, 20, 406, 325, "3  PPO", "score higher, and stay near the reference")

    for x, role, rows, name, below, loss in (
        (151, "policy", "questions and answers", "language model", "pretrained before", "−log p(answer | question)"),
        (428, "reward", "chosen ≻ rejected", "reward model", "+ score head", "−log σ(chosen − rejected)"),
    ):
        source = data(axis, Box(x, 98, 190, 40), rows)
        learner = model(axis, Box(x, 190, 170, 58), name, role, below)
        loss = step(axis, Box(x, 296, 210, 46), "loss", loss)
        arrow(axis, source.bottom, learner.top)
        arrow(axis, (x - 20, 219), (x - 20, 273))
        arrow(axis, (x + 20, 273), (x + 20, 219), colour=COLOURS[role], lw=2.2)
        words(axis, x + 30, 247, "gradient", size=9, color=COLOURS[role], ha="left")

    queries = data(axis, Box(632, 104, 86, 40), "queries")
    policy = model(axis, Box(774, 104, 132, 58), "policy", "policy", "+ value head")
    responses = data(axis, Box(918, 104, 96, 40), "responses")
    reference = model(axis, Box(824, 200, 132, 54), "reference", "reference", "the SFT model", frozen=True)
    judge = model(axis, Box(824, 296, 132, 54), "reward model", "reward", "from stage 2", frozen=True)
    update = step(axis, Box(650, 248, 122, 56), "PPO step", "score − β·KL")
    arrow(axis, queries.right, policy.left)
    arrow(axis, policy.right, responses.left)
    for frozen, at, word, word_y in ((reference, 238, "KL", 190), (judge, 258, "score", 306)):
        arrow(axis, responses.bottom, (responses.x, frozen.y), frozen.right)
        arrow(axis, frozen.left, (732, frozen.y), (732, at), (711, at))
        words(axis, 748, word_y, word, size=9, color=QUIET, ha="right")
    arrow(axis, update.top, (update.x, 162), (policy.x, 162), policy.bottom, colour=COLOURS["policy"], lw=2.2)
    words(axis, 660, 151, "gradient", size=9, color=COLOURS["policy"], ha="left")

    arrow(axis, (428, 345), (428, 376), (680, 376), (680, 345), lw=2)
    words(axis, 440, 362, "gives the scores", size=9.5, ha="left")
    arrow(axis, (151, 345), (151, 408), (840, 408), (840, 345), lw=2)
    words(axis, 163, 394, "policy and reference start as the SFT model", size=9.5, ha="left")
    _legend(axis, 980, 434)
    return drawing


@figure(
    "One PPO step as data flow",
    "Queries are answered by the policy and scored as texts; policy and reference give log-probabilities, the "
    "value head values, all (B, R); KL and score become rewards, GAE makes advantages and returns of them, "
    "mini-batches of clipped losses update the policy, and the statistics move β.",
)
def ppo_step() -> Figure:
    """One PPO step as data flow, with shapes."""
    drawing, axis = canvas(810)
    panel(axis, 20, 20, 500, 140, "1  Sample", "trainer.generate")
    panel(axis, 532, 20, 448, 140, "2  Score", "your reward function")
    panel(axis, 20, 176, 960, 228, "3  Log-probabilities and values", "trainer.step, without gradient", indent=190)
    panel(axis, 20, 416, 960, 162, "4  Rewards and advantages")
    panel(axis, 20, 590, 680, 156, "5  Update", "ppo_epochs × mini-batches of all that is above", indent=190)
    panel(axis, 712, 590, 268, 156, "6  Stats and β")

    queries = data(axis, Box(90, 110, 100, 46), "queries", "(B, Q)")
    sampler = model(axis, Box(255, 110, 130, 52), "policy", "policy", "samples")
    responses = data(axis, Box(425, 110, 120, 46), "responses", "(B, R)")
    texts = data(axis, Box(605, 110, 110, 46), "texts", "B strings")
    judge = model(axis, Box(758, 110, 132, 52), "reward model", "reward", frozen=True)
    scores = data(axis, Box(903, 110, 90, 46), "scores", "(B,)", "reward")
    for a, b in ((queries, sampler), (sampler, responses), (responses, texts), (texts, judge), (judge, scores)):
        arrow(axis, a.right, b.left)
    words(axis, 517, 97, "decode", size=9, color=QUIET)

    ids = data(axis, Box(105, 305, 130, 62), "query, response", "(B, T)\nT = Q + R")
    arrow(axis, (80, 133), (80, 274))
    arrow(axis, responses.bottom, (responses.x, 168), (130, 168), (130, 274))
    reference = model(axis, Box(275, 249, 130, 44), "reference", "reference", frozen=True)
    policy = model(axis, Box(275, 305, 130, 44), "policy", "policy")
    head = model(axis, Box(275, 364, 130, 40), "value head", "value")
    arrow(axis, ids.right, policy.left)
    arrow(axis, ids.right, (190, 305), (190, 249), reference.left)
    arrow(axis, policy.bottom, head.top)
    found = {}
    for network, name, role, x in ((reference, "ref_logprobs", "reference", 897), (policy, "logprobs", "policy", 830)):
        logits = data(axis, Box(455, network.y, 110, 44), "logits", "(B, R, V)")
        pick = step(axis, Box(640, network.y, 176, 42), "log softmax", "at the sampled token")
        found[name] = data(axis, Box(x, network.y, 116, 44), name, "(B, R)", role)
        for a, b in ((network, logits), (logits, pick), (pick, found[name])):
            arrow(axis, a.right, b.left)
    values = data(axis, Box(455, 364, 110, 44), "values", "(B, R)", "value")
    arrow(axis, head.right, values.left)

    kl = step(axis, Box(887, 478, 136, 46), "KL per token", "lp − ref_lp")
    reward = step(axis, Box(706, 478, 188, 46), "reward per token", "−β·KL, + score at the end")
    rewards = data(axis, Box(555, 478, 74, 46), "rewards", "(B, R)", "reward")
    gae = step(axis, Box(455, 478, 80, 46), "GAE", "γ, λ")
    advantages = data(axis, Box(342, 478, 106, 46), "advantages", "(B, R)")
    returns = data(axis, Box(342, 540, 106, 46), "returns", "(B, R)", "value")
    whiten = step(axis, Box(216, 478, 106, 46), "whiten", "mean 0, var 1")
    white = data(axis, Box(92, 478, 106, 46), "advantages", "(B, R)")
    arrow(axis, (855, 327), (855, 455))
    arrow(axis, (928, 271), (928, 455))
    arrow(axis, scores.right, (967, 110), (967, 528), (740, 528), (740, 501))
    for a, b in ((kl, reward), (reward, rewards), (rewards, gae), (gae, advantages), (advantages, whiten)):
        arrow(axis, a.left, b.right)
    arrow(axis, whiten.left, white.right)
    arrow(axis, values.bottom, gae.top)
    arrow(axis, gae.bottom, (gae.x, 540), returns.right)

    batch = step(axis, Box(105, 668, 132, 46), "mini-batch", "b rows, shuffled")
    arrow(axis, (70, 501), (70, 645))
    arrow(axis, returns.left, (130, 540), (130, 645))
    learner = model(axis, Box(275, 668, 130, 52), "policy", "policy", "and value head")
    new = data(axis, Box(430, 668, 120, 46), "lp, values", "(b, R)")
    loss = step(axis, Box(602, 668, 172, 46), "clipped losses", "policy + vf_coef · value")
    stats = data(axis, Box(772, 668, 84, 46), "stats", "40 keys")
    control = step(axis, Box(900, 668, 126, 46), "KL controller", "towards target")
    for a, b in ((batch, learner), (learner, new), (new, loss), (loss, stats), (stats, control)):
        arrow(axis, a.right, b.left)
    arrow(axis, loss.bottom, (602, 724), (275, 724), learner.bottom, colour=COLOURS["policy"], lw=2.2)
    words(axis, 440, 712, "gradient, Adam", size=9, color=COLOURS["policy"])
    arrow(axis, (920, 645), (920, 556), (674, 556), (674, 501), colour=COLOURS["kl"], dashed=True)
    words(axis, 900, 568, "β of the next step", size=9, color=QUIET, ha="right")

    letters = "B samples  ·  Q query, R response, T all tokens  ·  V vocabulary  ·  lp log-probability"
    words(axis, 980, 766, letters, **SMALL)
    _legend(axis, 980, 788)
    return drawing


@figure(
    "GPT-2 learns to write positive film reviews",
    "GPT-2 continues the first tokens of a film review; a frozen DistilBERT gives the text its score, a "
    "frozen copy of GPT-2 the KL, and a PPO step updates the policy with both.",
)
def gpt2_imdb() -> Figure:
    """GPT-2 on IMDB: who is in the room, and what goes between them."""
    settings = load_preset("04_gpt2_imdb_ppo", "full")
    query = f"{settings.query_min} … {settings.query_max - 1} tokens"
    response = f"+ {settings.response_min} … {settings.response_max - 1} tokens"

    drawing, axis = canvas(375)
    review = data(axis, Box(86, 160, 120, 52), "film review")
    begin = data(axis, Box(244, 160, 120, 52), "query", query)
    policy = model(axis, Box(412, 160, 136, 60), "GPT-2", "policy", "policy, value head")
    text = data(axis, Box(588, 160, 146, 52), "query + response", response)
    judge = model(axis, Box(738, 70, 160, 60), "DistilBERT", "reward", "sentiment classifier", frozen=True)
    reference = model(axis, Box(738, 250, 160, 60), "GPT-2", "reference", "reference, a copy", frozen=True)
    score = data(axis, Box(906, 70, 104, 52), "score", "logit", "reward")
    kl = data(axis, Box(906, 250, 104, 52), "KL", "nats", "kl")
    update = step(axis, Box(906, 160, 104, 52), "PPO step", "score − β·KL")
    for a, b in ((review, begin), (begin, policy), (policy, text), (judge, score), (reference, kl)):
        arrow(axis, a.right, b.left)
    arrow(axis, text.top, (text.x, judge.y), judge.left)
    arrow(axis, text.bottom, (text.x, reference.y), reference.left)
    arrow(axis, score.bottom, update.top)
    arrow(axis, kl.top, update.bottom)
    arrow(axis, update.right, (976, 160), (976, 306), (412, 306), policy.bottom, colour=COLOURS["policy"], lw=2.2)
    words(axis, 426, 293, "gradient", size=9, color=COLOURS["policy"], ha="left")
    hub = ", ".join((settings.dataset, settings.model, settings.reward_model))
    words(axis, 980, 333, f"preset full: {hub}  ·  tiny: the same set-up, small, shipped with the course", **SMALL)
    _legend(axis, 980, 354)
    return drawing


@figure(
    "One base, three adapters",
    "On one frozen base lie three adapters: policy, the only one that is trained, for responses, log-"
    "probabilities and, with the value head, values; ref, a frozen copy of the SFT adapter, for the "
    "reference's log-probabilities; and reward, frozen, with its score head for scores.",
)
def adapters() -> Figure:
    """One base, three adapters, four heads: what is switched on for which number."""
    drawing, axis = canvas(480)
    for x, width, name, role, below in (
        (250, 380, "policy", "policy", "starts as a copy of the SFT adapter"),
        (572, 216, "ref", "reference", "a copy of the SFT adapter"),
        (820, 240, "reward", "reward", "from the reward model’s training"),
    ):
        model(axis, Box(x, 247, width, 62), f"{name} adapter", role, below, frozen=name != "policy")
    for x, name, role, frozen, result, shape, colour in (
        (152, "vocabulary head", "reference", True, "responses, logprobs", "(B, R)", "policy"),
        (348, "value head", "value", False, "values", "(B, R)", "value"),
        (572, "vocabulary head", "reference", True, "ref_logprobs", "(B, R)", "reference"),
        (820, "score head", "reward", True, "scores", "(B,)", "reward"),
    ):
        head = model(axis, Box(x, 150, 166, 48), name, role, "of the base" if role == "reference" else "", frozen)
        number = data(axis, Box(x, 60, 166, 52), result, shape, colour)
        arrow(axis, (x, 216), head.bottom)
        arrow(axis, head.top, number.bottom)
    below = "one copy for all: Baichuan, as a Llama"
    base = model(axis, Box(500, 318, 920, 72), "base", "reference", below, frozen=True)
    ids = data(axis, Box(500, 412, 170, 46), "query, response", "(B, T)")
    arrow(axis, ids.top, base.bottom)
    words(axis, 980, 460, f"one adapter is switched on at a time  ·  {LEGEND[0]}  ·  {LEGEND[1]}", **SMALL)
    return drawing


@figure(
    "What each method drops of PPO",
    "While it trains, PPO samples, asks a reward model, keeps a critic, and clips a ratio. Best-of-n trains nothing; "
    "DPO drops all four and learns from pairs; RLOO drops critic and ratio; GRPO drops the critic alone; Dr. GRPO "
    "drops GRPO's divisions by deviation and length, too.",
)
def family() -> Figure:
    """The family tree of notebook 07."""
    drawing, axis = canvas(480)
    parts = "samples", "reward model", "critic", "ratio and clip"
    trunk, heads = 152, {}
    model(axis, Box(500, 48, 150, 48), "PPO", "policy")
    words(axis, 95, 108, "used while\ntraining:", size=9, color=QUIET)
    for i, part in enumerate(parts):
        step(axis, Box(500 + 170 * (i - 1.5), 108, 150, 30), part)
    columns = (
        ("best-of-n", "no training", "n answers are scored,\nthe best one is kept", ()),
        ("DPO", "2023", "pairs, made once;\nthe policy is its own\nreward model", ()),
        ("RLOO", "2024", "baseline: the mean of\nthe prompt's others", parts[:2]),
        (
            "GRPO",
            "2024",
            "baseline: the group's mean;\ndivides by its deviation\nand by the length",
            (*parts[:2], parts[3]),
        ),
        ("Dr. GRPO", "2025", "as GRPO, without\nthe two divisions", (*parts[:2], parts[3])),
    )
    for i, (name, year, instead, kept) in enumerate(columns):
        x = 110 + 195 * i
        head = heads[name] = model(axis, Box(x, 205, 130, 48), name, "policy", year, frozen=name == "best-of-n")
        for row, part in enumerate(parts):
            if part in kept:
                step(axis, Box(x, 258 + 36 * row, 150, 28), part)
            else:
                words(axis, x, 258 + 36 * row, f"no {part}", size=9.5, color=QUIET)
        words(axis, x, 422, instead, size=9)
        if name != "Dr. GRPO":
            arrow(axis, (500, trunk - 20), (500, trunk), (x, trunk), head.top)
    arrow(axis, heads["GRPO"].right, heads["Dr. GRPO"].left)
    _legend(axis, 980, 464)
    return drawing
