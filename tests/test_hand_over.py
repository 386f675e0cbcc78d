"""A hand-over: a run's numbers again in trl's and verl's own code, and wrong settings noticed."""

import json
import shutil
import subprocess

import pandas as pd
import pytest
from training_runs import arguments

from rlhf_course.command_line import exits
from rlhf_course.command_line.engines import replay
from rlhf_course.data.encoding import write_form
from rlhf_course.policy.save_load import load_tokenizer
from scripts import hand_over, train_ppo

SIZES = "--batch_size=16 --mini_batch_size=16 --steps=1 --min_characters=0".split()
# A setting → another value (None: the engine's default), and a number that then differs.
WRONG = {
    "rloo": {"beta": (None, "advantages"), "epsilon": ("0.1", "policy loss")},
    "grpo": {
        "beta": (None, "policy loss"),  # 0: no KL
        "loss_type": (None, "policy loss"),
        "use_bias_correction_kl": (None, "policy loss"),  # k3 times the ratio
        "scale_rewards": ("none", "advantages"),
    },
    "ppo": {
        "algorithm.lam": (None, "advantages"),
        "algorithm.use_kl_in_reward": (None, "advantages"),
        "actor_rollout_ref.actor.clip_ratio_c": (None, "policy loss"),
        "critic.cliprange_value": (None, "value loss"),
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "ppo"
    assert train_ppo.main([*SIZES, "--output", str(folder)]) == 0
    return folder


def command(run, engine: str, *more: str) -> int:
    return exits.run("hand_over.py", hand_over.main, [str(run), "--to", engine, *more])


def change(folder, name: str, value: str | None, sign: str):
    """A copy of a hand-over with another value of a setting, or without the setting."""
    copy = shutil.copytree(folder, folder.with_name(f"{folder.name}-{name}"))
    lines = (folder / "settings.txt").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(name + sign)]
    assert len(kept) == len(lines) - 1
    (copy / "settings.txt").write_text("\n".join(kept + [f"{name}{sign}{value}"] * bool(value)))
    return copy


def replayed(folder, capsys) -> tuple[int, str]:
    """The exit code and the output of a replay in trl, in this process."""
    return replay.main("trl", folder), capsys.readouterr().out


def test_a_hand_over_has_the_runs_own_method_and_settings(run, capsys):
    with pytest.raises(SystemExit):
        command(run, "verl", "--method", "grpo")
    assert "--method is for trl" in capsys.readouterr().err
    assert command(run, "trl", "--learning_rate", "0.5") == 1
    assert "--learning_rate cannot change" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["rloo", "grpo"])
def test_trl_computes_the_same_and_another_setting_is_noticed(run, method, capsys):
    folder = run.with_name("ppo-to-trl")
    assert command(run, "trl", "--method", method) == 0
    assert "no PPO" in (folder / "README.md").read_text()
    assert len(pd.read_json(folder / "prompts.jsonl", lines=True)) > 16
    code, said = replayed(folder, capsys)
    assert code == 0, said
    for name, (value, number) in WRONG[method].items():
        code, said = replayed(change(folder, name, value, ": "), capsys)
        assert code == 2 and f"DIFFERS: {number}" in said and f"DIFFERS: {name} is" in said
    for place in run.parent.glob("ppo-to-trl*"):
        shutil.rmtree(place)


