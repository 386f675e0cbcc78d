"""Check exercise 2, debug: find the wrong line in a copy of scripts/ppo_minimal.py."""

import functools
import numbers
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch

from planted_lines import clean_source, planted, source
from tiny_world import EOS, draw_queries, make_policy

SIZES = ("batch_size", "mini_batch_size", "ppo_epochs")
TRIALS = [(16, 16, 2, 0.3), (16, 8, 3, 0.05), (8, 4, 2, 1.0)]  # sizes, and β
DEFAULTS = {"gamma": 1.0, "lam": 0.95, "cliprange": 0.2, "cliprange_value": 0.2}
DEFAULTS |= {
    "vf_coef": 0.1,
    "max_grad_norm": float("inf"),
    "target": 6.0,
    "horizon": 10_000,
}


def draw(n: int, seed: int) -> tuple[list, list, torch.Tensor]:
    """Return n queries, responses of 1 to 9 tokens, and scores (n,)."""
    dice = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (n,), generator=dice).tolist()
    responses = [torch.randint(EOS, (size,), generator=dice) for size in lengths]
    return draw_queries(dice, n), responses, torch.randn(n, generator=dice)


def run_step(text: str, trial: int = 0) -> dict[str, float]:
    """Run one step of this source on the batch of trial 0, 1 or 2; return its numbers.

    The numbers are the norms of the batch's columns, the statistics of the step, how
    far the weights moved, and the next β.

    """
    *sizes, kl_coef = TRIALS[trial]
    settings = SimpleNamespace(**DEFAULTS | dict(zip(SIZES, sizes)))
    code: dict = {}
    exec(compile(text, "<algorithm>", "exec"), code)
    policy, reference = make_policy(0), make_policy(1)
    model, ref_model = (
        code["ActorCritic"](x.pretrained_model) for x in (policy, reference)
    )
    model.value.load_state_dict(policy.v_head.summary.state_dict())
    queries, responses, scores = draw(settings.batch_size, trial)
    samples = code["collate"](queries, responses, "cpu")
    experience = code["make_experience"](
        model, ref_model, samples, scores, kl_coef, settings
    )
    names = ("old_logprobs", "old_values", "kl", "returns", "advantages")
    results = {
        f"norm of {name}": getattr(experience, name).norm().item() for name in names
    }
    start = _weights(model)
    np.random.seed(trial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    results |= code["ppo_step"](
        model, ref_model, optimizer, samples, scores, kl_coef, settings
    )
    results["weights moved"] = (_weights(model) - start).norm().item()
    results["next_kl_coef"] = code["next_kl_coef"](kl_coef, results["kl"], settings)
    return results


def _weights(model) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@functools.lru_cache(maxsize=12)
def _clean(seed: int, trial: int) -> dict[str, float]:
    return run_step(clean_source(seed), trial)


def compare(text: str, seed: int = 0) -> pd.DataFrame:
    """Return the clean and the actual numbers of three trials.

    ✘ marks a relative difference above 1e-5.
    """
    tables = []
    for trial in range(len(TRIALS)):
        numbers = {"clean": _clean(seed, trial), "yours": run_step(text, trial)}
        table = pd.DataFrame(numbers).rename_axis("number")
        close = np.isclose(table["clean"], table["yours"], rtol=1e-5, atol=1e-6)
        tables.append(table.assign(differs=np.where(close, "", "✘")))
    return pd.concat(dict(enumerate(tables)), axis=1, names=["trial", ""])


def verdict(answer: dict, seed: int = 0) -> str | None:
    """Return what is wrong with an answer, or None."""
    lines = source(seed).splitlines()
    line = answer.get("line") if isinstance(answer, dict) else None
    if not isinstance(line, numbers.Integral) or not 1 <= line <= len(lines):
        return f"answer['line'] is {line!r}; it must be one number, 1 to {len(lines)}."
    fixed = answer.get("fixed")
    if fixed is None:
        return None if line == planted(seed) else f"line {line} equals the clean line."
    if not isinstance(fixed, str) or "\n" in fixed.strip():
        return "answer['fixed'] must be the text of one line."
    old = lines[line - 1]
    if fixed.split() == old.split():
        return f"answer['fixed'] is line {line} without a change."
    lines[line - 1] = old[: len(old) - len(old.lstrip())] + fixed.strip()
    try:
        table = compare("\n".join(lines) + "\n", seed)
    except Exception as error:
        return f"with your line, the step stops with {type(error).__name__}: {error}"
    wrong = table.xs("differs", axis=1, level=1).ne("").any(axis=1)
    if wrong.any():
        names = ", ".join(table.index[wrong])
        return f"with your line, these numbers still differ: {names}."
    return None


def check(answer: dict, seed: int = 0) -> None:
    """Print the verdict."""
    problem = verdict(answer, seed)
    print(
        f"✘ {problem}"
        if problem
        else "✔ Right: this is the line, and your fix (if you gave one) works."
    )
