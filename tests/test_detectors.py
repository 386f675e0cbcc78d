"""Every detector speaks up at its symptom, once, and says nothing in a healthy run; and the cures
work.
"""

import copy
import warnings

import numpy as np
import pytest
import torch
from builders import EOS, PadTokenizer, make_policy, make_samples, make_trainer

from rlhf_course.ppo.detectors import DETECTORS, Detectors
from rlhf_course.ppo.rollout import Samples, forward
from rlhf_course.ppo.sampling import generate

pytestmark = pytest.mark.quick


def stats(kl=0.0, spread=0.1, length=10.0, n=32) -> dict:
    """A step's statistics with these means."""
    kl_dist = kl + spread * np.linspace(-1, 1, n)
    lengths = np.full(n, length)
    found = {"objective/kl": float(kl), "objective/kl_dist": kl_dist}
    return found | {"tokens/responses_dist": lengths}


HEALTHY = [stats(0.5 * step, length=10 - 0.3 * step) for step in range(10)]
SICK = {
    "reference differs": [stats(kl=1.0)],
    "negative KL": [stats(), stats(kl=-0.5)],
    "empty answers": [stats(), stats(length=1.0)],
    "shorter answers": [*[stats()] * 3, *[stats(length=5.5)] * 3],
    "far from the reference": [stats(), stats(kl=30.0)],
}


def run(steps: list[dict], first: int = 0) -> tuple[Detectors, list[str]]:
    detectors = Detectors(target=6.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, row in enumerate(steps, first):
            detectors.check(row, step)
    return detectors, [str(warning.message) for warning in caught]


def test_a_healthy_run_is_left_alone():
    detectors, messages = run(HEALTHY)
    assert messages == [] and detectors.fired == {}


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_fires_at_its_symptom_and_only_once(name):
    detectors, messages = run([*SICK[name], SICK[name][-1]])
    assert detectors.fired[name] == len(SICK[name]) - 1
    assert sum(f", {name}: " in message for message in messages) == 1


def test_chance_is_not_negative_kl():
    assert run([stats(), stats(kl=-0.5, spread=3.0)])[0].fired == {}


def test_short_answers_from_the_start_are_what_was_asked_for():
    assert run([stats(length=1.0)] * 6)[0].fired == {}


def test_a_resumed_run_is_not_told_that_its_reference_differs():
    assert run([stats(kl=2.0)], first=7)[0].fired == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_trained_weights_of_half_precision_are_pointed_out(dtype):
    policy = make_policy()
    policy.pretrained_model.to(dtype)
    with pytest.warns(UserWarning, match=f"trains {dtype} weights, which"):
        make_trainer(policy)


def test_a_mask_without_eos_is_pointed_out():
    queries, responses, scores = make_samples()
    responses = [torch.cat([response, torch.tensor([EOS])]) for response in responses]
    with pytest.warns(UserWarning, match="leave out the final EOS of 8 of 8"):
        make_trainer().step(queries, responses, scores, [response != EOS for response in responses])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer().step(
            queries, responses, scores, [torch.ones_like(response) for response in responses]
        )


def test_another_reference_is_pointed_out():
    trainer, samples = make_trainer(reference=make_policy(seed=5)), make_samples()
    with pytest.warns(UserWarning, match="Step 1, reference differs"):
        trainer.log_stats(trainer.step(*samples), {}, samples[2])


# --- tokens that never begin a response


def test_suppressed_tokens_never_begin_a_response_and_may_come_later():
    policy = make_policy()
    policy.pretrained_model.lm_head.weight.data[EOS] *= 3  # EOS is likely
    torch.manual_seed(0)
    queries = make_samples(64)[0]
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 6}
    plain = generate(policy, PadTokenizer(), queries, **settings)
    suppressed = generate(policy, PadTokenizer(), queries, begin_suppress=[EOS], **settings)
    assert any(response[0] == EOS for response in plain)
    assert all(response[0] != EOS for response in suppressed)
    assert any(response[-1] == EOS for response in suppressed)


@pytest.mark.parametrize("how", [{}, {"at_most": 3}, {"chunk_size": 5}])
def test_log_probabilities_carry_the_same_mask(how):
    """Of the first token of every response alone, however a pass is split."""
    policy, (queries, responses, scores) = make_policy(), make_samples()
    samples = Samples.from_lists(queries, responses, torch.stack(scores), EOS)
    plain, _, entropies, everything = forward(policy, samples, whole_vocabulary=True)
    masked, _, entropy, _ = forward(policy, samples, begin_suppress=[EOS, 3], **how)
    close = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(masked[:, 1:], plain[:, 1:], **close)
    torch.testing.assert_close(entropy[:, 1:], entropies[:, 1:], **close)
    allowed = 1 - everything[:, 0, [3, EOS]].exp().sum(1)
    begins = torch.tensor([response[0].item() not in (3, EOS) for response in responses])
    torch.testing.assert_close(masked[begins, 0], (plain[:, 0] - allowed.log())[begins], **close)
    assert entropy.isfinite().all()
    if not how.get("chunk_size"):
        all_masked = forward(
            policy, samples, whole_vocabulary=True, begin_suppress=[EOS, 3], **how
        )[3]
        assert (all_masked[:, 0, [3, EOS]].exp() == 0).all()


@pytest.mark.parametrize("kl_penalty", ["kl", "full"])
def test_kl_is_zero_at_first_and_gradients_are_finite_under_the_mask(kl_penalty):
    policy = make_policy()
    policy.pretrained_model.lm_head.weight.data[EOS] *= 3
    trainer = make_trainer(
        policy, begin_suppress_tokens=[EOS], kl_penalty=kl_penalty, learning_rate=1e-3
    )
    for step in range(2):
        queries, _, scores = make_samples(seed=step)
        responses = trainer.generate(
            queries, return_prompt=False, do_sample=True, top_k=0, max_new_tokens=5
        )
        kl = trainer.step(queries, responses, scores)["objective/kl"]
        assert abs(kl) <= 1e-6 if step == 0 else np.isfinite(kl)
    assert all(p.isfinite().all() for p in policy.parameters())


@pytest.mark.filterwarnings("ignore:Step 1, negative KL")
def test_deviation_suppressing_in_generation_alone_is_warned_about_and_biases_the_kl():
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 1, "begin_suppress_tokens": [EOS]}
    queries, _, scores = make_samples(512)
    kls = {}
    for scored in ([], [EOS]):
        policy = make_policy()
        policy.pretrained_model.lm_head.weight.data[EOS] *= 3
        reference = copy.deepcopy(policy)
        reference.pretrained_model.lm_head.weight.data[EOS] /= (
            3  # the reference hardly ever says EOS
        )
        sizes = {"batch_size": 512, "mini_batch_size": 512, "begin_suppress_tokens": scored}
        trainer = make_trainer(policy, reference, **sizes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            responses = trainer.generate(queries, return_prompt=False, **settings)
        assert any("PPOConfig(begin_suppress_tokens" in str(w.message) for w in caught) == (
            not scored
        )
        kls[bool(scored)] = trainer.step(queries, responses, scores)["objective/kl"]
    assert kls[False] < -0.1, "without the mask in the scores, the KL looks negative"
    assert abs(kls[True]) < 1e-5, "with it, the two differ in nothing"
