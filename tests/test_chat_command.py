"""chat.py: one or two toy chat models answer the same question, side by side."""

import io
import json

import pytest
import torch
from builders import edit_json
from peft import LoraConfig

from dev.simulated_hub.chat import chat_repositories
from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.command_line import exits
from rlhf_course.data import prompt_ids
from rlhf_course.data.transcripts import as_prompt
from scripts import chat

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHORT = ["--max_new_tokens=6", "--question=What is rain?"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a toy chat model, base, and an adapter on it as train_ppo.py saves it, ppo."""
    folder = tmp_path_factory.mktemp("models")
    repositories = chat_repositories(tmp_path_factory.mktemp("bpe"))
    for name, content in repositories[SMOLLM2].items():
        file = folder / "base" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content) if isinstance(content, bytes) else file.write_text(content)
    torch.manual_seed(0)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"], r=4)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(folder / "base", peft_config=lora)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=3.0)
    policy.save_pretrained(folder / "run/policy")
    return folder


def run(*arguments) -> int:
    return exits.run("chat.py", chat.main, [str(argument) for argument in arguments])


def sampled(source, chosen) -> chat.Speaker:
    """A policy that has answered."""
    speaker = chat.load(str(source), chosen.seed)
    for _ in chat.speak(speaker, "What is rain?", chosen):
        pass
    return speaker


def test_both_answer_the_same_question_side_by_side(models, capsys):
    assert run(models / "base", models / "run/policy", *SHORT, "--kl") == 0
    said = capsys.readouterr().out
    assert "Question: What is rain?" in said
    (titles,) = [line for line in said.splitlines() if "run/policy" in line]
    assert " base " in titles and said.count("KL ") == 1


def test_a_seed_gives_the_same_answer_and_equal_policies_have_no_kl(models):
    chosen = chat.parse_arguments(["--max_new_tokens=12", "--seed=3"])
    first, again = (sampled(models / "base", chosen) for _ in range(2))
    assert first.answer == again.answer and len(first.answer) <= 12
    assert chat.measure_kl(again, first) == pytest.approx(0, abs=1e-6)
    after = sampled(models / "run/policy", chosen)
    assert chat.measure_kl(after, first) > 0.01
    asked = prompt_ids(first.tokenizer, [as_prompt("What is rain?")])[0]
    assert first.prompt == asked


def test_an_answer_is_read_token_by_token_with_the_cache(models):
    """Greedy decoding gives the same tokens as whole passes without a cache."""
    chosen = chat.parse_arguments(["--max_new_tokens=8", "--temperature=0"])
    speaker = sampled(models / "run/policy", chosen)
    ids = list(speaker.prompt)
    for token in speaker.answer:
        assert token == int(speaker.model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)
    assert len(speaker.answer) == 8 or speaker.answer[-1] in chat.end_tokens(speaker)


def test_top_p_keeps_the_likeliest_tokens():
    chosen = chat.parse_arguments(["--top_p=0.5"])
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    drawn = [chat.draw(logits, chosen, generator) for _ in range(200)]
    assert set(drawn) == {2, 3} and 0.3 < drawn.count(2) / 200 < 0.55
    chosen = chat.parse_arguments(["--top_p=1"])
    drawn = [chat.draw(logits, chosen, generator) for _ in range(2000)]
    assert drawn.count(0) / 2000 == pytest.approx(0.1, abs=0.03)


def test_questions_come_from_a_pipe_until_its_end(models, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is rain?\n\nWhat is snow?\n"))
    assert run(models / "base", "--max_new_tokens=3") == 0
    assert capsys.readouterr().out.count(" base ") == 2


def test_ctrl_c_ends_the_loop(models, monkeypatch):
    def interrupt(text):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert run(models / "base") == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["./nowhere"], "nowhere"),
        ([], "is missing. Run make real, or name a policy."),
    ],
)
def test_what_is_missing_is_a_sentence(given, message, fails, monkeypatch, tmp_path):
    for name in ("REAL", "SHARPENED"):
        monkeypatch.setattr(chat, name, tmp_path / name)

    class Command:
        __file__ = "chat.py"

        @staticmethod
        def main(arguments):
            return run(*arguments)

    fails(Command, [*given, *SHORT], message)


@pytest.mark.parametrize("given", ["--temperature=-1", "--top_p=0", "--max_new_tokens=0", "a b c"])
def test_bad_options_end_with_a_sentence(given, capsys):
    with pytest.raises(SystemExit):
        chat.parse_arguments(given.split())
    assert "; " in capsys.readouterr().err


def test_without_arguments_the_real_model_and_its_adapter(models, monkeypatch, tmp_path, capsys):
    """The adapter that the course recorded is unpacked into peft's layout."""
    from safetensors.torch import load_file

    monkeypatch.setattr(chat, "SHARPENED", models / "base")
    before, after = chat.default_policies()
    assert before == str(models / "base")
    config = json.loads((models / "base-instructions/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == before and config["r"] == 16
    weights = load_file(models / "base-instructions/adapter_model.safetensors")
    assert len(weights) == 15 * 7 * 2 and after.endswith("base-instructions")
    edit_json(models / "base-instructions/adapter_config.json", r=16)
    assert chat.default_policies() == [before, after]  # the second call writes nothing
    monkeypatch.setattr(chat, "SHARPENED", tmp_path / "none")
    monkeypatch.setattr(chat, "REAL", models / "base")
    assert chat.default_policies() == [before]
    assert "--temperature 0.7" in capsys.readouterr().out
