"""Record PPO's paths through the toy language, and build the interactive page's data.

``python docs/_ext/play.py`` trains PPO on notebook 03's toy language with the notebook's cells, and
records every step.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path

import nbformat

from rlhf_course.runtime.files import atomic_file, read_json

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
NOTEBOOK = ROOT / "notebooks" / "03_ppo_step_by_step.ipynb"
RUN = ROOT / "figs" / "measured" / "03_ppo_step_by_step.json"
PATHS = ROOT / "figs" / "measured" / "toy_paths.json"
LANGUAGE = {
    "seed",
    "V",
    "toy_rewards",
    "toy_query",
    "toy_policy",
    "sequence_logprobs",
    "toy_ref",
}  # names that cells define
TRAINING = {"generation", "ToyTokenizer", "objective", "toy_trainer"}


def definitions(names: Iterable[str]) -> dict:
    """Return name → object from notebook 03's cells at preset tiny; raise ``ValueError`` if a name
    is undefined.
    """
    from rlhf_course.course.presets import load_preset

    objects = {}
    wanted = {*names}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(cell.source)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), NOTEBOOK.name, "exec"), objects)
        objects.setdefault("settings", load_preset(NOTEBOOK.stem, "tiny"))
        made = {
            getattr(node, "name", getattr(node, "id", None))
            for node in ast.walk(tree)
            if _defines(node)
        }
        if made & wanted:
            exec(compile(tree, NOTEBOOK.name, "exec"), objects)
            wanted -= made
    if wanted:
        raise ValueError(f"Define {', '.join(sorted(wanted))} in a cell of {NOTEBOOK}.")
    return objects


def _defines(node: ast.AST) -> bool:
    stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    return stored or isinstance(node, ast.FunctionDef | ast.ClassDef)


def path_of(toy: dict, beta: float) -> tuple[list[float], list[float]]:
    """Return the policy's exact KL and expected reward before PPO and after each of notebook 03's
    steps.
    """
    import torch

    ppo = toy["toy_trainer"](beta)
    settings = toy["settings"]
    queries = [toy["toy_query"]] * settings.toy_batch
    powers = toy["V"] ** torch.arange(toy["L"] - 1, -1, -1)
    sampling = {"return_prompt": False, "max_new_tokens": toy["L"]} | toy["generation"]
    kls = [0.0]
    rewards = [toy["objective"](toy["toy_ref"], toy["toy_ref"], beta)[1]]
    for _ in range(settings.toy_steps):
        responses = ppo.generate(queries, **sampling)
        ppo.step(queries, responses, toy["toy_rewards"][torch.stack(responses).cpu() @ powers])
        _, reward, kl = toy["objective"](toy["sequence_logprobs"](ppo.model), toy["toy_ref"], beta)
        kls.append(kl)
        rewards.append(reward)
    return [round(kl, 5) for kl in kls], [round(reward, 5) for reward in rewards]


def record() -> None:
    """Train PPO for each of notebook 03's β, and write the language and the paths."""
    from rlhf_course.course.run_card import quiet_libraries

    quiet_libraries()
    toy = definitions(LANGUAGE | TRAINING)
    paths = []
    for beta in toy["settings"].toy_betas:
        kl, reward = path_of(toy, beta)
        paths.append({"beta": beta, "kl": kl, "reward": reward})
        print(f"β = {beta:g}: KL {kl[-1]:.3f}, reward {reward[-1]:.3f}", flush=True)
    language = {"log_ref": toy["toy_ref"].tolist(), "rewards": toy["toy_rewards"].tolist()}
    rounded = {name: [round(value, 8) for value in values] for name, values in language.items()}
    with atomic_file(PATHS) as path:
        path.write_text(json.dumps(rounded | {"paths": paths}) + "\n", encoding="utf-8")


def data() -> dict:
    """Return the page's data: the toy language with PPO's paths, and one response of notebook 03,
    token by token.
    """
    sample = read_json(RUN)["curves"]["sample"]
    first = next(i for i, value in enumerate(sample["value"]) if value is not None)
    strip = {
        name.lower(): values[first:]
        for name, values in sample.items()
        if not name.endswith("advantage")
    }
    return {"toy": read_json(PATHS), "strip": strip | {"query": "".join(sample["token"][:first])}}


def play_page() -> str:
    """Return the page's Markdown with embedded data, so that it works without a server."""
    inside = json.dumps(data(), ensure_ascii=False).replace("<", "\\u003c")
    text = (HERE / "play.md").read_text(encoding="utf-8")
    return f'{text}\n<script type="application/json" id="play-data">{inside}</script>\n'


if __name__ == "__main__":
    record()
