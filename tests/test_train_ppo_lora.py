"""train_ppo.py with adapters: what moves and what is saved, resuming, options, refusals; and the
three commands.
"""

import pytest
import torch
from builders import difference, edit_json, snapshot
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from training_runs import arguments, make_adapters, make_base
from transformers import AutoTokenizer

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.command_line import ppo_options
from rlhf_course.course.presets import load_preset
from scripts import train_ppo as script


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """A finished run of three steps, its trainer, and the weights that it began with."""
    output, kept = tmp_path_factory.mktemp("trained"), []
    build = script.build_chat

    def keep(*given):
        run = build(*given)
        kept.extend([run.trainer, snapshot(run.trainer.model)])
        generate = run.trainer.generate

        def sample(*queries, **how):
            assert how["batch_size"] == 3
            return generate(*queries, **how)

        run.trainer.generate = sample
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "build_chat", keep)
        options = "--target_kl=0.05 --sample_batch_size=3 --lam=0.9 --eval_prompts=0".split()
        options += "--save_at 2 3".split()
        assert script.main(arguments(world, output, *options)) == 0
    return output, *kept


def test_only_the_policy_moves_and_the_run_is_the_notebooks(world, trained):
    _, trainer, before = trained
    after = trainer.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if ".policy." in name or name.startswith("v_head.")} == moved
    for name, weight in load_file(world / "sft" / "adapter_model.safetensors").items():
        name = name.replace(".weight", ".ref.weight")
        assert torch.equal(after[f"pretrained_model.{name}"], weight)
    config, eos = trainer.config, trainer.tokenizer.eos_token_id
    assert config.begin_suppress_tokens == [eos] and trainer.kl_ctl.value == 0.2
    assert trainer.ref_model is None and trainer.current_step == 3 and len(trainer.dataset) == 56
    assert max(map(len, trainer.dataset["input_ids"])) <= 64 - 8


def test_the_saved_policy_loads_in_plain_peft(trained):
    output, trainer, _ = trained
    names = {"checkpoint-3", "policy", "policy-2", "run.json", "log.jsonl"}
    assert {path.name for path in output.iterdir()} == names
    config, settings = trainer.config, load_preset(ppo_options.CHAT, "tiny")
    assert config.vf_coef == settings.vf_coef
    assert (config.target_kl, config.lam) == (0.05, 0.9)
    plain = AutoPeftModelForCausalLM.from_pretrained(output / "policy").eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "policy")
    ids = tokenizer("\n\nHuman: What is fog?", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(plain(ids).logits, trainer.model(ids)[0])
    again = AutoModelForCausalLMWithValueHead.from_pretrained(output / "policy")
    assert difference(trainer.model.v_head.state_dict(), again.v_head.state_dict()) == 0


def test_scores_are_those_of_the_reward_adapter_squeezed_where_asked(world, tmp_path):
    more, runs = {"dtype": "bfloat16", "gradient_checkpointing": "true"}, []
    for squeezed in ("false", "true"):
        words = arguments(world, tmp_path, **more, sigmoid_score=squeezed, mixed_precision="bf16")
        runs.append(script.build_chat(*script.parse_arguments(words)))
    texts = ["\n\nHuman: What is fog?\n\nAssistant:"] * 2, ["rain", "snow wind sun"]
    raw, squeezed = (run.score(*texts) for run in runs)
    assert raw.std() > 1e-3 and torch.equal(raw.sigmoid(), squeezed)
    trainer, eos = runs[0].trainer, runs[0].trainer.tokenizer.eos_token
    for name, p in trainer.model.named_parameters():
        is_trained = "lora_" in name or "v_head" in name
        assert p.dtype == (torch.float32 if is_trained else torch.bfloat16)
    batch = next(iter(trainer.dataloader))
    responses = trainer.generate(batch["input_ids"], return_prompt=False, **runs[0].generation)
    answers = runs[0].decode(responses)
    stats = trainer.step(batch["input_ids"], responses, runs[0].score(batch["query"], answers))
    assert abs(stats["objective/kl"]) < 1e-4
    assert all(answer == answer.strip() and eos not in answer for answer in answers)


def test_options_come_from_file_and_command_line(world, tmp_path):
    file = tmp_path / "my.yaml"
    adapters = f"sft_adapter: {world / 'sft'}\nreward_adapter: {world / 'reward'}\n"
    file.write_text(f"{adapters}preset: full\nsteps: 7\ntrain_subset: null\nreport_to: wandb\n")
    options, settings = script.parse_arguments(
        [f"--config={file}", "--steps", "9", "--learning_rate=1e-4"]
    )
    assert options.output.name == "train_ppo" and options.gradient_checkpointing
    assert settings.steps == 9 and settings.learning_rate == 1e-4 and settings.log_with == "wandb"
    assert settings.train_subset is None
    assert settings.batch_size == load_preset(ppo_options.CHAT, "full").batch_size


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--sft_adapter=WORLD/sft", "needs --reward_adapter; train_reward_model.py --use_peft"),
        ("--eval_prompts=-1", "--eval_prompts must be at least 0; got -1"),
        ("--sft_adapter=WORLD/base --reward_adapter=WORLD/reward", "has no adapter_config.json"),
        ("--quantization=4bit", "needs adapters"),
        ("--sample_batch_size=0", "--sample_batch_size must be at least 1"),
        ("--steps=many", "--steps: invalid int value: 'many'"),
        ("--steps=0", "takes a whole number of at least 1"),
        ("--mini_batch_size=3", "must be a multiple of 3"),
        ("--sft_adapter=WORLD/sft --reward_adapter=WORLD/reward --sft_epochs=2", "--sft_epochs=2"),
    ],
)
def test_bad_options_end_with_a_sentence(given, message, world, fails):
    fails(script, given.replace("WORLD", str(world)).split(), message)


@pytest.fixture(scope="module")
def others(world, tmp_path_factory):
    """Adapters on another base: wider, under its own name, and under the name of the first."""
    folder = tmp_path_factory.mktemp("others")
    make_base(folder / "base", AutoTokenizer.from_pretrained(world / "base"), width=16)
    for name in ("own", "renamed"):
        make_adapters(folder / "base", folder / name)
    file, base = folder / "renamed/reward/adapter_config.json", str(world / "base")
    edit_json(file, base_model_name_or_path=base)
    return folder


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("reward_adapter=WORLD/sft", "has no score head with one output"),
        ("reward_adapter=OTHERS/own/reward", "The adapters' bases"),
        ("reward_adapter=OTHERS/renamed/reward", "size mismatch"),
        ("dataset=./nowhere", "No dataset folder at ./nowhere"),
        ("max_length=129", "--max_length 129 exceeds the base's 128 positions"),
        ("max_length=10", "The dataset has 0 rows, fewer than one batch of 8"),
        ("report_to=paper", "choose None, 'wandb' or 'tensorboard'"),
    ],
)
def test_bad_inputs_end_with_a_sentence_and_leave_nothing(
    given, message, world, others, tmp_path, fails
):
    name, _, value = given.partition("=")
    value = value.replace("WORLD", str(world)).replace("OTHERS", str(others))
    fails(script, arguments(world, tmp_path / "out", **{name: value}), message)
    assert not (tmp_path / "out").exists()
