"""docs/your-own-chat-model.md: its commands run as they stand, on a toy model and toy pairs."""

import importlib
import json
import re
import shlex

import pytest
from builders import write_rows

from dev.simulated_hub.chat import chat_repositories
from rlhf_course.command_line import exits
from rlhf_course.command_line.records import read_complete
from rlhf_course.course.presets import ROOT
from rlhf_course.synthetic.dialogues import make_pairs

PAGE = (ROOT / "docs/your-own-chat-model.md").read_text("utf-8")
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Exit code 2 is a verdict: the toy reward model is no good, and the toy run has symptoms.
MAY_WARN = ("check_reward_model", "read_log")


def commands() -> list[list[str]]:
    """The page's commands, except those that get the real model, as lists of words."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines if line.startswith("python ")]
    return [words[1:] for words in found if "get_real_model" not in words[1]]


def prepare(folder) -> None:
    """Write the toy chat model into MODEL, and toy pairs into PAIRS."""
    for name, content in chat_repositories(folder)[SMOLLM2].items():
        file = folder / "MODEL" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content) if isinstance(content, bytes) else file.write_text(content)
    keys = ("prompt", "chosen", "rejected")
    rows = [{key: getattr(pair, key) for key in keys} for pair in make_pairs(400, seed=5)]
    write_rows(folder / "PAIRS", rows[:340])
    write_rows(folder / "PAIRS", rows[340:], "test.jsonl")


@pytest.mark.slow
def test_the_page_s_commands_run_as_they_stand(tmp_path, monkeypatch, capsys):
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    names = []
    for script, *arguments in commands():
        name = script.removeprefix("scripts/").removesuffix(".py")
        module = importlib.import_module(f"scripts.{name}")
        is_training = name.startswith("train_")
        code = module.main(arguments) if is_training else exits.run(name, module.main, arguments)
        said = capsys.readouterr()
        allowed = (0, 2) if name in MAY_WARN else (0,)
        assert code in allowed, (script, arguments, said.err)
        names.append(name)
    expected = "train_reward_model check_reward_model train_ppo read_log report chat".split()
    assert list(dict.fromkeys(names)) == expected
    rows = read_complete(tmp_path / "runs/ppo/evaluations.jsonl")
    assert rows[0]["step"] == 0 and len(rows) >= 3
    assert "accuracy" in json.loads((tmp_path / "runs/reward/audit.json").read_text())
    assert (tmp_path / "runs/report.html").exists() and (tmp_path / "runs/ppo/policy").exists()


def test_the_page_is_short():
    assert len(re.sub(r"```.*?```", "", PAGE, flags=re.S).split()) < 900