def test_verl_computes_the_same_and_a_default_left_in_is_noticed(run, monkeypatch):
    if not hand_over.OVERLAY.exists():
        pytest.skip("verl's code is not here: make engines")
    folder = run.with_name("ppo-to-verl")
    assert command(run, "verl") == 0
    prompts = pd.read_parquet(folder / "prompts.parquet")
    assert {"data_source", "prompt", "ability", "reward_model", "extra_info"} == {*prompts}
    cases = [change(folder, n, v, "=") for n, (v, _) in WRONG["ppo"].items()]
    cases.append(shutil.copytree(folder, folder.with_name("misspelt-verl")))
    (cases[-1] / "settings.txt").write_text("algorithm.lamb=0.95")
    start, done = subprocess.run, []

    def replay_all(given, env):  # in one process: verl takes long to load
        done.append(start([*given, *cases], env=env, capture_output=True, text=True))
        return done[0]

    monkeypatch.setattr(subprocess, "run", replay_all)
    assert command(run, "verl", "--check") == 2
    healthy, *others = done[0].stdout.split("logprobs:")[1:]
    assert "verl computes this run's numbers" in healthy
    assert "clip_ratio_c: 1000000000.0; verl's default is 3.0" in healthy
    for said, (name, (_, number)) in zip(others, WRONG["ppo"].items(), strict=True):
        assert f"DIFFERS: {name} is" in said and f"DIFFERS: {number}" in said
    assert "verl fails" in others[-1] and "lamb" in others[-1]
    for place in run.parent.glob("*verl*"):
        shutil.rmtree(place)


def test_adapters_are_merged_and_their_reward_stays_the_same(world, tmp_path, capsys):
    inputs = [f"--dataset={world / 'pairs'}"]
    inputs += [f"--{kind}_adapter={world / kind}" for kind in ("sft", "reward")]
    assert train_ppo.main(arguments(world, tmp_path / "ppo", steps=1)) == 0
    assert command(tmp_path / "ppo", "trl", *inputs) == 0
    assert not [*tmp_path.rglob("ppo-to-trl/**/adapter*")]
    assert command(tmp_path / "ppo", "trl", *inputs) == 1  # somebody may have edited it
    assert "already has files" in capsys.readouterr().err
    code, said = replayed(tmp_path / "ppo-to-trl", capsys)
    assert code == 0, said


CHATML = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def chat_world(world, tmp_path):
    """A copy of the small world; its base is a chat model with a line break after each turn."""
    folder = shutil.copytree(world, tmp_path / "chat-world")
    tokenizer = load_tokenizer(folder / "base")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "base")
    for kind in ("sft", "reward"):
        file = folder / kind / "adapter_config.json"
        config = json.loads(file.read_text())
        config["base_model_name_or_path"] = str(folder / "base")
        file.write_text(json.dumps(config))
    return folder


def test_a_chat_models_rewards_stay_the_same(chat_world, tmp_path, capsys):
    inputs = [f"--dataset={chat_world / 'pairs'}"]
    inputs += [f"--{kind}_adapter={chat_world / kind}" for kind in ("sft", "reward")]
    write_form(chat_world / "reward", "chat")
    assert train_ppo.main(arguments(chat_world, tmp_path / "ppo", steps=1)) == 0
    assert command(tmp_path / "ppo", "trl", *inputs) == 0
    prompts = pd.read_json(tmp_path / "ppo-to-trl/prompts.jsonl", lines=True)["prompt"]
    assert all(text.startswith("user: ") and text.endswith("assistant:") for text in prompts)
    code, said = replayed(tmp_path / "ppo-to-trl", capsys)
    assert code == 0, said


def test_a_reward_adapter_in_another_form_is_refused(chat_world, tmp_path, capsys):
    """Without a record, the adapter may have been trained elsewhere, on whole dialogues."""
    assert train_ppo.main(arguments(chat_world, tmp_path / "ppo", steps=1)) == 0
    inputs = [f"--dataset={chat_world / 'pairs'}"]
    inputs += [f"--{kind}_adapter={chat_world / kind}" for kind in ("sft", "reward")]
    assert command(tmp_path / "ppo", "trl", *inputs) == 1
    assert "reads texts in the form 'template'" in capsys.readouterr().err


def test_what_is_no_run_gets_a_sentence_and_nothing_is_written(run, tmp_path, capsys):
    for given, message in {
        (tmp_path, "trl"): "has no run.json",
        (run, "trl", "--check"): "has no hand-over",
        (run, "trl", "--reward_model", str(tmp_path)): "differs from",
    }.items():
        assert command(*given) == 1
        assert message in capsys.readouterr().err
    state = json.loads((run / "run.json").read_text())
    assert state["settings"]["command"] == "train_ppo.py"
    assert sorted(x.name for x in run.parent.iterdir() if "-to-" in x.name) == []
