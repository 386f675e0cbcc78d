"""``PPOTrainer``: what must hold whatever the model."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from builders import (
    EOS,
    SAMPLING,
    PadTokenizer,
    difference,
    invalid,
    make_policy,
    make_samples,
    make_trainer,
    sgd,
    snapshot,
)
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    MambaConfig,
    MistralConfig,
)

from rlhf_course import LengthSampler, PPOConfig, create_reference_model
from rlhf_course.policy.network import AutoModelForCausalLMWithValueHead
from rlhf_course.ppo.rollout import Outputs, Samples, forward
from rlhf_course.ppo.sampling import generate
from rlhf_course.ppo.stats import MEANING
from rlhf_course.ppo.update import Experience, make_experience, minibatch_loss

LARGE = {"batch_size": 64, "mini_batch_size": 64}


def test_step_returns_the_forty_classic_keys_and_one_more():
    assert set(make_trainer().step(*make_samples())) == set(MEANING)
    assert len(MEANING.keys() - {"ppo/val/var_explained_before"}) == 40


@pytest.mark.parametrize("mini_batch_size", [8, 2])
def test_ratio_is_one_in_the_first_epoch(mini_batch_size):
    stats = make_trainer(mini_batch_size=mini_batch_size, ppo_epochs=1, learning_rate=0.0).step(
        *make_samples()
    )
    assert np.abs(stats["ppo/policy/ratio"] - 1).max() < 1e-5
    assert stats["ppo/policy/approxkl"] < 1e-10


@pytest.mark.parametrize("mini_batch_size", [8, 4, 1])
def test_without_learning_the_ratio_stays_one_in_all_epochs(mini_batch_size):
    stats = make_trainer(mini_batch_size=mini_batch_size, learning_rate=0.0).step(*make_samples())
    assert len(stats["ppo/policy/ratio"]) == 4 * stats["tokens/responses_dist"].sum()
    assert np.abs(stats["ppo/policy/ratio"] - 1).max() < 1e-5


def test_kl_is_zero_at_step_one():
    assert abs(make_trainer().step(*make_samples())["objective/kl"]) < 1e-6


def test_padding_changes_nothing_per_element():
    """Each sample alone against all of them padded to the longest, on both sides; every tensor,
    element by element.
    """
    policy, reference = make_policy(0), make_policy(1)
    queries, responses, scores = make_samples()
    whole = Samples.from_lists(queries, responses, torch.stack(scores), EOS)
    for model in (policy, reference):
        together = forward(model, whole)
        for i in range(len(queries)):
            alone = forward(
                model,
                Samples.from_lists(queries[i : i + 1], responses[i : i + 1], torch.zeros(1), EOS),
            )
            for a, b in zip(together[:3], alone[:3], strict=True):
                torch.testing.assert_close(a[i, : len(responses[i])], b[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("at_most", [3, 1])
def test_samples_in_parts_give_the_numbers_and_gradients_of_one_pass(at_most):
    """Everything element by element."""
    queries, responses, scores = make_samples()
    samples = Samples.from_lists(queries, responses, torch.stack(scores), EOS)
    samples = samples.select(torch.tensor([5, 0, 3, 1, 7, 2, 6, 4]))  # any order
    found, gradients = [], []
    for how in ({}, {"at_most": at_most}):
        policy = make_policy()
        outputs = forward(policy, samples, whole_vocabulary=True, **how)
        (outputs[0].square().sum() + outputs[1].sum()).backward()
        found.append(outputs)
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    for together, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, together, atol=1e-5, rtol=0)
    assert difference(*gradients) < 1e-4


@pytest.mark.parametrize("kind", [MistralConfig, Gemma3TextConfig, MambaConfig])
def test_what_is_sampled_is_what_is_scored_with_sliding_windows_and_without_attention(kind):
    """A model that is sure of every token: what it samples, token by token, is what it is sure of
    in one pass.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes["tie_word_embeddings"] = False
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = kind(**sizes, **special, sliding_window=4)
    policy = AutoModelForCausalLMWithValueHead(AutoModelForCausalLM.from_config(config)).eval()
    policy.pretrained_model.lm_head.weight.data *= 1e5
    queries = [torch.arange(1, 4 + row % 5) for row in range(16)]
    responses = generate(
        policy, PadTokenizer(), queries, do_sample=True, top_k=0, max_new_tokens=12
    )
    samples = Samples.from_lists(queries, responses, torch.zeros(16), EOS)
    with torch.no_grad():
        logprobs = forward(policy, samples)[0]
    assert samples.mask.sum() == 16 * 12 and logprobs.min() > -0.1


