"""The course on the simulated GPU, in subprocesses: it has to be installed before torch."""

import json
import os

import nbformat
import pytest
from builders import (
    difference,
    guarded,
    latest_checkpoint,
    make_policy,
    make_samples,
    make_trainer,
    python,
    sgd,
    snapshot,
)

from dev import simulated_gpu
from dev.simulated_hub import serve
from dev.simulated_hub.repositories import repositories
from rlhf_course.course.presets import ROOT, load_preset
from rlhf_course.ppo.checkpoint import load_checkpoint
from rlhf_course.synthetic.build import (
    build_sft_adapter,
    prepare_reward_model,
)
from scripts import run_notebooks

pytestmark = pytest.mark.skipif(
    not simulated_gpu.available(), reason="the simulated GPU needs a C++ compiler, g++ or $CXX"
)

CLINIC = dict.fromkeys(("batch_size", "mini_batch_size", "eval_prompts"), 16)
CLINIC |= {"pairs": 200, "reward_steps": 4, "ppo_epochs": 1, "max_new_tokens": 8}
BUGS = CLINIC | {"mask_steps": 4, "remedy_steps": 1, "remedy_runs": 1}
OVER = CLINIC | {"few_pairs": 100, "few_steps": 4, "steps": 2, "sweep_steps": 2}
TEXT = {"text_steps": 1, "text_batch": 8, "group": 2, "text_eval": 8, "best_of": 2}
TEXT |= {"text_seeds": 2, "records": "null", "text_look": 1, "live_steps": 1}
REAL = {
    "steps": 2,
    "batch_size": 16,
    "mini_batch_size": 16,
    "pairs": 16,
    "few_pairs": 8,
    "held_out": 30,
}
REAL |= {"best_of": 2, "cost_texts": 4, "cost_questions": 4}
NOTEBOOKS = {  # few steps: the test is that each cell runs
    "10": REAL,
    "06": OVER | {"sweep": "[0.0, 0.3]"},
    "silent_bugs": BUGS,
    "over_optimization": OVER,
    "methods_on_real_text": TEXT,
    "03": {"toy_steps": 2, "toy_betas": "[0.5]", "toy_batch": 32},
    "00": {"steps": 2, "batch_size": 8, "eval_queries": 16},
}
REWARD = {"train_subset": 200, "eval_subset": 60, "fix_pairs": 60, "audit_prompts": 20, "lora_r": 4}
REWARD |= {"evaluations": 2}
IMDB = {"steps": 2, "batch_size": 16, "mini_batch_size": 16, "eval_queries": 32}
LAB = {"steps": 2, "one_by_one": 1, "batch_size": 16, "mini_batch_size": 16}
CHAT = {"sft_subset": 60, "train_subset": 60, "eval_subset": 40, "steps": 2, "audit_prompts": 20}
CHAT |= {"save_at": "[1,2]", "eval_prompts": 8, "max_new_tokens": 12, "max_prompt": 64}
CHAT |= {"batch_size": 8, "mini_batch_size": 8}
FULL = {  # settings, and the checks that so short a run has to pass
    "05_lora_rlhf_baichuan": (
        CHAT,
        ("KL is 0 at step 1", "reference and reward adapters are unmoved"),
    ),
    "01_reward_modeling": (REWARD, ("loss starts at ln 2", "reloads unchanged")),
    "04_gpt2_imdb_ppo": (IMDB, ("reloads unchanged",)),
    "imdb_lab": (LAB, ("KL is 0 at step 1",)),
}


def environment() -> dict[str, str]:
    """Return the environment of a process on the simulated GPU without a network."""
    names = ("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYDEVD_DISABLE_FILE_VALIDATION")
    return simulated_gpu.environment(**dict.fromkeys(names, "1"))


@pytest.fixture(scope="module", autouse=True)
def built():
    """Build the models that the tests start from, without the GPU."""
    prepare_reward_model(load_preset("01_reward_modeling", "tiny"))
    build_sft_adapter(load_preset("05_lora_rlhf_baichuan", "tiny"))


@pytest.fixture
def execute(tmp_path, monkeypatch, capsys):
    """Run a notebook, its kernel on the GPU. After so few steps its checks may fail."""

    def run(number: str, variables: dict[str, str], overrides: dict, *options: str) -> None:
        log = tmp_path / "operations"
        for name in os.environ.keys() - variables.keys():
            monkeypatch.delenv(name)
        for name, value in (variables | {simulated_gpu.LOG: str(log)}).items():
            monkeypatch.setenv(name, value)
        options += tuple(f"--override={key}={value}" for key, value in overrides.items())
        code = run_notebooks.main(["--only", number, "--output", str(tmp_path), *options])
        printed = capsys.readouterr()
        assert code == 0 or "CheckFailed" in printed.err, printed.out[-2000:] + printed.err[-4000:]
        [executed] = (tmp_path / "notebooks").glob("*.ipynb")
        cells = nbformat.read(executed, 4).cells
        assert all(cell.execution_count for cell in cells if cell.cell_type == "code")
        assert sum(map(int, log.read_text().split())) > 1000

    return run


@pytest.mark.notebook
@pytest.mark.parametrize("number", NOTEBOOKS)
def test_every_cell_of_a_notebook_runs_on_the_gpu(number, execute):
    execute(number, environment(), NOTEBOOKS[number])


@pytest.mark.notebook
@pytest.mark.parametrize("name", FULL)
def test_a_notebook_at_preset_full_runs_with_its_own_ids(name, execute, tmp_path):
    """On the GPU, and on a hub that serves toys under these ids; nothing else is asked for."""
    overrides, must_pass = FULL[name]
    with serve(repositories(tmp_path)) as hub:
        variables = hub.environment(tmp_path / "home") | {"OMP_NUM_THREADS": "1"}
        variables |= guarded(tmp_path, simulated_gpu.environment(), simulated_gpu.AT_START)
        execute(name, variables, overrides, "--preset=full")
        hub.check(tmp_path)
    card = json.loads((tmp_path / "run_cards" / f"{name}.json").read_text())
    assert card["preset"] == "full"
    assert all(card["checks"][check]["passed"] for check in must_pass)


def test_checks_pass_on_the_gpu_and_its_checkpoint_goes_on_on_a_cpu(tmp_path):
    """The samples are given, so the numbers equal those of a run that was only on the CPU."""
    options = ("-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py")
    options += (f"--basetemp={tmp_path / 'gpu'}", ROOT / "tests/on_gpu")
    done = python("-m", "pytest", *options, env=environment())
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    trainers = []
    for policy in (make_policy(), make_policy(5)):
        trainers.append(make_trainer(policy, make_policy(1), sgd(policy)))
    here, resumed = trainers
    here.step(*make_samples())
    load_checkpoint(resumed, latest_checkpoint(tmp_path / "gpu/test_a_checkpoint_is_written0"))
    assert resumed.current_step == 1 and resumed.model.device.type == "cpu"
    assert difference(snapshot(here.model), snapshot(resumed.model)) < 1e-5
    losses = [trainer.step(*make_samples(seed=1))["ppo/loss/total"] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
