"""The page about metrics: what a stat means comes from MEANING, the rest from metrics.yaml."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import yaml

from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.stats import MEANING

HERE = Path(__file__).parent


def load_groups() -> list[dict]:
    """The groups of metrics.yaml; raises ``ValueError`` when they and MEANING do not have the same stats."""
    groups = yaml.safe_load((HERE / "metrics.yaml").read_text())
    described = {key for group in groups for key, stat in group["stats"].items() if "means" not in stat}
    if described != set(MEANING):
        raise ValueError(f"metrics.yaml and MEANING differ in {', '.join(sorted(described ^ set(MEANING)))}.")
    return groups


def fill(text: str) -> str:
    """The text with {field:g} replaced by the default of that field of PPOConfig."""
    defaults = asdict(PPOConfig())
    return re.sub(r"\{(\w+):g\}", lambda found: format(defaults[found[1]], "g"), text.strip())


def anchor(key: str) -> str:
    """The id of a stat's section: objective/kl_coef → objective-kl-coef."""
    return re.sub(r"[/_]", "-", key)


def section(key: str, stat: dict, curve: list[float] | None) -> str:
    """One stat in Markdown; the index line is what the search finds first."""
    means = stat.get("means") or MEANING[key]
    facts = {"Unit": stat["unit"], "Healthy": stat["healthy"], "Otherwise": stat["otherwise"]}
    if curve:
        facts["Measured"] = (
            f"{curve[0]:.3g} at the first and {curve[-1]:.3g} at the last of {len(curve)} steps in "
            "[notebook 03](notebooks/03_gpt2_imdb_ppo.ipynb), preset `tiny`."
        )
    lines = "\n".join(f"- **{name}:** {fill(text)}" for name, text in facts.items())
    return f"""
```{{index}} {key}, {key.rsplit("/")[-1]}
```

({anchor(key)})=
### `{key}`

{means[0].upper()}{means[1:]}.

$$
{stat["formula"]}
$$

{lines}
"""


def metrics_page(curves: dict[str, list[float]]) -> str:
    """The whole page in Markdown; ``curves`` holds measured values per step, for some stats or none."""
    parts = [(HERE / "metrics.md").read_text()]
    for group in load_groups():
        parts.append(f"## {group['title']}\n\n{fill(group['about'])}\n")
        parts += [section(key, stat, curves.get(key)) for key, stat in group["stats"].items()]
    return "\n".join(parts)
