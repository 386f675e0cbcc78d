"""PPO in one file: its step is the trainer's, and the list of what can go wrong, in
deeper/parts_of_ppo, names tests that exist.
"""

import ast
import re
import runpy

import nbformat
import numpy as np
import pytest
import torch
from builders import EOS, SCRIPTS, PadTokenizer, make_policy, make_samples, sgd

from rlhf_course import PPOConfig, PPOTrainer
from rlhf_course.course.presets import ROOT

STATS = {  # of ppo_minimal.py: key of PPOTrainer.step
    "kl": "objective/kl",
    "score": "ppo/mean_scores",
    "policy_loss": "ppo/loss/policy",
    "value_loss": "ppo/loss/value",
    "entropy": "ppo/policy/entropy",
    "approxkl": "ppo/policy/approxkl",
    "clipfrac": "ppo/policy/clipfrac",
    "explained_var": "ppo/val/var_explained",
}


@pytest.fixture(scope="module")
def minimal() -> dict:
    return runpy.run_path(str(SCRIPTS / "ppo_minimal.py"))


@pytest.mark.parametrize("mini_batch_size", [8, 4])
def test_a_step_equals_the_trainers(minimal, mini_batch_size):
    policy, reference = make_policy(), make_policy(1)
    model, ref_model = (minimal["ActorCritic"](make_policy(i).pretrained_model) for i in (0, 1))
    model.value.load_state_dict(policy.v_head.summary.state_dict())
    queries, responses, scores = make_samples(8)
    sizes = {"batch_size": 8, "mini_batch_size": mini_batch_size}
    trainer = PPOTrainer(
        PPOConfig(**sizes, init_kl_coef=0.3),
        policy,
        reference,
        PadTokenizer(),
        optimizer=sgd(policy),
    )
    np.random.seed(3)
    expected = trainer.step(queries, responses, scores)

    settings = minimal["Settings"](**sizes, ppo_epochs=4)
    samples = minimal["collate"](queries, responses, "cpu")
    np.random.seed(3)
    stats = minimal["ppo_step"](
        model, ref_model, sgd(model), samples, torch.stack(scores), kl_coef=0.3, settings=settings
    )
    for name, key in STATS.items():
        assert stats[name] == pytest.approx(expected[key], abs=1e-5), name
    assert stats["clipfrac"] > 0
    if mini_batch_size == 8:  # then the mean over mini-batches is the mean over tokens
        assert stats["ratio"] == pytest.approx(expected["ppo/policy/ratio"].mean(), abs=1e-5)
    moved = 0.0
    start = make_policy().pretrained_model.parameters()
    theirs = policy.pretrained_model.parameters()
    for mine, other, before in zip(model.lm.parameters(), theirs, start, strict=True):
        assert torch.allclose(mine, other, atol=1e-5, rtol=0)
        moved = max(moved, (mine - before).abs().max().item())
    assert moved > 1e-3
    assert torch.allclose(model.value.weight, policy.v_head.summary.weight, atol=1e-5, rtol=0)
    kl_coef = minimal["next_kl_coef"](0.3, stats["kl"], settings)
    assert kl_coef == pytest.approx(trainer.kl_ctl.value, rel=1e-6)


def test_a_response_ends_with_its_first_eos(minimal):
    model = minimal["ActorCritic"](make_policy().pretrained_model)
    torch.manual_seed(0)
    responses = minimal["sample"](model, [torch.tensor([1, 2]), torch.tensor([3])] * 20, 12, EOS)
    ended = [response for response in responses if EOS in response]
    assert ended and all(
        (response == EOS).nonzero()[0].item() == len(response) - 1 for response in ended
    )
    assert all(len(response) == 12 for response in responses if EOS not in response)


def test_the_command_trains_evaluates_and_saves_a_picture(minimal, tmp_path, capsys):
    sizes = "--steps 1 --batch-size 4 --mini-batch-size 2 --eval-queries 4 --ppo-epochs 1"
    minimal["main"]([*sizes.split(), "--output", str(tmp_path / "new" / "curves.png")])
    assert (tmp_path / "new" / "curves.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    before, after = re.findall(r"held-out score \S+ ± \S+, KL (\S+) nats", printed)
    assert float(before) == 0 != float(after)


def test_it_is_short_and_needs_nothing_of_the_package():
    text = (SCRIPTS / "ppo_minimal.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 430
    functions = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef)]
    assert all(x.end_lineno - x.lineno < 40 for x in functions)
    assert not re.search(r"import rlhf_course|from rlhf_course", text)


def test_the_details_of_the_parts_of_ppo_name_tests_that_exist():
    path = ROOT / "notebooks/deeper/parts_of_ppo.ipynb"
    cells = nbformat.read(path, as_version=4).cells
    found = re.findall(
        r"\[`(test_\w+)`\]\(\.\./\.\./(tests/\w+\.py)\)", "\n".join(cell.source for cell in cells)
    )
    assert len(found) >= 12
    for name, path in found:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name}"
