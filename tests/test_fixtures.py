"""``PPOTrainer.step`` against numbers dumped from TRL 0.11.4 (see tests/fixtures/README.md)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import PadTokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

pytestmark = pytest.mark.quick

FIXTURES = np.load(Path(__file__).parent / "fixtures" / "trl_0_11_4.npz")
COMMON, *CASES = [json.loads(str(text)) for text in FIXTURES["metadata"]]
TOLERANCE = 1e-5


def our_name(name: str) -> str:
    """The name of a parameter that TRL's state dict calls ``name``."""
    return name if name.startswith("v_head.") else f"pretrained_model.{name}"


def load_model(who: str) -> AutoModelForCausalLMWithValueHead:
    model = AutoModelForCausalLMWithValueHead(GPT2LMHeadModel(GPT2Config(**COMMON["model_config"])))
    state = {
        our_name(name): torch.from_numpy(FIXTURES[f"initial/{who}/{name}"])
        for name in COMMON["parameter_names"]
    }
    state[our_name("lm_head.weight")] = state[our_name("transformer.wte.weight")]
    model.load_state_dict(state)
    return model


def ragged(flat: np.ndarray, lengths: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(row).long() for row in np.split(flat, np.cumsum(lengths)[:-1])]


def assert_close(found, wanted, what: str) -> None:
    difference = np.abs(np.asarray(found, dtype=float) - np.asarray(wanted, dtype=float)).max()
    scale = max(1.0, float(np.abs(wanted).max()))  # relative for sums over tokens that exceed 1
    assert difference <= TOLERANCE * scale, f"{what}: off by {difference:.2e}"


@pytest.mark.filterwarnings("ignore:Step 1. the mean ratio")  # the case ratio_skip is about that
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_step_equals_trl_0_11_4(case):
    name = case["name"]
    model = load_model("policy")
    config = PPOConfig(**case["config"])
    sgd = case["optimizer"]["name"] == "SGD"
    assert PadTokenizer.pad_token_id == COMMON["model_config"]["vocab_size"] - 1
    optimizer = torch.optim.SGD(model.parameters(), lr=case["optimizer"]["lr"]) if sgd else None
    trainer = PPOTrainer(
        config, model, load_model("reference"), PadTokenizer(), optimizer=optimizer
    )
    np.random.seed(case["numpy_seed"])
    for i in range(case["steps"]):
        step = f"{name}/step{i}"
        queries = ragged(FIXTURES[f"{step}/queries"], FIXTURES[f"{step}/query_lengths"])
        responses = ragged(FIXTURES[f"{step}/responses"], FIXTURES[f"{step}/response_lengths"])
        stats = trainer.step(queries, responses, list(torch.from_numpy(FIXTURES[f"{step}/scores"])))
        for key, wanted in zip(COMMON["scalar_keys"], FIXTURES[f"{step}/scalars"], strict=True):
            assert_close(stats[key], wanted, f"{step} {key}")
        for key in ("objective/kl_dist", "tokens/queries_dist", "tokens/responses_dist"):
            assert_close(stats[key], FIXTURES[f"{step}/{key}"], f"{step} {key}")
    assert trainer.kl_ctl.value == pytest.approx(case["kl_coef_after"], abs=1e-6)
    if sgd:
        parameters = dict(model.state_dict())
        for key in COMMON["parameter_names"]:
            assert_close(
                parameters[our_name(key)], FIXTURES[f"{name}/params/{key}"], f"{name} {key}"
            )
