"""Faults that used to go on silently: each raises, warns, or gives the right numbers."""

import json
import os
import shutil
import warnings
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
import torch
from accelerate.state import AcceleratorState
from builders import (
    EOS,
    SAMPLING,
    PadTokenizer,
    invalid,
    make_policy,
    make_samples,
    make_trainer,
    snapshot,
    write_rows,
)
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2ForSequenceClassification

from dev.exercises import make_handout
from dev.exercises.make_exercises import SETS, notebook
from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from rlhf_course.command_line import run_report, trl_run
from rlhf_course.course.presets import ROOT
from rlhf_course.course.shipped import shipped
from rlhf_course.data import load_pairs
from rlhf_course.evaluation import evaluate
from rlhf_course.policy.adapters import RewardAdapter
from rlhf_course.policy.reference import create_reference_model
from rlhf_course.ppo.checkpoint import load_checkpoint, save_checkpoint
from rlhf_course.ppo.detectors import starts_apart
from rlhf_course.runtime import tracking
from scripts import grade, read_log, train_ppo

QUERIES = [torch.tensor([1, 2, 3])] * 8


def test_a_policy_as_its_own_reference_stays_trainable():
    policy = make_policy()
    for reference in (policy, AutoModelForCausalLMWithValueHead(policy.pretrained_model)):
        with invalid("shares weights that the policy trains"):
            make_trainer(policy, reference)
    make_trainer(policy)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length_sampler": iter([3, 0] * 4).__next__}, "at least 1 token"),
        ({"stop_strings": ["."], "max_new_tokens": 3}, "would add EOS that was not sampled"),
    ],
)
def test_settings_of_sampling_that_spoil_responses(settings, message):
    with invalid(message):
        make_trainer().generate(QUERIES, **SAMPLING, **settings)


def test_forced_tokens_are_not_sampled():
    with pytest.warns(UserWarning, match=f"forced_eos_token_id={EOS}"):
        make_trainer().generate(QUERIES, **SAMPLING, max_new_tokens=3, forced_eos_token_id=EOS)


def test_policies_that_nobody_meant():
    from_pretrained = AutoModelForCausalLMWithValueHead.from_pretrained
    with invalid("num_shared_layers is 12; use 1 to 1"):
        create_reference_model(make_policy(), 12)
    with invalid("v_head_init_strategy is 'nromal'"):
        from_pretrained(make_policy().pretrained_model, v_head_init_strategy="nromal")
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    adapter = get_peft_model(make_policy().pretrained_model, lora)
    with invalid("The model is an adapter"):
        from_pretrained(adapter, lora)


def test_padding_that_is_not_eos_is_seen_and_masks_may_be_one_tensor():
    queries, _, scores = make_samples()
    responses, trainer = [torch.tensor([4, 5, 6, 7, 7])] * 8, make_trainer()
    trainer.tokenizer = SimpleNamespace(eos_token_id=EOS, pad_token_id=7)
    masks = torch.tensor([[1, 1, 1, 0, 0]] * 8)
    with pytest.warns(UserWarning, match="8 of 8 responses are padded"):
        trainer.step(queries, responses, scores, masks)


def test_another_optimizer_leaves_the_weights(tmp_path):
    policy = make_policy()
    groups = [{"params": [p]} for p in policy.parameters()]
    saved = make_trainer(policy, optimizer=torch.optim.Adam(groups, 1e-3))
    saved.step(*make_samples())
    folder = save_checkpoint(saved, tmp_path)
    trainer = make_trainer()
    before = snapshot(trainer.policy)
    with pytest.raises(ValueError, match="number of parameter groups"):
        load_checkpoint(trainer, folder)
    assert all(weight.equal(before[name]) for name, weight in snapshot(trainer.policy).items())


def test_precision_of_an_earlier_trainer_is_named():
    AcceleratorState._reset_state(True)
    make_trainer(accelerator_kwargs={"mixed_precision": "bf16"})
    with pytest.warns(UserWarning, match="An earlier trainer set mixed_precision bf16"):
        make_trainer()
    AcceleratorState._reset_state(True)
    with warnings.catch_warnings(action="error"):
        make_trainer()


def test_a_dataset_whose_columns_ppo_does_not_know():
    rows = Dataset.from_dict({"prompt": ["a"] * 8, "ids": [[1]] * 8})
    config = PPOConfig(batch_size=8, mini_batch_size=8)
    with invalid(r"no column query or input_ids, only \['prompt', 'ids'\]"):
        PPOTrainer(config, make_policy(), None, PadTokenizer(), dataset=rows)


def test_transcripts_without_their_first_blank_line(tmp_path):
    talk = "Human: Which film?\n\nAssistant:"
    row = {"prompt": talk, "chosen": f"{talk} Heat.", "rejected": f"{talk} No."}
    for rows in ([row], [{key: row[key] for key in ("chosen", "rejected")}]):
        pairs, _ = load_pairs(write_rows(tmp_path / str(len(rows[0])), rows), "train")
        assert pairs[0] == {"prompt": f"\n\n{talk}", "chosen": "Heat.", "rejected": "No."}