def test_eos_inside_or_at_the_end_of_a_response_counts():
    """Padding is EOS too; masks come from lengths, so a sampled EOS keeps its log-probability and
    its score.
    """
    query, response = torch.tensor([1, 2]), torch.tensor([3, EOS, 4, EOS])
    other = torch.tensor([5, 6, 7, 8, 9, 10])
    samples = Samples.from_lists([query, query], [response, other], torch.tensor([1.0, 0.0]), EOS)
    assert samples.mask[0].tolist() == [1, 1, 1, 1, 0, 0]
    policy = make_policy()
    logits = policy(torch.cat([query, response]).unsqueeze(0))[0].log_softmax(-1)
    wanted = logits[0, 1:-1].gather(-1, response.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(forward(policy, samples)[0][0, :4], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "config", [{}, {"mini_batch_size": 2}, {"whiten_rewards": True}, {"kl_penalty": "full"}]
)
def test_response_tokens_masked_out_count_as_query_before_the_answer_and_as_nothing_after_it(
    config,
):
    """Two ways to say it, one update: the same losses, statistics and weights."""
    queries, responses, scores = make_samples()
    head, tail = torch.randint(0, EOS, (2,)), torch.randint(0, EOS, (3,))
    longer, masks = list(responses), [torch.ones(len(r)) for r in responses]
    for i in (1, 3, 6):
        longer[i] = torch.cat([head, responses[i], tail])
        masks[i] = torch.tensor([0] * len(head) + [1] * len(responses[i]) + [0] * len(tail))
        queries[i] = queries[i].clone()
    moved = [torch.cat([q, head]) if i in (1, 3, 6) else q for i, q in enumerate(queries)]
    found = []
    for samples in ((queries, longer, scores, masks), (moved, responses, scores)):
        policy = make_policy()
        trainer = make_trainer(policy, make_policy(1), sgd(policy), **config)
        np.random.seed(0)
        stats = [trainer.step(*samples) for _ in range(2)]
        found.append((snapshot(policy), stats, trainer.kl_ctl.value))
    (weights, stats, beta), (wanted, theirs, their_beta) = found
    assert difference(weights, wanted) < 1e-5 < difference(wanted, snapshot(make_policy()))
    assert beta == pytest.approx(their_beta, abs=1e-7)
    for mine, other in zip(stats, theirs, strict=True):
        for key in MEANING:
            if not key.startswith(
                ("tokens/", "time/", "objective/logprobs", "objective/ref_logprobs")
            ):
                np.testing.assert_allclose(mine[key], other[key], atol=2e-5, rtol=1e-4, err_msg=key)
        for key in ("objective/logprobs", "objective/ref_logprobs"):
            assert mine[key].sum() == pytest.approx(other[key].sum(), abs=1e-3), (
                f"{key} of masked tokens"
            )


def test_what_stands_outside_the_mask_changes_neither_loss_nor_statistics():
    queries, responses, scores = make_samples()
    samples = Samples.from_lists(queries, responses, torch.stack(scores), EOS)
    drawn = [torch.randn_like(samples.mask) for _ in range(7)]
    found = []
    unused = dict.fromkeys(("ref_logprobs", "kl", "rewards", "non_score_rewards"))
    for outside in (0.0, 9.0):
        columns = [torch.where(samples.mask > 0, x, outside * x.abs()) for x in drawn]
        names = ("logprobs", "values", "advantages", "returns")
        learned = dict(zip(names, columns[:4], strict=True))
        experience = Experience(mask=samples.mask, **learned, **unused)
        loss, seen = minibatch_loss(experience, Outputs(*columns[4:]), PPOConfig())
        found.append({"loss": loss} | seen.stats)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, msg=name)


