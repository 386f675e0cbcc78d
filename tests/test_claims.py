"""Words follow numbers: a sentence of a notebook that holds one, or says which way something moved,
rests on it.
"""

import json
import re

import nbformat
import pytest
import yaml

from rlhf_course.audit import RISKS
from rlhf_course.course.presets import ROOT

CLAIMS = yaml.safe_load((ROOT / "tests/claims.yaml").read_text(encoding="utf-8"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("0*.ipynb"))
NUMBER = re.compile(r"\d+\.\d|\d ?%|\d,\d{3}")
MOVES = re.compile(
    r"\b(rises?|rose|falls?|fell|grows?|grew|shrinks?|shrank|drops?|dropped|climbs?|collapses?|stays?|"
    r"ends? (above|below)|goes far)\b"
)
PAGES = [
    "README.md",
    "models/README.md",
    "slides/slides.md",
    *(
        f"site/{name}.md"
        for name in (
            # Fmt: skip
            "index",
            "running",
            "speed",
            "larger-models",
            "on-a-gpu",
            "troubleshooting",
            "ppo-api",
        )
    ),
]
# not numbers of ours: licences, papers, versions
NAMES = re.compile(
    r"Apache-2\.0|arXiv:? ?\d+\.\d+|Python 3\.\d+|section \d\.\d|\b[01]\.1\d(\.\d)?\b"
)
MARKUP = re.compile(
    r"```.*?```|\{\{.*?\}\}|\$\$.*?\$\$|<!--"
    r" _?(?:class|header|paginate).*?-->|`[^`\n]*`|\$[^$\n]*\$|\]\([^)\n]*\)|"
    r"^\|[^\n]*$",
    re.S | re.M,
)
NO_PROSE = re.compile(
    r"```.*?```|`[^`]*`|\$[^$]*\$|\]\([^)]*\)|^\|[^\n]*$", re.S | re.M
)  # code, formulas, links, tables


def claims(path) -> list[str]:
    """The sentences of a notebook's prose that need something to rest on."""
    cells = nbformat.read(path, as_version=4).cells
    prose = [NO_PROSE.sub("", cell.source) for cell in cells if cell.cell_type == "markdown"]
    sentences = [
        " ".join(part.split()) for text in prose for part in re.split(r"(?<=[.?!:;])\s+", text)
    ]
    return [sentence for sentence in sentences if NUMBER.search(sentence) or MOVES.search(sentence)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_every_claim_rests_on_something(path):
    known, found = CLAIMS[path.stem], claims(path)
    for sentence in found:
        assert any(entry["says"] in sentence for entry in known), (
            f"{path.stem}: what does this rest on? {sentence}"
        )
    for entry in known:
        assert any(entry["says"] in sentence for sentence in found), (
            f"{path.stem} does not say {entry['says']!r}"
        )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_what_a_claim_rests_on_is_there(path):
    card = json.loads((ROOT / f"figs/measured/{path.stem}.json").read_text(encoding="utf-8"))
    for entry in CLAIMS[path.stem]:
        [(kind, what)] = [(key, value) for key, value in entry.items() if key != "says"]
        assert kind in ("check", "metric", "test", "meaning", "source")
        if kind == "check":
            assert card["checks"][what]["passed"], entry
        elif kind == "metric":
            assert card["metrics"][what] is not None, entry
        elif kind == "test":
            assert (ROOT / "tests" / what).exists(), entry


@pytest.mark.parametrize("page", PAGES)
def test_every_claim_of_a_page_rests_on_something(page):
    """Slides take measured numbers from run cards; a number or a direction in words is on the list,
    with its ground.
    """
    text, known = MARKUP.sub("", (ROOT / page).read_text(encoding="utf-8")), CLAIMS.get(page, [])
    sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.?!:;])\s+|\n\n|\n[*-] ", text)]
    found = [s for s in sentences if NUMBER.search(NAMES.sub("", s)) or MOVES.search(s)]
    for sentence in found:
        assert any(entry["says"] in sentence for entry in known), (
            f"{page}: what does this rest on? {sentence}"
        )
    for entry in known:
        assert any(entry["says"] in sentence for sentence in found), (
            f"{page} does not say {entry['says']!r}"
        )
        if "test" in entry:
            assert (ROOT / "tests" / entry["test"]).exists(), entry
        elif "check" in entry:
            notebook, check = entry["check"].split(": ", 1)
            card = json.loads((ROOT / f"figs/measured/{notebook}.json").read_text(encoding="utf-8"))
            assert card["checks"][check]["passed"], entry


def test_a_new_claim_would_be_seen(tmp_path):
    cells = [
        nbformat.v4.new_markdown_cell(text)
        for text in ("Gold rises by far.", "It is 0.7 now.", "It learns.")
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "new.ipynb")
    assert claims(tmp_path / "new.ipynb") == ["Gold rises by far.", "It is 0.7 now."]


def test_the_page_says_what_a_step_of_gpt2_took_on_a_cpu():
    card = json.loads((ROOT / "figs/measured/gpt2_cpu.json").read_text(encoding="utf-8"))
    text = (ROOT / "site/running.md").read_text(encoding="utf-8")
    for found in card["mixed_precision"].values():
        seconds = found["seconds_per_step"]
        assert f" {seconds:.1f} s" in text and f" {seconds * 100 / 60:.0f} min" in text
    assert (
        f" {max(found['peak_mb'] for found in card['mixed_precision'].values()) / 1000:.1f} GB"
        in text
    )
    assert f"batch_size={card['batch']}" in text and card["threads"] == 2


def test_the_page_says_what_a_reward_model_learnt_on_real_pairs():
    card = json.loads(
        (ROOT / "figs/measured/scratch/01_reward_modeling.json").read_text(encoding="utf-8")
    )
    text = " ".join((ROOT / "site/running.md").read_text(encoding="utf-8").split())
    names = (
        "accuracy_after",
        "length_baseline",
        "accuracy_after_fix",
        "probes_passed_first",
        "probes_passed_fixed",
    )
    accuracy, length, fixed, first, passed = (card["metrics"][name] for name in names)
    assert (
        f"held-out accuracy {accuracy:.2f}, where the longer answer alone gives {length:.2f}"
        in text
    )
    assert f"brings the accuracy down to {fixed:.2f}" in text
    assert "wins five of its nine probes" in text and (first, passed, len(RISKS)) == (0, 5, 9)
    assert [name for name, check in card["checks"].items() if not check["passed"]] == [
        "the fix costs little"
    ]


def test_the_page_says_what_was_learnt_from_chinese_pairs():
    card = json.loads(
        (ROOT / "figs/measured/scratch/05_lora_rlhf_baichuan.json").read_text(encoding="utf-8")
    )
    text = " ".join((ROOT / "site/running.md").read_text(encoding="utf-8").split())
    accuracy, length = (card["metrics"][name] for name in ("accuracy", "length_baseline"))
    interval = accuracy - card["checks"]["better than chance"]["value"]
    assert (
        f"{accuracy:.2f} ± {interval:.2f}, where the longer answer alone gives {length:.2f}" in text
    )
    assert [name for name, check in card["checks"].items() if not check["passed"]] == [
        "accuracy beats length"
    ]
