"""The three commands on a GPU, simulated or real, and a checkpoint for a CPU to go on from."""

import pytest
from accelerate.state import AcceleratorState, GradientState
from builders import make_policy, make_samples, make_trainer, sgd

from rlhf_course.course.presets import load_preset
from rlhf_course.ppo.checkpoint import save_checkpoint
from rlhf_course.synthetic.build import build_base, build_preferences
from scripts import train_ppo, train_reward_model, train_sft

TRAIN = "--model_name_or_path {base} --max_steps 2 --max_length 112 --logging_steps 1"
TRAIN += " --disable_tqdm true --output_dir"
PREFER = "--dataset {pairs} --train_subset 40 --eval_subset 10 --audit_prompts 4"
LORA = "--use_peft --lora_r 4 --lora_target_modules q_proj v_proj"
PPO = "--batch_size 8 --mini_batch_size 8 --save_every 1"
ADAPTERS = "--sft_adapter {out}/sft/model --reward_adapter {out}/reward/model"
ADAPTERS += " --max_new_tokens 8 --train_subset 60 --output {out}/chat"
COMMANDS = (
    (train_sft, f"--subset 40 {TRAIN} {{out}}/sft"),
    (train_reward_model, f"{PREFER} {LORA} {TRAIN} {{out}}/reward"),
    (train_ppo, f"{PPO} {ADAPTERS} --steps 1"),
    (train_ppo, f"{PPO} {ADAPTERS} --steps 2 --resume"),
    (train_ppo, f"{PPO} --steps 1 --mixed_precision bf16 --output {{out}}/imdb"),
)


@pytest.fixture
def fresh():
    """Have accelerate forget this process's device and precision, before, after and on call."""

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield reset
    reset()


def test_commands_train_evaluate_save_and_resume(tmp_path, fresh, capsys):
    base = build_base(load_preset("05_lora_rlhf_baichuan", "tiny"))
    paths = {"base": base, "pairs": build_preferences(), "out": tmp_path}
    for script, options in COMMANDS:
        assert script.main(options.format(**paths).split()) == 0, capsys.readouterr().err
        fresh()
    saved = {path.name for path in (tmp_path / "chat/policy").iterdir()}
    assert {"adapter_model.safetensors", "v_head.safetensors"} <= saved


def test_a_checkpoint_is_written(tmp_path, fresh):
    policy = make_policy()
    trainer = make_trainer(policy, make_policy(1), sgd(policy))
    trainer.step(*make_samples())
    assert trainer.model.device.type == "cuda"
    save_checkpoint(trainer, tmp_path)
