"""What the course does on a GPU, on the pretend one: in processes of their own, because it comes
before torch.
"""

import subprocess
from pathlib import Path

import nbformat
import pretend_gpu
import pytest
import run_notebooks
from builders import (
    difference,
    latest_checkpoint,
    make_policy,
    make_samples,
    make_trainer,
    python,
    sgd,
    snapshot,
)

from rlhf_course.course.presets import ROOT, load_preset
from rlhf_course.ppo.checkpoint import load_checkpoint
from rlhf_course.worlds.build import (
    build_base,
    build_preferences,
    build_sft_adapter,
    prepare_reward_model,
)

pytestmark = pytest.mark.skipif(
    not pretend_gpu.available(), reason="the pretend GPU needs a C++ compiler, g++ or $CXX"
)

CHAT = {
    "sft_subset": 60,
    "train_subset": 60,
    "eval_subset": 20,
    "audit_prompts": 10,
    "eval_prompts": 8,
    "steps": 2,
}
CLINIC = {
    "pairs": 200,
    "few_pairs": 100,
    "few_steps": 11,
    "reward_steps": 11,
    "dry_steps": 11,
    "mask_steps": 11,
}
CLINIC |= {"steps": 2, "sweep_steps": 2, "mini_batch_size": 8}
NOTEBOOKS = {  # few steps: what counts is that each cell runs
    "06": (
        CLINIC
        | {
            "batch_size": 16,
            "eval_prompts": 16,
            "max_new_tokens": 8,
            "sweep": "[0.0, 0.3]",
            "remedy_steps": 1,
        }
        | {"remedy_runs": 1}
    ),
    "05": (
        CHAT
        | {
            "batch_size": 8,
            "mini_batch_size": 8,
            "max_new_tokens": 8,
            "save_at": "[1,2]",
            "sft_epochs": 0.5,
        }
    ),
    "01": {
        "train_subset": 200,
        "eval_subset": 60,
        "fix_pairs": 50,
        "audit_prompts": 10,
        "evaluations": 2,
    },
    "07": {
        "seeds": 1,
        "betas": "[0.5]",
        "ns": "[2]",
        "steps": 5,
        "dpo_steps": 5,
        "text_seeds": 2,
        "text_steps": 1,
    }
    | {"text_batch": 8, "group": 2, "text_eval": 8, "best_of": 2},
    "04": {
        "steps": 2,
        "batch_size": 32,
        "mini_batch_size": 16,
        "eval_queries": 64,
        "probe_queries": 32,
    },
    "03": {"toy_steps": 2, "toy_betas": "[0.5]", "toy_batch": 32},
    "00": {"steps": 2, "batch_size": 8, "eval_queries": 16},
}


def environment() -> dict[str, str]:
    """Of a process on the pretend GPU, without a network."""
    return pretend_gpu.environment(
        HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYDEVD_DISABLE_FILE_VALIDATION="1"
    )


def run(*command) -> subprocess.CompletedProcess:
    """Python with these arguments on the pretend GPU."""
    return python(*command, env=environment())