def test_a_mini_batch_leaves_out_the_columns_that_none_of_its_samples_uses():
    queries, responses, scores = make_samples()
    samples = Samples.from_lists(queries, responses, torch.stack(scores), EOS)
    rows = torch.stack([samples.response_lengths.argmin(), samples.query_lengths.argmin()])
    part = samples.select(rows)
    both = [len(queries[i]) + len(responses[i]) for i in rows]
    assert part.input_ids.shape == (2, max(both)) and part.mask.shape == (
        2,
        max(len(responses[i]) for i in rows),
    )
    assert (
        part.mask.shape[1] < samples.mask.shape[1]
        and part.input_ids.shape[1] < samples.input_ids.shape[1]
    )
    assert [
        row[: len(queries[i])].tolist() for i, row in zip(rows, part.input_ids, strict=True)
    ] == [queries[i].tolist() for i in rows]


def test_mini_batch_size_bounds_the_rows_of_every_pass():
    policy, rows = make_policy(), []
    trainer = make_trainer(
        policy, make_policy(1), mini_batch_size=2
    )  # its self-test does not count
    embedding = policy.pretrained_model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    queries, responses = [torch.arange(3)] * 8, [torch.arange(4)] * 8  # equal lengths
    trainer.step(queries, responses, list(torch.randn(8)))
    assert max(rows) == 2 and len(rows) == 4 + 4 * 4


@pytest.mark.parametrize(
    ("config", "passes"), [({}, 3), ({"fast": False}, 4), ({"mini_batch_size": 4}, 2 * 4)]
)
def test_the_first_pass_over_a_whole_batch_is_the_first_epochs_too(config, passes):
    """Of the policy, in three epochs: one before, and one per mini-batch of each."""
    policy, seen = make_policy(), []
    trainer = make_trainer(policy, make_policy(1), ppo_epochs=3, **config)
    policy.pretrained_model.transformer.register_forward_pre_hook(
        lambda module, args: seen.append(module)  # the self-test's passes do not count
    )
    trainer.step(*make_samples())
    assert len(seen) == passes


def test_only_the_policy_learns():
    policy, reference = make_policy(0), make_policy(1)
    before = snapshot(reference), snapshot(policy)
    trainer = make_trainer(policy, reference)
    trainer.step(*make_samples())
    assert difference(before[0], snapshot(reference)) == 0
    assert difference(before[1], snapshot(policy)) > 0


def test_scores_with_a_gradient_are_taken_as_numbers():
    """A reward model that ran with gradients is not trained by PPO."""
    queries, responses, scores = make_samples()
    weight = torch.ones((), requires_grad=True)
    trainer, plain = make_trainer(), make_trainer()
    trainer.step(queries, responses, [weight * score for score in scores])
    plain.step(queries, responses, scores)
    assert weight.grad is None and difference(snapshot(trainer.model), snapshot(plain.model)) == 0


@pytest.mark.parametrize("config", [{}, {"mini_batch_size": 2}, {"kl_penalty": "full"}])
def test_nothing_in_an_experience_carries_a_gradient(config):
    """Not even with a reference that nobody froze: else the rewards would train it, and the policy
    through them.
    """
    queries, responses, scores = make_samples()
    policy, reference = make_policy(), make_policy(1)
    samples = Samples.from_lists(queries, responses, torch.stack(scores), EOS)
    config = PPOConfig(**{"batch_size": 8, "mini_batch_size": 8} | config)
    experience, _ = make_experience(
        samples, policy, lambda: nullcontext(reference), config, kl_coef=0.2
    )
    assert not [name for name, value in vars(experience).items() if value.requires_grad]


def test_what_stands_in_the_padding_does_not_matter():
    """Gradients flow through response positions only: another padding token leaves the update as it
    is.
    """
    updated = []
    for pad in (EOS, 3):
        policy = make_policy()
        trainer = make_trainer(policy, make_policy(1), sgd(policy))
        trainer.tokenizer = type("Tokenizer", (), {"pad_token_id": pad, "eos_token_id": EOS})
        trainer.step(*make_samples())
        updated.append(snapshot(policy))
    assert difference(*updated) < 1e-6


