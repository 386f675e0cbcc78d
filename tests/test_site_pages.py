"""The site's pages, without building it: metrics cover what `step` returns, and the PPO table's
right column runs.
"""

import ast
import json
import re
import shutil
from graphlib import TopologicalSorter
from pathlib import Path

import nbformat
import pytest
import torch
import yaml
from builders import review_tokenizer, reviews, save_base
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

import rlhf_course
from docs._ext import collect, diagnosis, home, metrics, quiz
from docs._ext.address import addresses, fetching, written
from rlhf_course.course.presets import ROOT
from rlhf_course.data import collate
from rlhf_course.ppo.stats import MEANING
from scripts import read_log

SITE = ROOT / "docs"


def test_the_page_of_diagnosis_is_made_from_its_symptoms():
    page = diagnosis.PAGE.read_text(encoding="utf-8")
    assert page == diagnosis.diagnosis_page(), "run python docs/_ext/diagnosis.py"


def test_the_page_about_metrics_has_each_stat_and_its_defaults():
    page = metrics.metrics_page({"objective/kl": [0.0, 1.0]})
    assert set(MEANING) < set(re.findall(r"^### `(.+)`$", page, re.M))
    assert "The default of 6 suits responses of a dozen tokens" in page and ":g}" not in page
    assert "0 at the first and 1 at the last of 2 steps" in page and "<polyline" in page


def test_the_committed_pages_are_those_of_their_sources():
    """Notebooks link to these pages, and GitHub shows them as they are committed."""
    committed = metrics.PAGE.read_text(encoding="utf-8")
    assert committed == metrics.metrics_page({}), "run python docs/_ext/metrics.py"
    committed = quiz.PAGE.read_text(encoding="utf-8")
    assert committed == quiz.quiz_page(), "run python docs/_ext/quiz.py"


def right_column() -> list[str]:
    """The code of the tables «your code → here», in order."""
    tables = (SITE / "ppo-api.md").read_text().split("| your code | here |\n|---|---|\n")[1:]
    rows = [row for table in tables for row in table.split("\n\n")[0].splitlines()]
    return [re.search(r"\| `([^`]+)`[^`|]*(`[^`|]*`[^`|]*)*\|$", row)[1] for row in rows]


def test_the_right_column_of_the_ppo_table_runs(tmp_path, monkeypatch):
    tokenizer = review_tokenizer()
    policy = tmp_path / "policy"
    save_base(policy, tokenizer, GPT2Config)
    dataset = Dataset.from_list(reviews(200))
    dataset = dataset.map(lambda row: {"input_ids": tokenizer(row["text"])["input_ids"][:5]})
    dataset = dataset.map(lambda row: {"query": tokenizer.decode(row["input_ids"])})
    lora = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    names = {"torch": torch, "model_name": policy, "tokenizer": tokenizer, "collator": collate}
    names |= {"dataset": dataset.with_format("torch"), "lora": LoraConfig(r=2, **lora)}
    names |= {"classifier": ROOT / "models/distilbert-imdb-mini"}
    monkeypatch.chdir(tmp_path)
    for line in right_column():
        try:
            exec(line, names)
        except Exception as error:
            pytest.fail(f"{line}: {error!r}")
    assert set(names["stats"]) == set(MEANING)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_code_of_the_page_about_your_own_run_runs(tmp_path, monkeypatch):
    page = (SITE / "own-run.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    chat, number, code, critic, pairs, plan, dpo = blocks
    tokenizer = review_tokenizer()
    save_base(tmp_path / "policy", tokenizer, GPT2Config, n_embd=32)
    sizes = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 1, "n_head": 2, "num_labels": 1}
    GPT2ForSequenceClassification(GPT2Config(**sizes)).save_pretrained(judge := tmp_path / "judge")
    answers = [
        {"openings": ["It", "It"], "texts": [" is bad", " is good"], "best": 1},
        {"openings": ["It", "He"], "texts": [" was", " is"], "best": 0},
        {"openings": ["It", "It"], "texts": [" is", " was"], "best": "equal"},
        {"openings": ["He", "He"], "texts": [" is", " was"], "best": 0},
        {"best": "undo"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in answers))
    config = rlhf_course.PPOConfig(batch_size=2, mini_batch_size=2, learning_rate=1e-3)
    names = {"torch": torch, "prompts": ["Was it good?", "And he?"], "tokenizer": tokenizer}
    names |= {"AutoModelForSequenceClassification": AutoModelForSequenceClassification}
    names |= {name: getattr(rlhf_course, name) for name in rlhf_course.__all__}
    names |= {"MODEL": str(tmp_path / "policy"), "REWARD_MODEL": judge, "config": config}
    names |= {"ANSWERS": tmp_path / "a.jsonl"}
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    monkeypatch.chdir(tmp_path)
    for block in (number, code, critic, chat, pairs, plan):
        exec(block, names)
    written = [json.loads(row) for row in Path("train.jsonl").read_text().splitlines()]
    assert written == [{"prompt": "It", "chosen": " is good", "rejected": " is bad"}]
    names["session"].answer(names["session"].question["texts"].index("An apple."))
    assert names["preference_pairs"]("my_answers.jsonl") == [
        {"prompt": "Name a fruit.", "chosen": "An apple.", "rejected": "Fruit is healthy."}
    ]
    shutil.copy("train.jsonl", "test.jsonl")
    exec(dpo.replace("beta=0.1", "bf16=False, use_cpu=True, logging_steps=1, beta=0.1"), names)
    assert names["dpo"].ref_model is None  # the adapter is turned off instead
    assert read_log.main(["runs/dpo", "--output", "log"]) in (0, 2)
    right = ["so it is 1/2.", "x = 0.5", "is 2/4, that is $0.50$"]
    assert [names["same_number"](x, "1/2") for x in right] == [1, 1, 1]
    assert [names["same_number"](x, "1,000") for x in ("1000 apples", "100", "none")] == [1, 0, 0]
    passes = names["passes_tests"]
    assert passes("def f(x): return x + 1", "assert f(1) == 2") == 1
    for wrong in ("def f(x): return 1", "exit()", "f("):
        assert passes(wrong, "assert f(1) == 2") == 0
    critic = names["model"].critic
    before = {name: weight.clone() for name, weight in critic.state_dict().items()}
    scores = [torch.tensor(1.0), torch.tensor(-1.0)]
    names["trainer"].step(names["queries"], names["responses"], scores)
    after = critic.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_readme_has_the_address_in_three_places_or_in_none():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    with_one = written(readme, "https://github.com/owner/name")
    assert "git clone https://github.com/owner/name hands-on-rlhf" in with_one
    assert "  url   = {https://github.com/owner/name},\n" in with_one
    assert "https://colab.research.google.com/github/owner/name/blob/main/notebooks/00_" in with_one
    bare = written(with_one, "")
    assert "git clone" not in bare and "colab" not in bare
    repository = addresses().get("repository", "")
    assert written(readme, repository) == readme, "run python docs/_ext/address.py"