def commands(output: Path) -> list[subprocess.CompletedProcess]:
    """SFT, reward model and PPO with what they leave, resumed; and PPO on reviews. Ends with the
    first that fails.
    """
    scripts, base, done = (
        ROOT / "scripts",
        build_base(load_preset("05_lora_rlhf_baichuan", "tiny")),
        [],
    )
    trl = ["--max_length", 112, "--logging_steps", 1, "--disable_tqdm", "true"]
    sft = [
        "--model_name_or_path",
        base,
        "--subset",
        40,
        "--max_steps",
        2,
        "--output_dir",
        output / "sft",
        *trl,
    ]
    pairs = [
        "--dataset",
        build_preferences(),
        "--train_subset",
        40,
        "--eval_subset",
        10,
        "--audit_prompts",
        4,
    ]
    reward = [
        "--model_name_or_path",
        base,
        "--use_peft",
        "--lora_r",
        4,
        "--max_steps",
        2,
        *pairs,
        *trl,
    ]
    reward += ["--lora_target_modules", "q_proj", "v_proj", "--output_dir", output / "reward"]
    adapters = ["--sft_adapter", output / "sft/model", "--reward_adapter", output / "reward/model"]
    short = ["--batch_size", 8, "--mini_batch_size", 8, "--save_every", 1]
    chat = [
        "train_ppo.py",
        *adapters,
        *short,
        "--max_new_tokens",
        8,
        "--train_subset",
        60,
        "--output",
        output / "chat",
    ]
    for script, *options in (
        ["train_sft.py", *sft],
        ["train_reward_model.py", *reward],
        [*chat, "--steps", 1],
        [*chat, "--steps", 2, "--resume"],
        [
            "train_ppo.py",
            *short,
            "--steps",
            1,
            "--mixed_precision",
            "bf16",
            "--output",
            output / "imdb",
        ],
    ):
        done.append(run(scripts / script, *options))
        if done[-1].returncode:
            break
    return done


CHECKPOINT = """
import sys
sys.path.insert(0, {tests!r})
from builders import make_policy, make_samples, make_trainer, sgd
from rlhf_course.ppo.checkpoint import save_checkpoint
policy = make_policy()
trainer = make_trainer(policy, make_policy(1), sgd(policy))
trainer.step(*make_samples())
assert trainer.model.device.type == "cuda"
save_checkpoint(trainer, {folder!r})
"""


@pytest.fixture(scope="module", autouse=True)
def built():
    """What all of them start from is built before, without the GPU."""
    prepare_reward_model(load_preset("01_reward_modeling", "tiny"))
    build_sft_adapter(load_preset("05_lora_rlhf_baichuan", "tiny"))


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_every_cell_of_a_notebook_runs_on_the_gpu(number, tmp_path, monkeypatch, capsys):
    """So few steps teach little: checks may fail, nothing else may. The runner is here, the cells
    are on the GPU.
    """
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    overrides = [f"--override={key}={value}" for key, value in NOTEBOOKS[number].items()]
    code = run_notebooks.main(["--only", number, "--output", str(tmp_path), *overrides])
    said = capsys.readouterr()
    assert code == 0 or "CheckFailed" in said.err, said.out[-2000:] + said.err[-4000:]
    [executed] = (tmp_path / "notebooks").glob("*.ipynb")
    text = executed.read_text()
    if number != "01":  # which has no PPO
        assert "PPO on cuda" in text
    counts = [
        cell.execution_count for cell in nbformat.reads(text, 4).cells if cell.cell_type == "code"
    ]
    assert all(counts)


def test_checks_on_the_gpu():
    options = ("-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py")
    done = run("-m", "pytest", *options, ROOT / "tests/on_gpu")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_commands_train_evaluate_save_and_resume_on_the_gpu(tmp_path):
    for done in commands(tmp_path):
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert {"adapter_model.safetensors", "v_head.safetensors"} <= {
        p.name for p in (tmp_path / "chat/policy").iterdir()
    }


def test_a_gpu_s_checkpoint_goes_on_on_a_cpu(tmp_path):
    """With the numbers of a run that was on a CPU all along, because these samples are given."""
    written = run("-c", CHECKPOINT.format(tests=str(ROOT / "tests"), folder=str(tmp_path)))
    assert written.returncode == 0, written.stderr[-2000:]
    trainers = []
    for policy in (make_policy(), make_policy(5)):
        trainers.append(make_trainer(policy, make_policy(1), sgd(policy)))
    here, resumed = trainers
    here.step(*make_samples())
    load_checkpoint(resumed, latest_checkpoint(tmp_path))
    assert resumed.current_step == 1 and resumed.model.device.type == "cpu"
    assert difference(snapshot(here.model), snapshot(resumed.model)) < 1e-5
    losses = [trainer.step(*make_samples(seed=1))["ppo/loss/total"] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
