"""Write the sections of metrics.md; meanings come from MEANING, the rest from metrics.yaml.

python docs/_ext/metrics.py
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import yaml

from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.stats import MEANING

HERE = Path(__file__).parents[1]
PAGE = HERE / "metrics.md"


def load_groups() -> list[dict]:
    """Return metrics.yaml's groups; raise ``ValueError`` if their stats differ from MEANING's."""
    groups = yaml.safe_load((HERE / "metrics.yaml").read_text())
    described = {
        key for group in groups for key, stat in group["stats"].items() if "means" not in stat
    }
    if described != set(MEANING):
        raise ValueError(
            f"Add {', '.join(sorted(described ^ set(MEANING)))} to both metrics.yaml and MEANING."
        )
    return groups


def fill(text: str) -> str:
    """Return the text with {field:g} replaced by PPOConfig's default for the field."""
    defaults = asdict(PPOConfig())
    return re.sub(r"\{(\w+):g\}", lambda match: format(defaults[match[1]], "g"), text.strip())


def anchor(key: str) -> str:
    """Return a stat section's id, for example objective/kl_coef → objective-kl-coef."""
    return re.sub(r"[/_]", "-", key)


def picture(key: str, curve: list[float]) -> str:
    """Return a small SVG curve by step, with a line at 0 if the curve's range includes 0."""
    low = min(curve)
    high = max(curve)

    def height(value: float) -> str:
        return f"{38 - 36 * (value - low) / (high - low):.1f}"

    points = " ".join(
        f"{160 * step / max(1, len(curve) - 1):.1f},{height(value)}"
        for step, value in enumerate(curve)
    )
    zero = f'<line x1="0" x2="160" y1="{height(0)}" y2="{height(0)}"/>' if low <= 0 <= high else ""
    return (
        '<svg class="curve" viewBox="0 0 160 40" preserveAspectRatio="none" role="img"'
        f' aria-label="{key} over the steps, from {curve[0]:.3g} to'
        f' {curve[-1]:.3g}">{zero}<polyline points="{points}"/></svg>'
    )


def section(key: str, stat: dict, curve: list[float] | None) -> str:
    """Return one stat's section in Markdown."""
    means = stat.get("means") or MEANING[key]
    facts = {"Unit": stat["unit"], "Healthy": stat["healthy"], "Otherwise": stat["otherwise"]}
    lines = "\n".join(f"- **{name}:** {fill(text)}" for name, text in facts.items())
    if curve:
        lines += (
            f"\n- **Measured:** {curve[0]:.3g} at the first and {curve[-1]:.3g} at the last of"
            f" {len(curve)} steps of [notebook 04](../notebooks/04_gpt2_imdb_ppo.ipynb)\n\n"
            + (picture(key, curve) if min(curve) < max(curve) else "")
        )
    return f"""
<a id="{anchor(key)}"></a>

### `{key}`

{means[0].upper()}{means[1:]}.

$$
{stat["formula"]}
$$

{lines}
"""


def metrics_page(curves: dict[str, list[float]]) -> str:
    """Return the page in Markdown: metrics.md up to its first section, then each stat.

    ``curves`` maps some stats, or none, to their measured values per step.
    """
    sections = [PAGE.read_text(encoding="utf-8").partition("\n## ")[0].rstrip() + "\n"]
    for group in load_groups():
        sections.append(f"## {group['title']}\n\n{fill(group['about'])}\n")
        sections += [section(key, stat, curves.get(key)) for key, stat in group["stats"].items()]
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(metrics_page({}), encoding="utf-8")
