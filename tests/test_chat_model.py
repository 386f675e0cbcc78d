"""A small chat model through notebook 05: its template from SFT to the reward model to PPO."""

import ast
import json
from contextlib import suppress

import matplotlib as mpl
import pytest
import torch
from accelerate.state import AcceleratorState
from builders import invalid, write_rows
from datasets import Dataset
from transformers import AutoTokenizer

from dev.simulated_hub import serve
from dev.simulated_hub.chat import chat_repositories
from rlhf_course import PPOTrainer
from rlhf_course.course.presets import ROOT, load_preset
from rlhf_course.course.run_card import CheckFailed
from rlhf_course.data import as_messages, as_prompt, prompt_ids, tokenize_answers
from rlhf_course.rewards import RewardModel
from scripts import train_ppo

CELLS = json.loads((ROOT / "notebooks/05_lora_rlhf_baichuan.ipynb").read_text("utf-8"))["cells"]
SOURCES = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
PAGE = (ROOT / "docs/larger-models.md").read_text("utf-8")
SECTION = PAGE.split("## A chat model in notebook 05")[1].split("\n## ")[0]
FEW = {"sft_subset": 60, "train_subset": 60, "eval_subset": 30, "audit_prompts": 10, "steps": 3}
FEW |= {"save_at": [1, 3], "eval_prompts": 8, "max_new_tokens": 12, "fix_pairs": 20}
FEW |= {"batch_size": 8, "mini_batch_size": 8, "ppo_epochs": 1, "dtype": "float32"}
END = "<|im_end|>"


def rendered(tokenizer, prompt: str, answer: str | None = None) -> list[int]:
    """What the template makes of a question, and of its answer up to the end-of-turn token."""
    talk, start = as_messages(prompt)[:-1], answer is None
    talk += [] if start else [{"role": "assistant", "content": answer}]
    how = {"add_generation_prompt": start, "enable_thinking": False, "return_dict": False}
    ids = tokenizer.apply_chat_template(talk, **how)
    end = len(ids) if start else len(ids) - ids[::-1].index(tokenizer.convert_tokens_to_ids(END))
    return ids[:end]


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    return chat_repositories(tmp_path_factory.mktemp("tokenizer"))


def overrides() -> dict:
    """The settings that the page gives to paste into the notebook."""
    return ast.literal_eval(SECTION.split("```python\noverrides = ")[1].split("```")[0])


@pytest.fixture(scope="module", params=[{}, {"checkpoint": "Qwen/Qwen3-0.6B", "sft_epochs": 1}])
def ran(request, contents, tmp_path_factory):
    """The notebook's variables, and the prompts, answers and dialogues that its models read."""
    seen, folder = {"prompts": [], "answers": [], "judged": []}, tmp_path_factory.mktemp("run")
    given = {"preset": "full", "output_dir": str(folder), "seed": 0}
    given["overrides"] = overrides() | FEW | request.param
    generate, judge = PPOTrainer.generate, RewardModel.encode

    def watch_generate(self, queries, *rest, **how):
        responses = generate(self, queries, *rest, **how)
        seen["prompts"] += [query.tolist() for query in queries]
        seen["answers"] += [response.tolist() for response in responses]
        return responses

    def watch_judge(self, prompts, answers):
        ids = judge(self, prompts, answers)
        seen["judged"] += zip(prompts, answers, ids, strict=True)
        return ids

    names = {"__name__": "notebook"}
    AcceleratorState._reset_state(reset_partial_state=True)
    with serve(contents) as hub, pytest.MonkeyPatch.context() as patch:
        hub.use(patch, folder / "home")
        patch.setattr(PPOTrainer, "generate", watch_generate)
        patch.setattr(RewardModel, "encode", watch_judge)
        mpl.use("agg")
        names |= given
        for number, source in enumerate(SOURCES[1:], 1):  # the first one holds what is given
            with suppress(CheckFailed):  # so few steps need not pass the checks of the last one
                exec(compile(source, f"code cell {number}", "exec"), names)
        hub.check(folder)
    AcceleratorState._reset_state(reset_partial_state=True)
    return names, seen


