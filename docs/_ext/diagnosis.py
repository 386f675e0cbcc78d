"""Write the tables of diagnosis.md from symptoms.yaml.

python docs/_ext/diagnosis.py
"""

from pathlib import Path

import yaml

HERE = Path(__file__).parents[1]
PAGE = HERE / "diagnosis.md"
SYMPTOMS = HERE.parent / "rlhf_course/ppo/symptoms.yaml"
COLUMNS = {
    "symptom": "symptom",
    "causes": "likely causes",
    "test": "the test that distinguishes them",
    "change": "what to change",
}
END = "## What one PPO step runs"


def diagnosis_page() -> str:
    """Return the page in Markdown: its first part, a table per group, and its last part."""
    page = PAGE.read_text(encoding="utf-8")
    sections = [page.partition("\n## ")[0].rstrip()]
    for group in yaml.safe_load(SYMPTOMS.read_text(encoding="utf-8")):
        rows = [COLUMNS.values(), ["---"] * len(COLUMNS)]
        rows += [[row[name] for name in COLUMNS] for row in group["symptoms"]]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        sections.append(f"## {group['title']}\n\n{table}")
    return "\n\n".join([*sections, END + page.partition(END)[2]])


if __name__ == "__main__":
    PAGE.write_text(diagnosis_page(), encoding="utf-8")
