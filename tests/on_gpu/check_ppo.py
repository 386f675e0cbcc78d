"""PPO on a GPU, simulated or real: tensors from either side, mixed precision, few waits."""

import sys
import warnings

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from builders import (
    EOS,
    PadTokenizer,
    difference,
    make_policy,
    make_samples,
    make_trainer,
    sgd,
    snapshot,
)

from dev.simulated_gpu.counts import COUNTS
from rlhf_course import LengthSampler, PPOConfig, PPOTrainer
from rlhf_course.evaluation import evaluate

SAMPLING = {"do_sample": True, "top_k": 0, "top_p": 1.0, "return_prompt": False}
WAYS = {
    "one mini-batch": {},
    "mini-batches": {"mini_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "chunks": {"logprob_chunk_size": 7, "begin_suppress_tokens": [EOS]},
    "checkpointing": {"gradient_checkpointing": True},
    "full KL": {"kl_penalty": "full", "mini_batch_size": 4},
    "scores": {
        **dict.fromkeys(("use_score_scaling", "use_score_norm", "whiten_rewards"), True),
        "score_clip": 1.0,
    },
    "plain": {"fast": False},
}


@pytest.fixture(autouse=True)
def own_state():
    """accelerate keeps one device and one precision per process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + torch.ones(2, 3),
        lambda x: torch.cat([x, torch.ones(1, 3)]),
        lambda x: x @ torch.ones(3, 2),
        lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, torch.ones(2, 3)),
        lambda x: torch.nn.functional.embedding(torch.tensor([1]), x),
    ],
)
def test_operations_that_mix_devices_are_refused(operation):
    """Without this the other checks would find nothing."""
    with pytest.raises(RuntimeError, match="Expected .* the same device"):
        operation(torch.ones(2, 3).to("cuda"))


def step(where: str, masks: bool = False, **config) -> tuple[dict, dict]:
    """Return statistics and weights after two steps with samples on ``where``."""
    policy = make_policy()
    trainer = make_trainer(policy, make_policy(1), sgd(policy), **config)
    np.random.seed(0)
    for seed in range(2):
        samples = [[x.to(where) for x in part] for part in make_samples(seed=seed)]
        kept = [torch.arange(len(r)).to(where) != 1 for r in samples[1]] if masks else None
        stats = trainer.step(*samples, kept)
    names = [name for name in stats if isinstance(stats[name], float) and "time" not in name]
    return {name: stats[name] for name in names}, snapshot(policy)


@pytest.mark.parametrize("way", WAYS)
def test_step_takes_tensors_from_either_side(way):
    (here, weights), (there, others) = (step(where, **WAYS[way]) for where in ("cpu", "cuda"))
    assert here == pytest.approx(there, abs=1e-6) and difference(weights, others) < 1e-6


def test_response_masks_come_from_either_side():
    (here, _), (there, _) = (step(where, masks=True) for where in ("cpu", "cuda"))
    assert here == pytest.approx(there, abs=1e-6) and here != step("cpu")[0]


def test_generate_takes_queries_from_either_side_and_leaves_responses_on_the_device():
    trainer, found = make_trainer(), []
    for where in ("cpu", "cuda"):
        torch.manual_seed(0)
        np.random.seed(0)
        queries = [query.to(where) for query in make_samples()[0]]
        found.append(trainer.generate(queries, LengthSampler(3, 9), **SAMPLING))
        assert {response.device.type for response in found[-1]} == {"cuda"}
        one = trainer.generate(queries[0], max_new_tokens=3, do_sample=False)
        assert one.device.type == "cuda" and one.dim() == 2
    assert [r.tolist() for r in found[0]] == [r.tolist() for r in found[1]]


@pytest.mark.parametrize("top_k", [0, 5])
def test_nan_stops_sampling_before_a_kernel_of_the_gpu_asserts(top_k):
    trainer = make_trainer()
    trainer.model.pretrained_model.transformer.wte.weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="probabilities are not finite"):
        with warnings.catch_warnings(action="ignore"):  # about top_k
            trainer.generate(make_samples()[0], max_new_tokens=3, **SAMPLING | {"top_k": top_k})
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_evaluate_takes_queries_from_either_side():
    class Letters(PadTokenizer):
        def batch_decode(self, rows, skip_special_tokens=False):
            return [" ".join(map(str, tokens.tolist())) for tokens in rows]

    trainer, tables = make_trainer(make_policy(), make_policy(1)), []
    trainer.tokenizer = Letters()
    for where in ("cpu", "cuda"):
        queries = [query.to(where) for query in make_samples()[0]]
        score = lambda asked, texts: torch.tensor([float(len(text)) for text in texts]).to("cuda")  # noqa: E731
        tables.append(evaluate(trainer, score, queries, [4] * 8, do_sample=True, top_k=0))
    assert tables[0].equals(tables[1]) and tables[0]["kl"].abs().max() > 0


def test_a_cpu_that_is_asked_for_is_used_by_several_trainers():
    for _ in range(2):
        trainer = make_trainer(accelerator_kwargs={"cpu": True})
        trainer.step(*make_samples())
        assert trainer.accelerator.device.type == trainer.model.device.type == "cpu"


def test_accelerate_s_own_accumulation_does_not_scale_the_gradients():
    _, expected = step("cuda")
    _, found = step("cuda", accelerator_kwargs={"gradient_accumulation_steps": 4})
    assert difference(expected, found) < 1e-6  # 0 without a real GPU's order of sums


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_trains_clips_and_skips(precision):
    for threshold, moves in ((10.0, True), (0.5, False)):
        policy = make_policy()
        more = {"max_grad_norm": 0.5, "ratio_threshold": threshold, "learning_rate": 1e-3}
        trainer = make_trainer(policy, accelerator_kwargs={"mixed_precision": precision}, **more)
        before = snapshot(policy)
        for seed in range(2):
            with pytest.warns() if not moves else np.errstate():
                stats = trainer.step(*make_samples(seed=seed))
        assert np.isfinite(stats["ppo/loss/total"])
        assert (difference(before, snapshot(policy)) > 0) == moves


def waits(batch_size: int) -> int:
    """Return how often a step waits at default settings, where one mini-batch is the batch."""
    config = PPOConfig(batch_size=batch_size, mini_batch_size=batch_size)
    trainer = PPOTrainer(config, make_policy(n_layer=12), None, PadTokenizer())
    queries, _, scores = make_samples(batch_size)
    responses = trainer.generate(queries, max_new_tokens=8, **SAMPLING)
    COUNTS.clear()
    trainer.step(queries, responses, torch.stack(scores))
    return COUNTS.waits.total()


@pytest.mark.skipif(
    "dev.simulated_gpu.device" not in sys.modules, reason="a real GPU counts no waits"
)
def test_a_step_waits_for_the_device_at_most_100_times_for_any_batch_size():
    assert 0 < waits(8) == waits(32) <= 100, COUNTS.waits
