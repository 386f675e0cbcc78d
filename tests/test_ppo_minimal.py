"""PPO in one file: its step is the trainer's, and notebook 02's list of what can go wrong names
tests that exist.
"""

import re
import runpy

import nbformat
import numpy as np
import pytest
import torch
from builders import (
    EOS,
    SCRIPTS,
    PadTokenizer,
    difference,
    make_policy,
    make_samples,
    sgd,
    snapshot,
)

from rlhf_course import PPOConfig, PPOTrainer
from rlhf_course.course.presets import ROOT


@pytest.fixture(scope="module")
def minimal() -> dict:
    return runpy.run_path(str(SCRIPTS / "ppo_minimal.py"))


@pytest.mark.parametrize("mini_batch_size", [8, 4])
def test_a_step_equals_the_trainers(minimal, mini_batch_size):
    policy, reference = make_policy(), make_policy(1)
    model, frozen = (minimal["ActorCritic"](make_policy(seed).pretrained_model) for seed in (0, 1))
    model.value.load_state_dict(policy.v_head.summary.state_dict())
    samples = make_samples(8)
    config = PPOConfig(batch_size=8, mini_batch_size=mini_batch_size, init_kl_coef=0.3)
    trainer = PPOTrainer(config, policy, reference, PadTokenizer(), optimizer=sgd(policy))
    np.random.seed(3)
    wanted = trainer.step(*samples)

    queries, responses, scores = samples
    own = minimal["Config"](batch_size=8, mini_batch_size=mini_batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    np.random.seed(3)
    before = snapshot(model)
    found = minimal["ppo_step"](
        model,
        frozen,
        optimizer,
        queries,
        responses,
        torch.stack([*scores]).float().flatten(),
        0.3,
        EOS,
        own,
    )
    assert found["kl"] == pytest.approx(wanted["objective/kl"], abs=1e-5)
    for mine, theirs in {"policy loss": "ppo/loss/policy", "value loss": "ppo/loss/value"}.items():
        assert found[mine] == pytest.approx(wanted[theirs], abs=1e-5)
    assert difference(before, snapshot(model)) > 1e-3
    for mine, theirs in zip(
        model.lm.parameters(), policy.pretrained_model.parameters(), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-5, rtol=0)
    assert torch.allclose(model.value.weight, policy.v_head.summary.weight, atol=1e-5, rtol=0)
    assert minimal["next_beta"](0.3, found["kl"], 8, own) == pytest.approx(
        trainer.kl_ctl.value, rel=1e-6
    )


def test_a_response_ends_with_its_first_eos(minimal):
    model = minimal["ActorCritic"](make_policy().pretrained_model)
    torch.manual_seed(0)
    responses = minimal["sample"](model, [torch.tensor([1, 2]), torch.tensor([3])] * 20, 12, EOS)
    ended = [response for response in responses if EOS in response]
    assert ended and all(
        (response == EOS).nonzero()[0].item() == len(response) - 1 for response in ended
    )
    assert all(len(response) == 12 for response in responses if EOS not in response)


def test_it_is_short_and_needs_nothing_of_the_package():
    text = (SCRIPTS / "ppo_minimal.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 180
    assert not re.search(r"import rlhf_course|from rlhf_course", text)


def test_the_details_of_notebook_02_name_tests_that_exist():
    cells = nbformat.read(ROOT / "notebooks/02_why_ppo.ipynb", as_version=4).cells
    found = re.findall(
        r"\[`(test_\w+)`\]\(\.\./(tests/\w+\.py)\)", "\n".join(cell.source for cell in cells)
    )
    assert len(found) >= 12
    for name, path in found:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name}"