def test_every_notebook_fetches_the_course_from_its_address_and_no_other():
    for path in ROOT.glob("notebooks/[0-9]*.ipynb"):
        read = nbformat.read(path, as_version=4)
        expected = fetching(nbformat.read(path, as_version=4), addresses().get("repository", ""))
        assert expected == read, "run python docs/_ext/address.py"
        cell = fetching(read, "https://github.com/owner/name").cells[1]
        assert "!git clone --depth 1 https://github.com/owner/name" in cell.source
        assert "requirements.txt" not in cell.source  # its pin would replace Colab's own torch
        assert fetching(read, "https://example.org/name").cells[1].id != "fetch"  # no Colab there


def test_links_of_pages_lead_to_files():
    pages = {path.name for path in SITE.glob("*.md")} | {"api.md"}
    for page in [*SITE.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        for link in (link for link in links if "://" not in link and "{" not in link):
            there = (page.parent / link).exists() or (ROOT / link).exists()
            assert there or link in pages, f"{page.name}: {link}"


def imports_of(path: Path) -> set[str]:
    """The modules of the site that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    modules = {f"docs._ext.{path.stem}" for path in path.parent.glob("*.py")}
    return names & modules


def test_the_modules_of_the_site_do_not_import_each_other_in_a_circle():
    paths = SITE.glob("_ext/*.py")
    TopologicalSorter({f"docs._ext.{path.stem}": imports_of(path) for path in paths}).prepare()


def test_old_addresses_lead_to_source_pages_that_exist():
    moved = yaml.safe_load((SITE / "redirects.yaml").read_text(encoding="utf-8"))
    sources = [path for pattern in collect.SOURCES.values() for path in ROOT.glob(pattern)]
    pages = {str(path.relative_to(ROOT).with_suffix("")) for path in sources}
    assert {new for new in moved.values() if new not in pages} == set(), "edit docs/redirects.yaml"
    assert pages.isdisjoint(moved)


def test_home_takes_its_numbers_from_run_cards(tmp_path, monkeypatch):
    page = home.home_page(tmp_path)
    assert not re.search(r"\{(minutes|memory|notebooks|start|cards)\}", page)
    kept = home.run_card
    name = "04_gpt2_imdb_ppo"
    slow = {name: kept(name) | {"wall_s": 600.0}}
    monkeypatch.setattr(home, "run_card", lambda name: slow.get(name) or kept(name))
    assert "10 min, " in home.home_page(tmp_path) and "10 min, " not in page
