"""The course on the simulated GPU, in subprocesses: it has to be installed before torch."""

import subprocess

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

SMALL = {"batch_size": 8, "mini_batch_size": 8, "max_new_tokens": 8, "steps": 2}
PAIRS = {"train_subset": 60, "eval_subset": 20, "audit_prompts": 10}
CLINIC = dict.fromkeys(("few_steps", "reward_steps", "dry_steps", "mask_steps"), 11)
CLINIC |= {"pairs": 200, "few_pairs": 100, "sweep_steps": 2, "sweep": "[0.0, 0.3]"}
CLINIC |= {"remedy_steps": 1, "remedy_runs": 1, "eval_prompts": 16}
CHAT = {"sft_subset": 60, "eval_prompts": 8, "save_at": "[1,2]", "sft_epochs": 0.5}
AFTER = {"seeds": 1, "betas": "[0.5]", "ns": "[2]", "steps": 5, "dpo_steps": 5, "text_seeds": 2}
AFTER |= {"text_steps": 1, "text_batch": 8, "group": 2, "text_eval": 8, "best_of": 2}
IMDB = {"steps": 2, "batch_size": 32, "mini_batch_size": 16, "eval_queries": 64}
NOTEBOOKS = {  # few steps: the test is that each cell runs
    "06": SMALL | CLINIC | {"batch_size": 16},
    "05": SMALL | PAIRS | CHAT,
    "01": PAIRS | {"train_subset": 200, "eval_subset": 60, "fix_pairs": 50, "evaluations": 2},
    "07": AFTER,
    "04": IMDB | {"probe_queries": 32},
    "03": {"toy_steps": 2, "toy_betas": "[0.5]", "toy_batch": 32},
    "00": {"steps": 2, "batch_size": 8, "eval_queries": 16},
}


def environment() -> dict[str, str]:
    """Return the environment of a process on the simulated GPU without a network."""
    names = ("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYDEVD_DISABLE_FILE_VALIDATION")
    return pretend_gpu.environment(**dict.fromkeys(names, "1"))


def run(*command) -> subprocess.CompletedProcess:
    """Run Python with these arguments on the simulated GPU."""
    return python(*command, env=environment())


TRAIN = "--model_name_or_path {base} --max_steps 2 --max_length 112 --logging_steps 1"
TRAIN += " --disable_tqdm true --output_dir"
PREFER = "--dataset {pairs} --train_subset 40 --eval_subset 10 --audit_prompts 4"
LORA = "--use_peft --lora_r 4 --lora_target_modules q_proj v_proj"
PPO = "train_ppo.py --batch_size 8 --mini_batch_size 8 --save_every 1"
ADAPTERS = "--sft_adapter {out}/sft/model --reward_adapter {out}/reward/model"
ADAPTERS += " --max_new_tokens 8 --train_subset 60 --output {out}/chat"
COMMANDS = (
    f"train_sft.py --subset 40 {TRAIN} {{out}}/sft",
    f"train_reward_model.py {PREFER} {LORA} {TRAIN} {{out}}/reward",
    f"{PPO} {ADAPTERS} --steps 1",
    f"{PPO} {ADAPTERS} --steps 2 --resume",
    f"{PPO} --steps 1 --mixed_precision bf16 --output {{out}}/imdb",
)
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
    """Build the models that the tests start from, without the GPU."""
    prepare_reward_model(load_preset("01_reward_modeling", "tiny"))
    build_sft_adapter(load_preset("05_lora_rlhf_baichuan", "tiny"))


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_every_cell_of_a_notebook_runs_on_the_gpu(number, tmp_path, monkeypatch, capsys):
    """The kernel runs on the GPU. After so few steps the notebook's checks may fail."""
    log = tmp_path / "operations"
    for name, value in (environment() | {pretend_gpu.LOG: str(log)}).items():
        monkeypatch.setenv(name, value)
    overrides = [f"--override={key}={value}" for key, value in NOTEBOOKS[number].items()]
    code = run_notebooks.main(["--only", number, "--output", str(tmp_path), *overrides])
    printed = capsys.readouterr()
    assert code == 0 or "CheckFailed" in printed.err, printed.out[-2000:] + printed.err[-4000:]
    [executed] = (tmp_path / "notebooks").glob("*.ipynb")
    cells = nbformat.read(executed, 4).cells
    assert all(cell.execution_count for cell in cells if cell.cell_type == "code")
    assert sum(map(int, log.read_text().split())) > 1000


def test_checks_on_the_gpu():
    options = ("-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py")
    done = run("-m", "pytest", *options, ROOT / "tests/on_gpu")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_commands_train_evaluate_save_and_resume_on_the_gpu(tmp_path):
    base = build_base(load_preset("05_lora_rlhf_baichuan", "tiny"))
    paths = {"base": base, "pairs": build_preferences(), "out": tmp_path}
    for command in COMMANDS:
        script, *options = (part.format(**paths) for part in command.split())
        done = run(ROOT / "scripts" / script, *options)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    saved = {path.name for path in (tmp_path / "chat/policy").iterdir()}
    assert {"adapter_model.safetensors", "v_head.safetensors"} <= saved


def test_a_gpu_s_checkpoint_goes_on_on_a_cpu(tmp_path):
    """The samples are given, so the numbers equal those of a run that was only on the CPU."""
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