@pytest.mark.parametrize(("mini_batch_size", "accumulation"), [(4, 2), (2, 4), (1, 8)])
def test_accumulation_equals_one_batch(mini_batch_size, accumulation):
    """Weighted by tokens, with ragged lengths. Deviation: the classic version averaged the
    mini-batches' means.
    """
    policies = make_policy(), make_policy()
    for policy, sizes in zip(policies, ((8, 1), (mini_batch_size, accumulation)), strict=True):
        config = {
            "mini_batch_size": sizes[0],
            "gradient_accumulation_steps": sizes[1],
            "ppo_epochs": 2,
        }
        make_trainer(policy, make_policy(1), sgd(policy), **config).step(*make_samples())
    assert difference(snapshot(policies[0]), snapshot(policies[1])) < 1e-5


def test_batched_greedy_generation_equals_single():
    trainer, (queries, _, _) = make_trainer(), make_samples()
    together = trainer.generate(queries, return_prompt=False, do_sample=False, max_new_tokens=7)
    alone = [
        trainer.generate(q, return_prompt=False, do_sample=False, max_new_tokens=7)[0]
        for q in queries
    ]
    assert [r.tolist() for r in together] == [r.tolist() for r in alone]


def test_short_path_samples_the_distribution_of_transformers_generate():
    """Frequencies of the first two tokens from one query, short path against transformers, within 5
    standard errors.
    """
    trainer, query, n = make_trainer(make_policy(n_embd=8, n_head=1)), torch.tensor([1, 2, 3]), 4000
    plain = SAMPLING | {"max_new_tokens": 2, "return_prompt": False}
    ours = trainer.generate([query] * n, **plain)
    theirs = trainer.generate(
        [query] * n, renormalize_logits=True, **plain
    )  # a setting the short path leaves alone
    for position in (0, 1):
        counts = [
            np.bincount([int(r[position]) for r in rs if len(r) > position], minlength=40) / n
            for rs in (ours, theirs)
        ]
        error = np.sqrt((counts[0] + counts[1] + 1 / n) / n)
        assert (np.abs(counts[0] - counts[1]) < 5 * error).all()


def test_logprob_at_sampling_equals_the_recomputed_one():
    trainer, (queries, _, _) = make_trainer(), make_samples()
    policy, torch_seed = trainer.model, 3
    torch.manual_seed(torch_seed)
    responses = trainer.generate(queries, LengthSampler(3, 9), return_prompt=False, **SAMPLING)
    samples = Samples.from_lists(queries, responses, torch.zeros(8), EOS)
    logprobs = forward(policy, samples)[0]
    for i, (query, response) in enumerate(zip(queries, responses, strict=True)):
        for t in range(len(response)):  # token by token, as it was sampled
            logits = policy(torch.cat([query, response[:t]]).unsqueeze(0))[0][0, -1]
            assert logits.log_softmax(-1)[response[t]].item() == pytest.approx(
                logprobs[i, t].item(), abs=1e-4
            )


def test_each_row_has_its_own_length_and_ends_at_eos():
    trainer, np_lengths = make_trainer(make_policy(initializer_range=0.5)), LengthSampler(1, 30)
    queries = [torch.tensor([1, EOS, 2])] * 200
    responses = trainer.generate(queries, np_lengths, return_prompt=False, **SAMPLING)
    assert len({len(r) for r in responses}) > 5
    for response in responses:
        assert 1 <= len(response) < 30
        assert EOS not in response[:-1].tolist()
    assert any(r[-1] == EOS for r in responses)


def test_a_list_of_ends_in_the_generation_config_is_obeyed():
    policy = make_policy()
    policy.pretrained_model.generation_config.eos_token_id = [EOS, 7]
    settings = SAMPLING | {"return_prompt": False, "max_new_tokens": 30}
    responses = make_trainer(policy).generate([torch.tensor([1])] * 100, **settings)
    assert any(r[-1] == 7 for r in responses) and not any(7 in r[:-1] for r in responses)


def test_generate_answers_as_the_classic_one_did():
    trainer, (queries, _, _) = make_trainer(), make_samples()
    settings = SAMPLING | {"top_k": 0.0, "min_length": -1, "max_new_tokens": 4}
    single = trainer.generate(queries[0], **settings)
    assert single.dim() == 2 and single[0, : len(queries[0])].tolist() == queries[0].tolist()
    with invalid("pass a list of queries"):
        trainer.generate(torch.ones(2, 3, dtype=torch.long), **settings)
    both = trainer.generate(queries, generate_ref_response=True, **settings)
    assert len(both) == 2 and len(both[0]) == len(both[1]) == 8


