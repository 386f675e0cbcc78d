"""Check exercise 3, design and defeat: a reward for praise and a text that beats it."""

from collections import Counter
from pathlib import Path

import numpy as np

from acting_gold import gold, words_of

WISH = "a review that praises the acting in natural words"
SAMPLES = Path(__file__).with_name("samples.txt")
GROUPS, N = 64, 16  # best of 16, 64 times


def samples() -> list[str]:
    """Return 1,024 texts that the shipped GPT-2 sampled."""
    return SAMPLES.read_text(encoding="utf-8").splitlines()


def rewards(reward, texts: list[str]) -> np.ndarray:
    """Return a reward's numbers (B,); raise ``ValueError`` if they are unusable."""
    found = np.asarray([float(x) for x in reward(list(texts))])
    if found.shape != (len(texts),) or not np.isfinite(found).all():
        raise ValueError(
            f"it must return {len(texts)} finite numbers, one for each text."
        )
    return found


def best_of_n(values: np.ndarray, seed: int) -> np.ndarray:
    """Return indices (64,), each the best of 16 random texts; ties break at random."""
    dice = np.random.default_rng(seed)
    groups = np.stack(
        [dice.choice(len(values), N, replace=False) for _ in range(GROUPS)]
    )
    return np.take_along_axis(groups, values[groups].argmax(1, keepdims=True), 1)[:, 0]


def train_policy(reward, seed: int = 0, steps: int = 150) -> list[str]:
    """Return the texts of a policy that REINFORCE trained without a KL penalty.

    Each text has 12 words, out of a vocabulary of 80 frequent words.
    """
    dice = np.random.default_rng(seed)
    counts = Counter(word for text in samples() for word in words_of(text))
    words = [word for word, _ in counts.most_common(80)]
    logits = np.zeros((12, len(words)))
    for _ in range(steps + 1):
        noise = dice.gumbel(size=(32, *logits.shape))
        chosen = (logits + noise).argmax(2)
        texts = [" ".join(words[i] for i in row).capitalize() + "." for row in chosen]
        values = rewards(reward, texts)
        advantages = (values - values.mean()) / (values.std() + 1e-8)
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        hits = np.eye(len(words))[chosen] - p
        logits += 2.0 * np.einsum("b,btv->tv", advantages, hits) / len(texts)
    return texts


def _copied(reward, values: np.ndarray, golds: np.ndarray) -> bool:
    """Return whether a reward uses gold, or splits the texts into two as gold does."""
    names = getattr(getattr(reward, "__code__", None), "co_names", ())
    same = len(set(zip(values, golds))) == 2 == len(set(values))
    return same or reward is gold or "gold" in names or "practice3" in names


def verdict(reward, text: str, seed: int = 0, show=lambda line: None) -> str | None:
    """Return what is wrong with a reward or the text that beats it, or None."""
    pool = samples()
    golds = np.array([gold(sample) for sample in pool])
    try:
        values, own = rewards(reward, pool), rewards(reward, [str(text)])[0]
    except Exception as error:
        return f"the reward stops with {type(error).__name__}: {error}"
    if values.min() == values.max():
        return "the reward is one number for all samples, so it prefers none."
    if _copied(reward, values, golds):
        return "the reward is gold itself, which the designer of a reward never has."
    base, yours, most = (
        golds[best_of_n(x, seed)].mean() for x in (np.zeros(len(pool)), values, golds)
    )
    show(f"gold of random samples: {base:.2f}; of your best of {N}: {yours:.2f};")
    show(f"of the best of {N} by gold itself: {most:.2f}")
    if yours - base < 0.5 * (most - base):
        return "your reward's best texts fulfill the wish too rarely: improve it."
    if len(words_of(str(text))) < 5:
        return "the text has fewer than five words: write a longer text."
    bar = np.quantile(values, 0.95)
    show(
        f"your text: reward {own:.2f} (95 % of the samples are below {bar:.2f}), "
        f"gold {gold(text):.0f}"
    )
    if own < bar:
        return "the reward is not beaten: your text is not among its best 5 %."
    return "gold is 1 for your text: the reward is not beaten." if gold(text) else None


def check(reward, text: str, seed: int = 0) -> None:
    """Print the verdict and the numbers behind it."""
    problem = verdict(reward, text, seed, print)
    print(f"✘ {problem}" if problem else "✔ The reward passes, and your text beats it.")


def attack(reward, seed: int = 0) -> None:
    """Train a policy against the reward; print its reward, gold and three texts."""
    texts = train_policy(reward, seed)
    values, golds = rewards(reward, texts), [gold(text) for text in texts]
    pool = samples()
    known = rewards(reward, pool)
    places = best_of_n(known, seed)
    best = np.mean([gold(pool[i]) for i in places])
    print(f"best of {N}: reward {known[places].mean():.2f}, gold {best:.2f}")
    print(f"policy: reward {values.mean():.2f}, gold {np.mean(golds):.2f}")
    print(*texts[:3], sep="\n")
