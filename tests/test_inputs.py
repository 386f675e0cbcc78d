"""Bad input: a sentence that says what was wrong, where, and what to do."""

import math
import warnings
from types import SimpleNamespace

import datasets
import pytest
import torch
from builders import (
    SAMPLING,
    PadTokenizer,
    invalid,
    make_policy,
    make_samples,
    make_trainer,
    write_rows,
)

from rlhf_course import LengthSampler, PPOConfig, PPOTrainer
from rlhf_course.course.presets import load_preset
from rlhf_course.course.shipped import prepare
from rlhf_course.data import build_queries, load_reviews
from rlhf_course.policy.save_load import check_vocabulary
from rlhf_course.ppo.algorithm import RunningMoments
from rlhf_course.ppo.checks import stack_scores


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
    """The others in the reward lead elsewhere: notebook 03, section 17."""
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


def write(folder, **columns):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return write_rows(write_rows(folder, rows, "train.parquet"), rows, "test.parquet")


def test_unusable_review_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="No dataset folder at .*missing"):
        load_reviews(tmp_path / "missing", "train")
    good = {"text": ["a good film"] * 2, "label": [0, 1]}
    for name, columns, message in (
        ("column", {"review": ["a"], "label": [0]}, "No column text .* it has review, label"),
        ("empty", good | {"text": ["a", "  "]}, "Row 1 of split 'train' .* has no text"),
        ("number", good | {"text": [1, 2]}, "Row 0 .* has no text: 1"),
        ("class", good | {"label": [1, 1]}, "are 1; both 0 .* and 1"),
    ):
        with invalid(message):
            load_reviews(write(tmp_path / name, **columns), "train")
    with invalid(r"Unknown split .validation.\. Should be one of \['train', 'test'"):
        load_reviews(write(tmp_path / "good", **good), "validation")
    assert load_reviews(tmp_path / "good", "train")["label"] == good["label"]


def test_reviews_that_are_all_too_short():
    reviews = datasets.Dataset.from_dict({"text": ["short", "also short"], "label": [0, 1]})
    with invalid("None of the 2 reviews has more than 200 characters; the longest has 10"):
        build_queries(reviews, None, LengthSampler(2, 8))


def test_unknown_presets_and_settings_list_the_valid_ones():
    with invalid("Unknown preset 'huge'; choose one of tiny, scratch, full"):
        load_preset("04_gpt2_imdb_ppo", "huge")
    with invalid("Unknown setting 'lr' .* learning_rate"):
        load_preset("04_gpt2_imdb_ppo", "tiny", {"lr": 1})
    wrong = [("steps", value, "whole number of at least 1") for value in ("many", 1.5, math.inf)]
    wrong += [("learning_rate", "fast", "finite number"), ("sigmoid_score", "yes", "value of")]
    for key, value, words in wrong:
        with invalid(f"Setting '{key}' takes a {words}"):
            load_preset("05_lora_rlhf_baichuan", "tiny", {key: value})


def test_scratch_needs_a_dataset():
    with invalid("needs a dataset with .* overrides="):
        prepare(load_preset("04_gpt2_imdb_ppo", "scratch"))


def test_a_bare_no_stays_a_word():
    assert (
        load_preset("04_gpt2_imdb_ppo", "full", {"mixed_precision": False}).mixed_precision == "no"
    )


def test_a_value_written_as_text_is_read_as_a_number():
    assert load_preset("04_gpt2_imdb_ppo", "tiny", {"learning_rate": "1e-4"}).learning_rate == 1e-4


@pytest.mark.parametrize("value", ["10,20", 10, {10: 20}])
def test_a_list_of_steps_is_a_list_and_nothing_that_python_could_turn_into_one(value):
    with invalid(r"Setting 'save_at' takes a value of type list, like \[10, 20, 30\]; got "):
        load_preset("05_lora_rlhf_baichuan", "tiny", {"save_at": value})


def test_what_is_in_a_list_has_the_type_that_the_preset_has_there():
    assert load_preset("05_lora_rlhf_baichuan", "tiny", {"save_at": ["1e1", 20]}).save_at == [
        10,
        20,
    ]
    with invalid("Setting 'dataset' takes a value of type str, like 'offline'; got "):
        load_preset("05_lora_rlhf_baichuan", "tiny", {"dataset": ["a", "b"]})


def test_one_response_per_query_and_a_vocabulary_of_about_the_models_size():
    trainer = make_trainer()
    with invalid("repeat queries"):
        trainer.generate(torch.tensor([1, 2]), do_sample=True, num_return_sequences=2)
    network = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(50, 4))
    with invalid("has 17 tokens, but the model has 50"):
        check_vocabulary(range(17), network)
    check_vocabulary(range(49), network)
