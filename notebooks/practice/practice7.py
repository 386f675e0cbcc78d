"""Check exercise 7, assemble: compare a student's PPO step with the trainer's."""

import ast
import contextlib
import copy
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from ex03_ppo_step_by_step import SET
from torch import Tensor

from one_step import RATE, STATS, by_trainer, make_batch

NAMES = tuple(SET.exercises)
TOLERANCE = 1e-5
NOTEBOOK = Path(__file__).resolve().parents[1] / "exercises" / f"{SET.notebook}.ipynb"
RATIOS = 0.9, 0.3, 3.0  # KL / target in the three steps of a check


def my_functions(notebook: str | Path = NOTEBOOK) -> SimpleNamespace:
    """Return a notebook's seven functions; run only imports and definitions."""
    cells = json.loads(Path(notebook).expanduser().read_text(encoding="utf-8"))["cells"]
    names, kinds = {"torch": torch}, ast.Import | ast.ImportFrom | ast.FunctionDef
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        with contextlib.suppress(SyntaxError):  # a cell with a magic command
            body = ast.parse("".join(cell["source"])).body
            kept = ast.Module([x for x in body if isinstance(x, kinds)], [])
            exec(compile(kept, str(notebook), "exec"), names)
    return SimpleNamespace(**{name: names[name] for name in NAMES if name in names})


def run_network(network, b, attention_mask, positions) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and values of the response tokens, (B, R) each."""
    logits, _, values = network(
        b.ids, attention_mask=attention_mask, position_ids=positions
    )
    first = b.query_mask.shape[1] - 1  # predicts the first response token
    logprobs, tokens = logits[:, first:-1].log_softmax(-1), b.response_ids.unsqueeze(-1)
    return logprobs.gather(-1, tokens).squeeze(-1), values[:, first:-1]


def differs(step, functions: dict, given, trainer) -> str | None:
    """Return a step's first difference from the trainer's step as text, or None."""
    called, b = set(), copy.deepcopy(given)
    b.optimizer = torch.optim.SGD(b.network.parameters(), lr=RATE)

    def noting(name):
        return lambda *x, **named: called.add(name) or functions[name](*x, **named)

    try:
        found = step(b, SimpleNamespace(**{name: noting(name) for name in functions}))
        found = {name: float(value) for name, value in (found or {}).items()}
    except NotImplementedError:
        return "a function is not written yet"
    except Exception as error:
        return f"ppo_step stops with {type(error).__name__}: {error}"
    for name, expected in trainer.stats.items():
        if name not in found:
            return f"{name} is missing; return {', '.join(STATS)}"
        if not abs(found[name] - expected) <= TOLERANCE * max(1, abs(expected)):
            return f"{name} is {found[name]:.6g}; the trainer has {expected:.6g}"
    if left := [name for name in functions if name not in called]:
        return f"the step never calls {', '.join(left)}"
    moved = zip(b.network.parameters(), trainer.weights)
    apart = max((p.detach() - w).abs().max().item() for p, w in moved)
    if not apart <= TOLERANCE:
        return f"a weight after the step differs by {apart:.1e}"
    return None


def check(step, own, seed: int = 0) -> bool:
    """Print which function is wrong; return whether the step equals the trainer's."""
    right = {name: SET.exercises[name].solution for name in NAMES}
    if missing := [name for name in NAMES if not hasattr(own, name)]:
        print(f"✘ own has no {', '.join(missing)}. Add the missing functions to it.")
        return False
    mine = {name: getattr(own, name) for name in NAMES}
    for i, ratio in enumerate(RATIOS):
        given = make_batch(len(RATIOS) * seed + i)
        case = given, by_trainer(given, ratio)
        if said := differs(step, mine, *case):
            break
    else:
        print(f"✔ In {len(RATIOS)} steps, numbers and weights equal the trainer's.")
        return True
    print(f"✘ {said}.")
    if again := differs(step, right, *case):
        again = "the error is the same" if again == said else again
        print(f"  With correct functions, {again}. Check ppo_step.")
        return False
    wrong = [x for x in NAMES if differs(step, right | {x: mine[x]}, *case)]
    print(f"  ppo_step is right. Wrong: {', '.join(wrong) or 'several, combined'}.")
    return False