def test_a_copy_of_a_data_file_is_refused(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    shutil.copy(write_rows(tmp_path, rows) / "train.jsonl", tmp_path / "train.jsonl.bak")
    with invalid("are the same split"):
        load_pairs(tmp_path, "train")


def test_evaluate_knows_the_token_that_ended_sampling():
    trainer = make_trainer()
    trainer.tokenizer = SimpleNamespace(
        eos_token_id=EOS, pad_token_id=EOS, batch_decode=lambda rows, **_: ["x"] * len(rows)
    )
    ends = list(range(40))  # every token ends a response
    table = evaluate(trainer, lambda q, r: torch.zeros(8), QUERIES, **SAMPLING, eos_token_id=ends)
    assert table["finished"].all() and (table["length"] == 1).all()


def test_a_vertical_bar_stays_in_its_cell():
    logged = {}
    tracker = SimpleNamespace(
        name="tensorboard", writer=SimpleNamespace(add_histogram=lambda *_: None)
    )
    accelerator = SimpleNamespace(
        gather=lambda x: x,
        is_main_process=True,
        trackers=[tracker],
        log=lambda values, step: logged.update(values),
    )
    tracking.log_step(accelerator, {}, {"query": ["a | b"]}, torch.zeros(1), 0)
    assert logged["game_log"].splitlines()[-1] == r"a \| b | 0.0"


def test_the_runner_keeps_what_the_parameters_cell_says(tmp_path, monkeypatch):
    from scripts import run_notebooks

    seen = {}
    monkeypatch.setattr(
        run_notebooks.papermill, "execute_notebook", lambda *given, **_: seen.update(given[2])
    )
    for more, names in (
        ([], set()),
        (["--seed", "0", "--override", "steps=3"], {"seed", "overrides"}),
    ):
        seen.clear()
        options = ["--only", "00", "--output", str(tmp_path), *more]
        run_notebooks.run_cells("00_hello_rlhf", run_notebooks.parse_arguments(options))
        assert seen.keys() == {"preset", "output_dir"} | names


def test_people_whose_folders_have_the_same_names(tmp_path):
    card = {"wall_s": 1, "peak_rss_mb": 1, "checks": {"a": {"passed": True}}}
    for who in ("alice", "bob"):
        folder = tmp_path / who / "course" / "course" / "build" / "run_cards"
        folder.mkdir(parents=True)
        (folder / "00_x.json").write_text(json.dumps(card))
    found = run_report.write([tmp_path], tmp_path / "report.html")
    assert [entry["who"].split("/")[0] for entry in found] == ["alice", "bob"]


def test_grades_of_a_copy_of_a_missing_notebook_and_of_others(tmp_path, capsys):
    path, solved = notebook(SETS[0], True)
    folder = tmp_path / "in" / "alice"
    folder.mkdir(parents=True)
    nbformat.write(notebook(SETS[0], False)[1], folder / "00_hello_rlhf-Copy1.ipynb")
    nbformat.write(solved, folder / "00_hello_rlhf.ipynb")
    given = [str(tmp_path / "in"), "--seed", "5000", "--output", str(tmp_path / "out")]
    grade.main([*given, "--only", "00"])
    assert "alice: 4 of 4 points" in capsys.readouterr().out
    with invalid("would lose the grade of alice in 00_hello_rlhf/"):
        grade.main([*given, "--only", "01"])
    grade.main([*given[:-1], str(tmp_path / "other"), "--only", "01"])
    rows = (tmp_path / "other" / "grades.csv").read_text().splitlines()[1:]
    assert rows and all(",missing,No notebook defines this function." in row for row in rows)
    (mine := tmp_path / "class" / "alice" / "results.json").parent.mkdir(parents=True)
    mine.write_text('{"score": 17, "comment": "oral exam"}')
    with invalid("was not written by grade.py"):
        grade.main([*given[:-1], str(tmp_path / "class"), "--only", "00", "--format", "gradescope"])
    assert "oral exam" in mine.read_text()
    grade.main([str(folder), *given[1:-1], str(folder), "--only", "00", "--format", "classroom50"])
    assert json.loads((folder / "result.json").read_text())["score"] == 4


def test_a_split_in_the_root_and_in_a_subfolder_is_refused(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    write_rows(write_rows(tmp_path, rows), rows * 2, "data/train-00000-of-00001.parquet")
    with invalid("train.jsonl .*the same split"):
        load_pairs(tmp_path, "train")


def test_csv_rows_with_more_fields_than_the_header(tmp_path):
    write_rows(tmp_path, b"prompt,chosen,rejected\nq,a,b,anna\nr,c,d,anna\n", "train.csv")
    with invalid("more fields than the header"):
        load_pairs(tmp_path, "train")


def test_a_folder_of_ones_own_comes_before_the_projects(tmp_path, monkeypatch):
    name = "models/gpt2-imdb-mini"
    assert shipped(name) == str(ROOT / name)
    monkeypatch.chdir(tmp_path)
    assert shipped(name) == str(ROOT / name)
    (tmp_path / name).mkdir(parents=True)
    assert shipped(name) == str(tmp_path / name)


def test_options_are_not_guessed_and_may_have_dashes(tmp_path):
    with pytest.raises((SystemExit, ValueError)):
        train_ppo.parse_arguments(["--prese", "full"])
    for name in ("a", "b"):
        write_rows(tmp_path / name, b"{}", "adapter_config.json")
    given = [f"--sft-adapter={tmp_path / 'a'}", f"--reward-adapter={tmp_path / 'b'}"]
    assert train_ppo.parse_arguments(given)[0].reward_adapter == str(tmp_path / "b")


def test_the_best_checkpoint_is_kept(tmp_path):
    names = [f"checkpoint-{step}" for step in (1, 2, 3)]
    for name in names:
        (tmp_path / name).mkdir()
    args = SimpleNamespace(output_dir=str(tmp_path), save_total_limit=1)
    steps = trl_run.Steps(SimpleNamespace(args=args), SimpleNamespace(checkpoint=None), None)
    best = {"best_model_checkpoint": str(tmp_path / names[0]), "is_world_process_zero": True}
    for step in (1, 2, 3):
        steps.on_save(args, SimpleNamespace(global_step=step, **best), None)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [names[0], names[2]]


def test_a_copy_of_a_trained_policy_as_the_reference():
    trainer = make_trainer()
    trainer.step(*make_samples())
    with pytest.warns(UserWarning, match="PPO has trained this policy already"):
        make_trainer(trainer.policy, create_reference_model(trainer.policy))


def test_a_reward_adapter_that_trains_the_base_too(tmp_path):
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 64}
    judge = GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=1, pad_token_id=0))
    lora = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    own = LoraConfig(task_type="SEQ_CLS", modules_to_save=["score", "wte"], **lora)
    get_peft_model(judge, own).save_pretrained(tmp_path)
    network = get_peft_model(make_policy(n_layer=1).pretrained_model, LoraConfig(**lora))
    with invalid("also trains .*wte.* which belongs to the policy's base"):
        RewardAdapter(AutoModelForCausalLMWithValueHead(network), tmp_path)


