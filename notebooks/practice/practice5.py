"""Check exercise 5, stop in time: score a stopping rule on over-optimizing runs.

The runs come from "Over-optimization without RL" in deeper/over_optimization: the best
policy for a reward model is known at every KL coefficient, so a run needs no training.
"""

import secrets

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

RUNS, STEPS, PAIRS = 240, 40, 200
MARK = 0.82  # share of the oracle's gain that a rule must reach
SEEN = ("proxy", "kl", "entropy", "repeats")
V, L = 4, 4  # tokens, length of a response
SEQUENCES = torch.cartesian_prod(*[torch.arange(V)] * L)  # (N, L), N = 256
REPEATS = (SEQUENCES[:, 1:] == SEQUENCES[:, :-1]).sum(1).double()


def features() -> tuple[Tensor, Tensor]:
    """Return each sequence's counts of tokens (N, V) and adjacent pairs (N, V²)."""
    one_hot = torch.nn.functional.one_hot(SEQUENCES, V).double()
    neighbors = torch.einsum("nta,ntb->nab", one_hot[:, :-1], one_hot[:, 1:])
    return one_hot.sum(1), neighbors.flatten(1)


def fit(x: Tensor, chosen: Tensor, rejected: Tensor, ridge: float = 0.1) -> Tensor:
    """Fit Bradley-Terry by Newton's method to pairs (M, n); return rewards (M, N)."""
    pairs = x[chosen] - x[rejected]
    weights = pairs.new_zeros(len(pairs), x.shape[1], 1)
    for _ in range(8):
        p = torch.sigmoid(pairs @ weights)
        slope = pairs.mT @ (1 - p) - ridge * weights
        diagonal = ridge * torch.eye(x.shape[1], dtype=x.dtype)
        curvature = pairs.mT @ (p * (1 - p) * pairs) + diagonal
        weights += torch.linalg.solve(curvature, slope)
    return (x @ weights).squeeze(2)


def draw(seed: int, runs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random reference log-probabilities, gold and proxy rewards, (M, N) each,
    and paces.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gold = (normal(runs, V) / 2)[:, SEQUENCES].sum(2) + 0.15 * normal(runs, V**L)
    gold -= 1.25 * REPEATS
    ref = torch.zeros(runs, 1, dtype=torch.float64)
    for t in range(L):
        step = normal(runs, V**t, V).log_softmax(-1)
        ref = (ref.unsqueeze(2) + step).flatten(1)
    pairs = torch.multinomial(ref.exp(), 2 * PAIRS, True, generator=generator)
    a, b = pairs.chunk(2, 1)
    wins = torch.sigmoid(gold.gather(1, a) - gold.gather(1, b))
    flip = torch.rand(wins.shape, generator=generator, dtype=wins.dtype) > wins
    chosen, rejected = torch.where(flip, b, a), torch.where(flip, a, b)
    by_token, by_neighbor = (fit(x, chosen, rejected) for x in features())
    is_blind = torch.rand(runs, 1, generator=generator) < 0.6
    pace = torch.rand(runs, 1, generator=generator, dtype=torch.float64)
    return ref, gold, torch.where(is_blind, by_token, by_neighbor), 0.2 * 25**pace


def make_runs(seed: int, runs: int = RUNS) -> dict[str, np.ndarray]:
    """Return statistic → values, (M, STEPS + 1) each; column 0 is the reference.

    Proxy and gold are gains over the reference, KL and entropy are in nats, repeats are
    equal neighbors per response. β falls from 16 to 0.02 at a different pace per run.
    """
    ref, gold, proxy, pace = draw(seed, runs)
    way = torch.linspace(0, 1, STEPS, dtype=torch.float64) ** pace
    betas = 10 ** (1.2 - 2.9 * way)  # (M, STEPS)
    tilt = torch.cat([torch.zeros(runs, 1), 1 / betas], 1).unsqueeze(2)
    log_p = (ref.unsqueeze(1) + proxy.unsqueeze(1) * tilt).log_softmax(2)
    p = log_p.exp()
    found = {
        "proxy": (p * proxy.unsqueeze(1)).sum(2),
        "gold": (p * gold.unsqueeze(1)).sum(2),
        "kl": (p * (log_p - ref.unsqueeze(1))).sum(2),
        "entropy": -(p * log_p).sum(2),
        "repeats": p @ REPEATS,
    }
    for name in ("proxy", "gold"):
        found[name] = found[name] - found[name][:, :1]
    return {name: x.numpy() for name, x in found.items()}


def show(seed: int = 0, runs: int = 4, gold: bool = False) -> plt.Figure:
    """Plot the statistics that rules see in a few runs and, optionally, gold."""
    found, names = make_runs(seed, runs), SEEN + ("gold",) * gold
    figure, axes = plt.subplots(
        1, len(names), figsize=(2.6 * len(names), 2.6), layout="constrained"
    )
    for axis, name in zip(axes, names):
        axis.plot(found[name].T)
        axis.set(title=name, xlabel="step")
    plt.close(figure)
    return figure


def stops(stop, found: dict[str, np.ndarray]) -> np.ndarray:
    """Return, per run, the step at which the rule stops it, or its last step."""
    steps = []
    for run in range(len(found["kl"])):
        rows = {name: found[name][run].tolist() for name in SEEN}
        for step in range(STEPS + 1):
            answer = stop({name: row[: step + 1] for name, row in rows.items()})
            if not isinstance(answer, bool | np.bool_):
                raise TypeError(f"stop must return True or False; got {answer!r}.")
            if answer:
                break
        steps.append(step)
    return np.array(steps)


def check(stop, seed: int | None = None) -> bool:
    """Print a rule's share of oracle gold on unseen runs; return whether it passes."""
    seed = secrets.randbelow(10**6) if seed is None else seed
    found, rows = make_runs(seed), np.arange(RUNS)
    try:
        steps = stops(stop, found)
    except NotImplementedError:
        print("✘ Not written yet: return True if the run should stop.")
        return False
    except Exception as error:
        print(f"✘ {type(error).__name__}: {error}")
        return False
    best = found["gold"].argmax(1)
    gold, most = found["gold"][rows, steps], found["gold"].max(1)
    share = gold.sum() / most.sum()
    passed = share >= MARK
    print(
        f"{'✔' if passed else '✘'} {share:.0%} of the oracle's gold; {MARK:.0%} passes"
    )
    early, late = (steps < best - 1).mean(), (steps > best + 1).mean()
    print(f"  stopped early in {early:.0%} of {RUNS} runs, late in {late:.0%}")
    print(f"  gold ended below its start in {(gold < 0).mean():.0%}")
    print(f"  `check(stop, seed={seed})` repeats these runs.")
    return bool(passed)