def test_ppo_and_sft_read_the_template(ran):
    names, seen = ran
    tokenizer, rows = names["tokenizer"], names["sft_train"]
    asked = {tuple(rendered(tokenizer, prompt)) for prompt in names["test_prompts"]}
    asked |= {tuple(rendered(tokenizer, prompt)) for prompt in names["train_prompts"]}
    assert seen["prompts"] and {*map(tuple, seen["prompts"])} <= asked
    expected = []
    for row in names["train_answers"]:
        question, both = (
            rendered(tokenizer, row["prompt"], text) for text in (None, row["answer"])
        )
        expected.append((both, [0] * len(question) + [1] * (len(both) - len(question))))
    assert [*zip(rows["input_ids"], rows["completion_mask"], strict=True)] == expected
    assert not any("Human" in tokenizer.decode(ids) for ids in (*rows["input_ids"], *asked))


def test_answers_end_with_the_end_of_turn_token(ran):
    names, seen = ran
    end = names["tokenizer"].convert_tokens_to_ids(END)
    ended = [ids[-1] == end for ids in seen["answers"]]
    assert all(len(ids) == 12 for ids, over in zip(seen["answers"], ended, strict=True) if not over)
    assert sum(ended) / len(ended) > 0.5 and not any(end in ids[:-1] for ids in seen["answers"])


def test_the_reward_model_reads_the_template(ran):
    names, seen = ran
    assert len(seen["judged"]) > 100
    for prompt, answer, ids in seen["judged"]:
        assert ids == rendered(names["tokenizer"], prompt, answer)
    for row in names["pair_tokens"]["train"]:
        assert row["chosen_ids"] == rendered(names["tokenizer"], row["prompt"], row["chosen"])


def test_the_reference_is_the_chat_model_without_sft(ran):
    names, _ = ran
    card = names["card"]
    assert card.checks["KL is 0 at step 1"]["passed"]
    assert card.checks["reference and reward adapters are unmoved"]["passed"]
    assert ("SFT loss falls" in card.checks) == bool(names["settings"].sft_epochs)
    network, ids = names["network"], torch.tensor(names["queries"]["input_ids"][:1])
    with torch.no_grad():
        network.set_adapter("ref", inference_mode=True)
        reference = network(ids).logits
        with network.disable_adapter():
            taught = (network(ids).logits - reference).abs().max().item()
        network.set_adapter("policy")
    assert (taught == 0) == (names["settings"].sft_epochs == 0)


@pytest.fixture
def tokenizer(contents, tmp_path):
    for name, content in contents["HuggingFaceTB/SmolLM2-135M-Instruct"].items():
        if name.startswith("tokenizer"):
            (tmp_path / name).write_text(content)
    return AutoTokenizer.from_pretrained(tmp_path)


def test_train_ppo_reads_the_template(tokenizer, tmp_path):
    rows = [{"prompt": f"{i}?", "chosen": "Yes.", "rejected": "No."} for i in range(3)]
    folder = write_rows(tmp_path / "pairs", rows, "train.jsonl")
    settings = load_preset("05_lora_rlhf_baichuan", "full", {"dataset": str(folder)})
    chosen = train_ppo.Options(reward_adapter="reward", output="out", eval_prompts=0)
    prompts, _ = train_ppo.load_prompts(tokenizer, chosen, settings)
    expected = [rendered(tokenizer, as_prompt(row["prompt"])) for row in rows]
    assert [ids.tolist() for ids in prompts["input_ids"]] == expected


def test_a_template_that_ends_turns_with_another_token_is_refused(tokenizer):
    tokenizer.eos_token = "<|endoftext|>"
    rows = Dataset.from_dict({"prompt": [as_prompt("Why?")], "answer": ["No."]})
    with invalid("does not end turns with EOS, <.endoftext.>"):
        tokenize_answers(rows, tokenizer, 99)


def test_only_dialogues_are_put_into_the_template(tokenizer):
    assert prompt_ids(tokenizer, ["A film"]) == [tokenizer("A film")["input_ids"]]