def test_a_log_that_begins_at_zero_and_the_last_state(tmp_path, capsys):
    rows = [{"step": step, "objective/kl": step, "tokens/responses_len_mean": 9} for step in (0, 1)]
    log = pd.DataFrame(rows).set_index("step")
    assert not starts_apart(log).any() and starts_apart(log.loc[1:]).any()
    for step in (9, 120):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = {"global_step": step, "log_history": [{"step": step, "loss": 1}]}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    os.utime(tmp_path / "checkpoint-120" / "trainer_state.json", (0, 0))  # as cp -r may leave it
    assert read_log.read_rows(tmp_path) == [{"step": 120, "loss": 1}]
    assert "checkpoint-120" in capsys.readouterr().out


def test_files_of_others_and_archives_of_students(tmp_path, capsys):
    (mine := tmp_path / "teaching" / "lecture.ipynb").parent.mkdir()
    mine.write_text("{}")
    with pytest.raises(SystemExit, match="has other files"):
        make_handout.main(["--output", str(mine.parent)])
    folder = tmp_path / "in" / "alice"
    folder.mkdir(parents=True)
    nbformat.write(notebook(SETS[0], True)[1], folder / "00_hello_rlhf.ipynb")
    (tmp_path / "in" / "bob.zip").touch()
    given = [str(tmp_path / "in"), "--seed", "5000", "--output", str(tmp_path / "out"), "--only"]
    with invalid("--only 1 matches no notebook"):
        grade.main([*given, "00", "1"])
    grade.main([*given, "00"])
    assert "Not graded: bob.zip" in capsys.readouterr().out


def test_a_notebook_run_again_by_hand_is_no_longer_failed(tmp_path):
    card = {"wall_s": 1, "peak_rss_mb": 1, "checks": {"a": {"passed": True}}}
    run_report.add_results(tmp_path, {"00_x": "cell 8: NameError"})
    (file := tmp_path / "run_cards" / "00_x.json").parent.mkdir()
    file.write_text(json.dumps(card))
    for age, problem in ((-60, "cell 8: NameError"), (60, "")):
        later = (tmp_path / run_report.RESULTS).stat().st_mtime + age
        os.utime(file, (later, later))
        assert run_report.read(file, tmp_path / "report.html")["problem"] == problem