def test_learns_a_bandit_and_its_negative():
    """Reward: how often token 7 appears. PPO raises it, and lowers it when the sign is turned."""
    results = {}
    for sign in (1.0, -1.0):
        trainer = make_trainer(**LARGE, learning_rate=3e-3, init_kl_coef=0.02)
        queries, counts = [torch.tensor([1, 2])] * 64, []
        for _ in range(25):
            responses = trainer.generate(queries, return_prompt=False, **SAMPLING, max_new_tokens=6)
            counts.append(np.mean([(r == 7).float().sum() for r in responses]))
            trainer.step(queries, responses, [sign * (r == 7).float().sum() for r in responses])
        results[sign] = np.mean(counts[:3]), np.mean(counts[-3:])
    assert results[1.0][1] > results[1.0][0] + 1.0
    assert results[-1.0][1] < 0.5 * results[-1.0][0]


def test_a_huge_coefficient_keeps_the_policy_near_the_reference():
    kl = {}
    for coefficient in (0.0, 50.0):
        config = LARGE | {"learning_rate": 3e-4, "adap_kl_ctrl": False}
        trainer = make_trainer(init_kl_coef=coefficient, **config)
        queries = [torch.tensor([1, 2])] * 64
        for _ in range(30):
            responses = trainer.generate(queries, return_prompt=False, **SAMPLING, max_new_tokens=6)
            stats = trainer.step(queries, responses, [(r == 7).float().sum() for r in responses])
            kl[coefficient] = stats["objective/kl"]
    assert abs(kl[50.0]) < 0.1 * kl[0.0]


# --- the rest of the interface


def test_early_stopping_ends_the_epochs_beyond_one_and_a_half_of_its_target():
    """Against the policy KL of the second epoch (the first one's is 0): just below the bound, and
    just above it.
    """

    def step(**config) -> dict:
        policy = make_policy()
        return make_trainer(policy, make_policy(1), sgd(policy), **config).step(
            *make_samples(seed=2)
        )

    second = 2 * step(ppo_epochs=2)["ppo/policy/policykl"]
    assert second > 0
    for target, epochs in ((second / 1.4, 3), (second / 1.6, 2)):
        stats = step(ppo_epochs=3, early_stopping=True, target_kl=target)
        assert len(stats["ppo/policy/ratio"]) == epochs * stats["tokens/responses_dist"].sum()


def test_gradient_checkpointing_gives_the_same_update():
    policies = make_policy(), make_policy()
    for policy, checkpointing in zip(policies, (False, True), strict=True):
        config = {"gradient_checkpointing": checkpointing}
        trainer = make_trainer(policy, make_policy(1), sgd(policy), **config)
        trainer.step(*make_samples())
    assert difference(snapshot(policies[0]), snapshot(policies[1])) < 1e-5
    greedy = {"do_sample": False, "max_new_tokens": 8}
    plain = make_trainer(policies[0]).generate(make_samples()[0][0], **greedy)
    assert trainer.generate(make_samples()[0][0], **greedy).tolist() == plain.tolist()


def test_a_plain_language_model_can_be_the_reference():
    reference = make_policy(1)
    wanted = make_trainer(make_policy(), reference).step(*make_samples())["objective/kl"]
    found = make_trainer(make_policy(), make_policy(1).pretrained_model).step(*make_samples())[
        "objective/kl"
    ]
    assert found == pytest.approx(wanted, abs=1e-6)


def test_shared_layers_are_frozen_and_not_copied():
    policy = make_policy()
    reference = create_reference_model(policy, num_shared_layers=1)
    layers, copies = policy.pretrained_model.transformer.h, reference.pretrained_model.transformer.h
    assert copies[0].mlp.c_fc.weight is layers[0].mlp.c_fc.weight
    assert copies[1].mlp.c_fc.weight is not layers[1].mlp.c_fc.weight
    assert not layers[0].mlp.c_fc.weight.requires_grad and layers[1].mlp.c_fc.weight.requires_grad
