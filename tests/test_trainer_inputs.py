"""What the trainer refuses or notices: settings, samples, policies, references, optimizers."""

import warnings
from types import SimpleNamespace

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
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
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2ForSequenceClassification, WatermarkingConfig

from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer
from rlhf_course.evaluation import evaluate
from rlhf_course.policy.adapters import RewardAdapter
from rlhf_course.policy.reference import create_reference_model
from rlhf_course.policy.save_load import check_vocabulary
from rlhf_course.ppo.algorithm import RunningMoments
from rlhf_course.ppo.checkpoint import load_checkpoint, save_checkpoint
from rlhf_course.ppo.checks import stack_scores
from rlhf_course.rewards import pairwise_loss

pytestmark = pytest.mark.quick

QUERIES, RESPONSES, SCORES = make_samples()
QUERIES = [torch.tensor([1, 2, 3])] * 8


def refused(words: str):
    """Expect an error with a sentence that holds these words."""
    return pytest.raises((ValueError, TypeError, OSError), match=words)


def rows(**columns) -> datasets.Dataset:
    given = {"input_ids": [q.tolist() for q in QUERIES]} | columns
    return datasets.Dataset.from_dict(given).with_format("torch")


def test_sizes_that_do_not_divide():
    with invalid("128 must be a multiple of 96"):
        PPOConfig(batch_size=128, mini_batch_size=48, gradient_accumulation_steps=2)
    with invalid("ppo_epochs is 0; it must be a whole number of at least 1"):
        PPOConfig(ppo_epochs=0)


def test_a_word_is_no_yes_or_no():
    with invalid("adap_kl_ctrl is 'false'; it must be True or False"):
        PPOConfig(adap_kl_ctrl="false")


def test_unknown_names_list_the_valid_ones():
    with invalid("kl, abs, mse, full"):
        PPOConfig(kl_penalty="js")
    with invalid("None, 'wandb' or 'tensorboard'"):
        PPOTrainer(PPOConfig(log_with="aim"), make_policy(), None, PadTokenizer())


