"""The site's pages, without building it: metrics cover what `step` returns, and the PPO table's right column runs."""

import re
import sys
from pathlib import Path

import pytest
import torch
from builders import reviews
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from rlhf_course.course.presets import ROOT
from rlhf_course.data import collate
from rlhf_course.ppo.stats import MEANING

SITE = Path(__file__).resolve().parents[1] / "site"
sys.path.insert(0, str(SITE))

from metrics import metrics_page  # noqa: E402


def test_the_page_about_metrics_has_a_section_for_each_stat_and_no_other():
    headings = re.findall(r"^### `(.+)`$", metrics_page({}), re.M)
    logged = ["env/reward_mean", "env/reward_std", "env/reward_dist"]
    assert sorted(headings) == sorted([*MEANING, *logged])


def test_defaults_on_the_page_about_metrics_are_filled_in():
    page = metrics_page({"objective/kl": [0.0, 1.0]})
    assert "`target` (6)" in page and ":g}" not in page
    assert "0 at the first and 1 at the last of 2 steps" in page and "<polyline" in page


def right_column() -> list[str]:
    """The code of the tables «your code → here», in order."""
    tables = (SITE / "ppo-api.md").read_text().split("| your code | here |\n|---|---|\n")[1:]
    rows = [row for table in tables for row in table.split("\n\n")[0].splitlines()]
    return [re.search(r"\| `([^`]+)`[^`|]*(`[^`|]*`[^`|]*)*\|$", row)[1] for row in rows]


def test_the_right_column_of_the_ppo_table_runs(tmp_path, monkeypatch):
    policy = ROOT / "models/gpt2-imdb-mini"
    dataset, tokenizer = Dataset.from_list(reviews(200)), AutoTokenizer.from_pretrained(policy)
    dataset = dataset.map(lambda row: {"input_ids": tokenizer(row["text"])["input_ids"][:5]})
    dataset = dataset.map(lambda row: {"query": tokenizer.decode(row["input_ids"])}).with_format("torch")
    names = {
        "torch": torch,
        "model_name": policy,
        "classifier": ROOT / "models/distilbert-imdb-mini",
        "tokenizer": tokenizer,
        "dataset": dataset,
        "collator": collate,
        "lora": LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    }
    monkeypatch.chdir(tmp_path)
    for line in right_column():
        try:
            exec(line, names)
        except Exception as error:
            pytest.fail(f"{line}: {error!r}")
    assert set(names["stats"]) == set(MEANING)
    assert (tmp_path / "out" / "model.safetensors").exists()