def test_only_the_penalty_kl_is_without_a_warning():
    """The others in the reward lead elsewhere: notebooks/deeper/five_penalties."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        PPOConfig(), PPOConfig(kl_penalty="abs"), PPOConfig(kl_penalty="mse")
        for _ in range(2):
            PPOConfig(kl_penalty="full")
    kinds = [str(warning.message).split()[1] for warning in caught]
    assert kinds == ["'abs'", "'mse'", "'full'"]  # each once


def test_more_tokens_than_positions():
    """In place of an IndexError from an embedding: before anything is sampled, and where responses
    are given.
    """
    query = torch.ones(5, dtype=torch.long)
    for more in ({"max_new_tokens": 61}, {"length_sampler": LengthSampler(61, 62)}):
        with invalid("are 66 tokens together, but the model has 64 positions"):
            make_trainer().generate([query], **SAMPLING, **more)
    scaled = make_trainer(use_score_scaling=True)
    with invalid("has 64 positions. Cut the queries"):
        scaled.step([query] * 8, [torch.ones(61, dtype=torch.long)] * 8, [torch.tensor(1.0)] * 8)
    assert vars(scaled.running) == vars(RunningMoments())  # a refused step leaves no trace
    make_trainer().generate([query], max_new_tokens=60, eos_token_id=[], **SAMPLING)
    make_trainer().step(
        [query] * 8, [torch.ones(60, dtype=torch.long)] * 8, [torch.tensor(0.0)] * 8
    )


def test_lists_of_unequal_length():
    queries, responses, scores = make_samples()
    with invalid("responses has 7 entries; pass 8, or set batch_size"):
        make_trainer().step(queries, responses[:7], scores)
    with invalid("queries has 9 entries; pass 8, or set batch_size"):
        make_trainer().step(
            [*queries, queries[0]], [*responses, responses[0]], [*scores, scores[0]]
        )
    with invalid("query 0 must be a 1-D tensor of token ids; got torch.int64 of shape"):
        make_trainer().step([q.unsqueeze(0) for q in queries], responses, scores)


def test_response_masks_that_do_not_fit():
    queries, responses, scores = make_samples()
    masks = [torch.ones(len(r)) for r in responses]
    with invalid("response_masks has 7 entries"):
        make_trainer().step(queries, responses, scores, masks[:7])
    for bad in (torch.ones(30), 0 * masks[2], 0.5 * masks[2], torch.nan * masks[2]):
        with invalid("response_masks 2, .*, does not fit"):
            make_trainer().step(queries, responses, scores, [*masks[:2], bad, *masks[3:]])


def test_scores_of_the_wrong_shape():
    queries, responses, scores = make_samples()
    with invalid(r"score 0 has shape \(2,\)"):
        make_trainer().step(queries, responses, [torch.zeros(2)] * 8)
    assert stack_scores(
        [torch.zeros(1), 1.0, torch.tensor(2)], torch.device("cpu"), 0
    ).tolist() == [0, 1, 2]


def test_a_policy_without_value_head():
    with pytest.raises(TypeError, match="AutoModelForCausalLMWithValueHead.from_pretrained"):
        PPOTrainer(PPOConfig(), make_policy().pretrained_model, None, PadTokenizer())


def test_a_dataset_smaller_than_a_batch():
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 5})
    with invalid("5 rows, fewer than one batch of 128"):
        PPOTrainer(PPOConfig(), make_policy(), None, PadTokenizer(), dataset=rows)


def test_one_response_per_query_and_a_vocabulary_of_about_the_models_size():
    trainer = make_trainer()
    with invalid("repeat queries"):
        trainer.generate(torch.tensor([1, 2]), do_sample=True, num_return_sequences=2)
    network = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(50, 4))
    with invalid("has 17 tokens, but the model has 50"):
        check_vocabulary(range(17), network)
    check_vocabulary(range(49), network)


def test_a_trainer_of_the_wrong_parts():
    with refused("optimizer"):
        make_trainer(make_policy(), optimizer=sgd(make_policy(seed=1)))
    with refused("vocabulary|tokens"):
        other = make_policy(vocab_size=30, eos_token_id=2)
        make_trainer(make_policy(), other).step(QUERIES, RESPONSES, SCORES)


@pytest.mark.parametrize("form", ["torch", None])
def test_ragged_queries_need_no_collator(form):
    trainer = make_trainer(dataset=rows().with_format(form))
    queries = next(iter(trainer.dataloader))["input_ids"]
    responses = trainer.generate(queries, max_new_tokens=4, return_prompt=False, **SAMPLING)
    assert trainer.step(queries, responses, SCORES)["objective/kl"] == pytest.approx(0, abs=1e-4)


def test_tokens_of_another_tokenizer():
    responses = [*RESPONSES[:3], torch.tensor([5, 50256]), *RESPONSES[4:]]
    with refused("response 3|vocabulary|50256"):
        make_trainer().step(QUERIES, responses, SCORES)


def test_responses_with_their_queries_are_noticed():
    trainer = make_trainer()
    responses = trainer.generate(QUERIES, max_new_tokens=4, **SAMPLING)
    with pytest.warns(UserWarning, match="return_prompt"):
        trainer.step(QUERIES, responses, SCORES)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_under_no_grad_still_learns(mode):
    trainer = make_trainer()
    before = snapshot(trainer.model)
    with mode():
        for _ in range(2):
            trainer.step(QUERIES, RESPONSES, SCORES)
    assert difference(before, snapshot(trainer.model))


def test_a_query_of_no_tokens():
    queries = [QUERIES[0], torch.tensor([], dtype=torch.long)]
    with refused("query 1|empty"):
        make_trainer().generate(queries, max_new_tokens=4, **SAMPLING)


def test_a_run_with_another_optimizer_or_schedule(tmp_path):
    def scheduled(is_scheduled: bool):
        trainer = make_trainer(policy := make_policy(), optimizer=sgd(policy))
        if is_scheduled:
            halves = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 0.5**step)
            trainer.lr_scheduler = halves
        return trainer

    save_checkpoint(make_trainer(), tmp_path / "adam")
    with refused("(?i)optimizer|Adam"):
        load_checkpoint(scheduled(False), tmp_path / "adam/checkpoint-0")
    for saved in (False, True):
        save_checkpoint(scheduled(saved), tmp_path / str(saved))
        with refused("schedule"):
            load_checkpoint(scheduled(not saved), tmp_path / str(saved) / "checkpoint-0")


def test_a_policy_that_ppo_has_trained_is_no_silent_reference():
    trainer = make_trainer()
    trainer.step(*make_samples())
    with pytest.warns(UserWarning, match="has trained this policy already"):
        PPOTrainer(trainer.config, trainer.policy, tokenizer=trainer.tokenizer)


def test_a_discount_above_1_is_refused_and_columns_do_not_broadcast():
    with pytest.raises(ValueError, match="at most 1"):
        PPOConfig(lam=95)
    chosen, rejected = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0])
    expected = pairwise_loss(chosen, rejected)
    assert torch.equal(pairwise_loss(chosen.unsqueeze(1), rejected), expected)


def test_a_policy_as_its_own_reference_stays_trainable():
    policy = make_policy()
    for reference in (policy, AutoModelForCausalLMWithValueHead(policy.pretrained_model)):
        with invalid("shares weights that the policy trains"):
            make_trainer(policy, reference)
    make_trainer(policy)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length_sampler": iter([3, 0] * 4).__next__}, "at least 1 token"),
        ({"stop_strings": ["."], "max_new_tokens": 3}, "would add EOS that was not sampled"),
        ({"max_tokens": 3}, "cannot honor max_tokens. Pass max_new_tokens"),
        ({"tokenizer": PadTokenizer(), "max_new_tokens": 3}, "uses its own tokenizer"),
        ({"eos_token_id": "</s>", "max_new_tokens": 3}, "convert_tokens_to_ids"),
        ({"eos_token_id": ["</s>"], "max_new_tokens": 3}, "eos_token_id has the text '</s>'"),
        ({"top_k": -1, "max_new_tokens": 3}, "pass top_k=0 to sample from the whole vocabulary"),
        ({"temperature": 0, "max_new_tokens": 3}, "temperature is 0, but sampling needs one above"),
    ],
)
def test_settings_of_sampling_that_spoil_responses(settings, message):
    with invalid(message):
        make_trainer().generate(QUERIES, **SAMPLING | settings)


def test_forced_tokens_are_not_sampled():
    with pytest.warns(UserWarning, match=f"forced_eos_token_id={EOS}"):
        make_trainer().generate(QUERIES, **SAMPLING, max_new_tokens=3, forced_eos_token_id=EOS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefix_allowed_tokens_fn", lambda row, ids: [1, 2, 3]),
        ("watermarking_config", WatermarkingConfig(bias=5.0)),
        ("encoder_repetition_penalty", 5.0),
        ("encoder_no_repeat_ngram_size", 2),
        ("top_h", 0.3),
    ],
)
def test_other_settings_that_change_the_distribution(name, value):
    with pytest.warns(UserWarning, match=f"Sampling with {name}=.* does not follow"):
        make_trainer().generate(QUERIES, **SAMPLING, max_new_tokens=3, **{name: value})


@pytest.mark.parametrize(
    "saved",
    [
        {"num_return_sequences": 2, "do_sample": True},
        {"return_dict_in_generate": True},
        {"stop_strings": ["."]},
        {"max_time": 1e-9},
    ],
)
def test_settings_saved_with_the_model_change_no_rows(saved):
    trainer = make_trainer(fast=False)
    config = trainer.policy.pretrained_model.generation_config
    torch.manual_seed(0)
    expected = trainer.generate(QUERIES, **SAMPLING, max_new_tokens=5)
    for name, value in saved.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    actual = trainer.generate(QUERIES, **SAMPLING, max_new_tokens=5)
    assert [row.tolist() for row in actual] == [row.tolist() for row in expected]


def test_several_active_adapters_are_refused():
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    adapter = get_peft_model(make_policy().pretrained_model, lora)
    adapter.add_adapter("style", lora)
    policy = AutoModelForCausalLMWithValueHead(adapter)
    adapter.base_model.set_adapter(["default", "style"])
    with invalid("The adapters default, style are active.*Merge them with add_weighted_adapter"):
        AutoModelForCausalLMWithValueHead(adapter)
    with invalid("The adapters default, style are active"):
        make_trainer(policy)
    mixed = get_peft_model(make_policy().pretrained_model, lora, mixed=True)
    with invalid("The policy is a PeftMixedModel"):
        AutoModelForCausalLMWithValueHead(mixed)


def test_policies_that_nobody_meant():
    from_pretrained = AutoModelForCausalLMWithValueHead.from_pretrained
    with invalid("num_shared_layers is 12; use 1 to 1"):
        create_reference_model(make_policy(), 12)
    with invalid("v_head_init_strategy is 'nromal'"):
        from_pretrained(make_policy().pretrained_model, v_head_init_strategy="nromal")
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    adapter = get_peft_model(make_policy().pretrained_model, lora)
    with invalid("The model is an adapter"):
        from_pretrained(adapter, lora)


def test_padding_that_is_not_eos_is_seen_and_masks_may_be_one_tensor():
    queries, _, scores = make_samples()
    responses, trainer = [torch.tensor([4, 5, 6, 7, 7])] * 8, make_trainer()
    trainer.tokenizer = SimpleNamespace(eos_token_id=EOS, pad_token_id=7)
    masks = torch.tensor([[1, 1, 1, 0, 0]] * 8)
    with pytest.warns(UserWarning, match="8 of 8 responses are padded"):
        trainer.step(queries, responses, scores, masks)


def test_another_optimizer_leaves_the_weights(tmp_path):
    policy = make_policy()
    groups = [{"params": [p]} for p in policy.parameters()]
    saved = make_trainer(policy, optimizer=torch.optim.Adam(groups, 1e-3))
    saved.step(*make_samples())
    folder = save_checkpoint(saved, tmp_path)
    trainer = make_trainer()
    before = snapshot(trainer.policy)
    with pytest.raises(ValueError, match="number of parameter groups"):
        load_checkpoint(trainer, folder)
    assert all(weight.equal(before[name]) for name, weight in snapshot(trainer.policy).items())


def test_precision_of_an_earlier_trainer_is_named():
    AcceleratorState._reset_state(True)
    make_trainer(accelerator_kwargs={"mixed_precision": "bf16"})
    with pytest.warns(UserWarning, match="An earlier trainer set mixed_precision bf16"):
        make_trainer()
    AcceleratorState._reset_state(True)
    with warnings.catch_warnings(action="error"):
        make_trainer()


def test_a_dataset_whose_columns_ppo_does_not_know():
    rows = Dataset.from_dict({"prompt": ["a"] * 8, "ids": [[1]] * 8})
    config = PPOConfig(batch_size=8, mini_batch_size=8)
    with invalid(r"no column query or input_ids, only \['prompt', 'ids'\]"):
        PPOTrainer(config, make_policy(), None, PadTokenizer(), dataset=rows)


def test_evaluate_knows_the_token_that_ended_sampling():
    trainer = make_trainer()
    trainer.tokenizer = SimpleNamespace(
        eos_token_id=EOS, pad_token_id=EOS, batch_decode=lambda rows, **_: ["x"] * len(rows)
    )
    ends = list(range(40))  # every token ends a response
    table = evaluate(trainer, lambda q, r: torch.zeros(8), QUERIES, **SAMPLING, eos_token_id=ends)
    assert table["finished"].all() and (table["length"] == 1).all()


def test_a_copy_of_a_trained_policy_as_the_reference():
    trainer = make_trainer()
    trainer.step(*make_samples())
    with pytest.warns(UserWarning, match="PPO has trained this policy already"):
        make_trainer(trainer.policy, create_reference_model(trainer.policy))


def test_a_reward_adapter_that_trains_the_base_too(tmp_path):
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 64}
    judge = GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=1, pad_token_id=0))
    lora = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    own = LoraConfig(task_type="SEQ_CLS", modules_to_save=["score", "wte"], **lora)
    get_peft_model(judge, own).save_pretrained(tmp_path)
    network = get_peft_model(make_policy(n_layer=1).pretrained_model, LoraConfig(**lora))
    with invalid("also trains .*wte.* which belongs to the policy's base"):
        RewardAdapter(AutoModelForCausalLMWithValueHead(network), tmp_path)
