"""Faults in numbers: settings out of range are refused, and what is not finite never reaches
weights or files.
"""

import json
import math
import warnings
from functools import partial

import pytest
import torch
import train_ppo
import train_reward_model
import train_sft
from builders import (
    EOS,
    SAMPLING,
    make_policy,
    make_samples,
    make_trainer,
    save_base,
    sgd,
    snapshot,
    write_rows,
)
from fault_page import case
from test_tracking import run_one_step
from test_train_reward_model import PAIRS, rows
from transformers import GPT2Config

from rlhf_course import PPOConfig, create_reference_model
from rlhf_course.audit import audit
from rlhf_course.course.presets import load_preset
from rlhf_course.evaluation import evaluate
from rlhf_course.ppo.algorithm import RunningMoments
from rlhf_course.ppo.checkpoint import save_checkpoint
from rlhf_course.worlds.small_models import train_tokenizer

KIND = "Numbers"
fault = partial(case, named=True)
NAN, INF = math.nan, math.inf
IMDB = load_preset("04_gpt2_imdb_ppo", "tiny")  # what train_ppo.py takes


# --- settings
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        fault(name, value, message, done=f"`PPOConfig({name}={value!r})`")
        for name, value, message in (
            ("cliprange", -1, "a number above 0"),
            ("lam", 5, "a number from 0 to 1"),
            ("gamma", -1, "a number from 0 to 1"),
            ("score_clip", -1, "a number above 0"),
            ("target", 0, "a number above 0"),
            ("horizon", 0, "a number above 0"),
            ("horizon", 10, "the KL coefficient could turn negative"),
            ("seed", -1, "a whole number from 0 to"),
            ("batch_size", 8.5, "a whole number of at least 1"),
            ("ppo_epochs", None, "a whole number of at least 1"),
            ("learning_rate", "fast", "finite, 0 or more"),
            ("learning_rate", INF, "finite, 0 or more"),
            ("init_kl_coef", NAN, "finite, 0 or more"),
            ("whiten_rewards", "no", "must be True or False"),
        )
    ],
)
def test_a_setting_out_of_range_is_refused(name, value, message, outcome):
    with pytest.raises(ValueError, match=f"{name} is .*{message}") as error:
        PPOConfig(**{name: value})
    outcome(str(error.value))


@pytest.mark.fault('`PPOConfig(learning_rate="1e-5", batch_size="8")`, as YAML reads 1e-5')
def test_numbers_as_text_are_read(outcome):
    config = PPOConfig(learning_rate="1e-5", batch_size="8", mini_batch_size=8, score_clip=None)
    assert config.learning_rate == 1e-5 and config.batch_size == 8 and config.score_clip is None
    outcome("They are read as the numbers 1e-05 and 8.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        fault([option], message, done=f"`train_ppo.py {option}`")
        for option, message in (
            (
                "--steps=.inf",
                f"'steps' takes a whole number of at least 1, like {IMDB.steps}; got inf",
            ),
            (
                "--steps=null",
                f"'steps' takes a whole number of at least 1, like {IMDB.steps}; got None",
            ),
            ("--steps=0", f"'steps' takes a whole number of at least 1, like {IMDB.steps}; got 0"),
            ("--save_every=0", "'save_every' takes a whole number of at least 1"),
            ("--seed=-1", "'seed' takes a whole number of at least 0"),
            ("--target=0", "target is 0.0; it must be a number above 0"),
            ("--horizon=0", "horizon is 0.0; it must be a number above 0"),
            (
                "--init_kl_coef=.nan",
                f"'init_kl_coef' takes a finite number, like {IMDB.init_kl_coef}; got nan",
            ),
            ("--mini_batch_size=100", "batch_size 128 is not a multiple of"),
            (
                "--query_min=8",
                "query_min is 8, and query_max, which is exclusive, 8: it must be larger",
            ),
            ("--min_gain=.nan", "'min_gain' takes a finite number"),
        )
    ],
)
def test_an_option_out_of_range_ends_before_anything_is_built(options, message, refuses, outcome):
    shown = refuses(train_ppo.parse_arguments, options, message)
    outcome(shown.split(": error: ")[-1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        fault(line, message, done=f"`{line}` in a file of options for `train_ppo.py`")
        for line, message in (
            ("output: null", "'output' takes a value of type str"),
            ("output: [a]", "'output' takes a value of type str"),
            ("seed: 1.5", "'seed' takes a whole number of at least 0, like 0; got 1.5"),
            ("resume: 'no'", "'resume' takes a value of type bool"),
            ("experiment: [a]", "'experiment' takes a value of type str"),
            (
                "batch_size: null",
                (
                    f"'batch_size' takes a whole number of at least 1, like {IMDB.batch_size}; got"
                    " None"
                ),
            ),
            ("model: {a: b}", "'model' takes a value of type str"),
        )
    ],
)
def test_an_option_of_another_type_ends_with_a_sentence(line, message, tmp_path, refuses, outcome):
    (tmp_path / "my.yaml").write_text(line)
    shown = refuses(train_ppo.parse_arguments, ["--config", str(tmp_path / "my.yaml")], message)
    outcome(shown.split(": error: ")[-1])


@pytest.mark.fault("`output: 2024` in a file of options for `train_ppo.py`")
def test_a_number_can_name_a_folder(tmp_path, outcome):
    (tmp_path / "my.yaml").write_text("output: 2024\nseed: '3'\n")
    options, _ = train_ppo.parse_arguments(["--config", str(tmp_path / "my.yaml")])
    assert options.output.name == "2024" and options.seed == 3
    outcome("The run goes to a folder called 2024.")


@pytest.mark.fault(
    "a notebook's override `vocab_size=null`, which is not optional as `train_subset` is"
)
def test_only_what_may_be_left_out_can_be_null(outcome):
    assert load_preset("01_reward_modeling", "tiny", {"train_subset": None}).train_subset is None
    with pytest.raises(
        ValueError, match="'vocab_size' takes a whole number of at least 1, like 1000"
    ) as error:
        load_preset("01_reward_modeling", "tiny", {"vocab_size": None})
    with pytest.raises(
        ValueError, match="'train_subset' takes a whole number of at least 1, like 24000"
    ):
        load_preset(
            "01_reward_modeling", "scratch", {"train_subset": "all"}
        )  # where the preset has null
    assert load_preset("01_reward_modeling", "tiny", {"base_steps": 0}).base_steps == 0
    outcome(str(error.value))


# --- a step of PPO
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "constant",
    [fault(x, done=f"score scaling where all first scores are {x}") for x in (1.0, 0.1, -3e6)],
)
def test_scores_without_a_spread_are_not_scaled(constant, outcome):
    trainer, (queries, responses, scores) = make_trainer(use_score_scaling=True), make_samples()
    stats = trainer.step(queries, responses, [torch.tensor(constant)] * 8)
    assert stats["ppo/mean_scores"] == pytest.approx(constant)
    stats = trainer.step(queries, responses, [constant + score for score in scores])
    assert stats["ppo/std_scores"] == pytest.approx(
        torch.stack(scores).std().item() / trainer.running.std, rel=0.1
    )
    outcome("Constant scores stay as they are; scaling begins with the first that differ.")


@pytest.mark.parametrize(
    ("config", "one_token"),
    [
        fault({}, True, done="a step with score scaling that whitening refuses"),
        fault(
            {"use_score_norm": True}, False, done="a step with score scaling whose logits are NaN"
        ),
    ],
)
def test_a_refused_step_leaves_no_trace(config, one_token, outcome):
    trainer, (queries, responses, scores) = (
        make_trainer(use_score_scaling=True, **config),
        make_samples(),
    )
    if one_token:  # one token, which has no variance
        trainer = make_trainer(use_score_scaling=True, batch_size=1, mini_batch_size=1)
        queries, responses, scores = queries[:1], [torch.tensor([3])], scores[:1]
    else:
        with torch.no_grad():
            trainer.model.pretrained_model.transformer.ln_f.bias[0] = NAN
    with pytest.raises((ValueError, FloatingPointError)) as error:
        trainer.step(queries, responses, scores)
    assert vars(trainer.running) == vars(RunningMoments()) and trainer.current_step == 0
    assert trainer.kl_ctl.value == trainer.config.init_kl_coef
    outcome(str(error.value))


def nan_coefficient(trainer):
    trainer.kl_ctl.value = NAN


def nan_rate(trainer):
    trainer.optimizer.param_groups[0]["lr"] = NAN


def nan_value_head(trainer):
    trainer.model.v_head.summary.bias.data[0] = NAN


def nan_gradient(trainer):
    trainer.model.v_head.summary.weight.register_hook(lambda gradient: gradient * NAN)


def huge_values(trainer):
    trainer.model.v_head.summary.bias.data[0] = 1e25


@pytest.mark.parametrize(
    "config", [{}, {"fast": False, "mini_batch_size": 4}], ids=["fused", "plain"]
)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        fault(nan_coefficient, "the KL coefficient is nan", done="a KL coefficient of NaN"),
        fault(nan_rate, "the learning rate is nan", done="a learning-rate schedule that gives NaN"),
        fault(
            nan_value_head,
            "the value head's values for sample 0 are NaN",
            done="a value head of NaN",
        ),
        fault(
            nan_gradient,
            "the norm of the gradient is nan",
            done="a finite loss with a gradient of NaN",
        ),
        fault(huge_values, "the loss is nan", done="values of 1e25, whose squares are infinite"),
    ],
)
def test_what_is_not_finite_ends_the_step_by_its_name_and_moves_no_weight(
    spoil, message, config, outcome
):
    trainer = make_trainer(make_policy(), make_policy(1), ppo_epochs=1, **config)
    spoil(trainer)
    before = snapshot(trainer.model)
    with pytest.raises(FloatingPointError, match=f"Step 1: {message}") as error:
        trainer.step(*make_samples())
    assert all(
        torch.equal(before[n].nan_to_num(), w.nan_to_num())
        for n, w in snapshot(trainer.model).items()
    )
    outcome(str(error.value).replace("of 2", "of 1"))


@pytest.mark.fault("all scores 0, a value head of 0 and lam=1: nothing to explain")
def test_returns_without_variance(outcome):
    policy = make_policy()
    for parameter in policy.v_head.parameters():
        parameter.data.zero_()
    queries, responses, _ = make_samples()
    stats = make_trainer(policy, lam=1.0).step(queries, responses, [torch.tensor(0.0)] * 8)
    assert stats["ppo/returns/var"] == stats["ppo/val/var_explained"] == 0
    outcome("The step ends; the explained variance is 0.")


@pytest.mark.parametrize(
    "save",
    [
        fault(save_checkpoint, done="weights that are infinite when a checkpoint is due"),
        fault(
            lambda trainer, folder: trainer.save_pretrained(folder),
            done="`save_pretrained` of infinite weights",
        ),
    ],
)
def test_weights_that_are_not_finite_are_never_written(save, tmp_path, outcome):
    policy = make_policy()
    trainer = make_trainer(policy, optimizer=sgd(policy))
    save(trainer, tmp_path)
    kept = sorted(tmp_path.rglob("*"))
    trainer.current_step = 1
    policy.v_head.summary.bias.data[0] = INF
    with pytest.raises(
        FloatingPointError, match="the weight v_head.summary.bias has NaN or Inf"
    ) as error:
        save(trainer, tmp_path)
    assert sorted(tmp_path.rglob("*")) == kept
    outcome(str(error.value))


# --- what the trainer is given
# ----------------------------------------------------------------------------------------


def padded(samples, left: bool, pad: int = EOS) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        samples, True, pad, padding_side="left" if left else "right"
    )


@pytest.mark.parametrize(
    "name",
    [
        fault("queries", done="`step` with queries that are padded to one tensor"),
        fault("responses", done="`step` with responses that are padded to one tensor"),
    ],
)
def test_padding_is_said_to_be_learnt(name, outcome):
    queries, responses, scores = make_samples()
    queries = padded(queries, left=True) if name == "queries" else queries
    responses = padded(responses, left=False) if name == "responses" else responses
    with pytest.warns(UserWarning, match=rf"\d of 8 {name} are padded \(token 39\)") as caught:
        make_trainer().step(queries, responses, scores)
    outcome(f"Warning: {caught[0].message}")


def test_two_tokens_of_padding_are_needed_for_a_warning():
    queries, responses, scores = make_samples()
    queries, responses = (
        [torch.cat([torch.tensor([EOS]), q]) for q in queries],
        [torch.cat([r, torch.tensor([EOS])]) for r in responses],
    )
    with warnings.catch_warnings(action="error"):
        make_trainer().step(queries, responses, scores)


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        fault({"temperature": 0.7}, "Pass temperature=1.0", done="`generate` with temperature=0.7"),
        fault({"num_beams": 4}, "Pass num_beams=1", done="`generate` with num_beams=4"),
    ],
)
def test_a_warning_about_sampling_names_what_to_pass(setting, word, outcome):
    queries = make_samples()[0]
    with pytest.warns(UserWarning, match=word) as caught:
        make_trainer().generate(queries, do_sample=True, max_new_tokens=2, top_k=0, **setting)
    outcome(f"Warning: {caught[0].message}")


@pytest.mark.fault("`generate` with return_dict_in_generate=True")
def test_generate_gives_tokens(outcome):
    with pytest.raises(ValueError, match="leave return_dict_in_generate out") as error:
        make_trainer().generate(make_samples()[0], max_new_tokens=2, return_dict_in_generate=True)
    outcome(str(error.value))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        fault(
            [0.5] * 7,
            "there are {'query': 8, 'response': 8, 'rewards': 7}",
            done="`log_stats` with 7 of 8 rewards",
        ),
        fault([None] * 8, "score 0 is None", done="`log_stats` with rewards that are None"),
    ],
)
def test_logged_rewards_are_those_of_the_samples(rewards, message, tmp_path, monkeypatch, outcome):
    monkeypatch.chdir(tmp_path)
    trainer, batch, _ = run_one_step("tensorboard")
    with pytest.raises((ValueError, TypeError), match=message) as error:
        trainer.log_stats({}, batch, rewards)
    trainer.accelerator.end_training()
    outcome(str(error.value))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        fault(
            lambda: make_trainer(optimizer=torch.optim.Adam),
            "give an optimizer made of the policy's parameters",
            done="an optimizer's class in place of an optimizer",
        ),
        fault(
            lambda: create_reference_model("gpt2"),
            "not from 'gpt2'",
            done='`create_reference_model("gpt2")`',
        ),
    ],
)
def test_parts_of_another_kind_are_named(make, message, outcome):
    with pytest.raises(TypeError, match=message) as error:
        make()
    outcome(str(error.value))


# --- reward models and SFT
# --------------------------------------------------------------------------------------------


def nan_scores(prompts, answers):
    return torch.full((len(answers),), NAN)


@pytest.mark.fault("the audit of a reward model that scores NaN")
def test_an_audit_of_nan_is_refused(outcome):
    with pytest.raises(FloatingPointError, match="The score of text 0 is nan") as error:
        audit(
            nan_scores,
            ["What is a map?", "What is a cat?"],
            ["A picture of land.", "A small animal."],
        )
    outcome(str(error.value))


@pytest.mark.fault("an evaluation by a reward model that scores NaN")
def test_an_evaluation_by_nan_is_refused(outcome):
    class Words:
        pad_token_id = eos_token_id = 39

        def __call__(self, prompts):
            return {"input_ids": [[1, 2, 3] for _ in prompts]}

        def batch_decode(self, rows, **_):
            return [" ".join(map(str, row.tolist())) for row in rows]

    trainer = make_trainer()
    trainer.tokenizer = Words()
    with pytest.raises(FloatingPointError, match="The score of text 0 is nan") as error:
        evaluate(trainer, nan_scores, ["a", "b"], **SAMPLING, max_new_tokens=3)
    outcome(str(error.value).replace(repr(str(error.value).split("'")[1]), "'…'"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Pairs, answers, and a base of one layer."""
    folder = tmp_path_factory.mktemp("world")
    for split, part in (("train", PAIRS[24:]), ("test", PAIRS[:24])):
        write_rows(folder / "pairs", rows(part), f"{split}.parquet")
    answers = [
        {"instruction": p.prompt[:80], "input": str(i), "output": p.chosen}
        for i, p in enumerate(PAIRS)
    ]
    write_rows(folder / "answers", answers)
    tokenizer = train_tokenizer([f"{p.prompt} {p.chosen}" for p in PAIRS], 400)
    torch.manual_seed(0)
    base = save_base(folder / "base", tokenizer, GPT2Config, n_positions=320)
    base.transformer.h[0].mlp.c_fc.weight.data[0] = NAN
    base.save_pretrained(folder / "broken")
    tokenizer.save_pretrained(folder / "broken")
    return folder


COMMANDS = {
    "train_reward_model.py": (train_reward_model, "pairs", "audit.json"),
    "train_sft.py": (train_sft, "answers", "metrics.json"),
}


@pytest.mark.parametrize(
    ("name", "base", "rate", "message"),
    [
        fault(
            "train_reward_model.py",
            "base",
            1e9,
            "diverged",
            done="`train_reward_model.py --learning_rate 1e9`",
        ),
        fault("train_sft.py", "base", 1e9, "diverged", done="`train_sft.py --learning_rate 1e9`"),
        fault(
            "train_reward_model.py",
            "broken",
            1e-3,
            "text 0 is nan",
            done="a reward model on a base of NaN",
        ),
        fault("train_sft.py", "broken", 1e-3, "The base is of no use", done="SFT of a base of NaN"),
    ],
)
def test_a_diverged_model_is_not_saved(name, base, rate, message, world, tmp_path, fails, outcome):
    script, data, results = COMMANDS[name]
    given = {
        "dataset": world / data,
        "model_name_or_path": world / base,
        "output_dir": tmp_path / "out",
    }
    given |= {
        "max_length": 300,
        "learning_rate": rate,
        "save_strategy": "no",
        "disable_tqdm": "true",
    }
    given |= {"use_peft": "false", "max_steps": 4, "warmup_steps": 0}
    shown = fails(script, [f"--{key}={value}" for key, value in given.items()], message)
    assert not (tmp_path / "out" / "model").exists() and not (tmp_path / "out" / results).exists()
    outcome(shown)


@pytest.mark.fault("a learning rate that is far too high, but whose numbers stay finite")
def test_a_finite_result_is_a_result(world, tmp_path, outcome):
    given = {
        "dataset": world / "pairs",
        "model_name_or_path": world / "base",
        "output_dir": tmp_path / "out",
    }
    given |= {
        "max_length": 300,
        "learning_rate": 30,
        "save_strategy": "no",
        "disable_tqdm": "true",
        "max_steps": 2,
    }
    given |= {"audit_prompts": 4, "train_subset": 16}
    assert train_reward_model.main([f"--{key}={value}" for key, value in given.items()]) == 0
    found = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert math.isfinite(found["accuracy"]) and all(
        math.isfinite(p["margin"]) for p in found["probes"].values()
    )
    outcome("The model is saved, and its accuracy and audit say how bad it is.")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        fault(option, message, done=f"`train_reward_model.py --use_peft {option}`")
        for option, message in (
            ("--learning_rate=nan", "--learning_rate takes a finite number, got nan"),
            ("--learning_rate=inf", "--learning_rate takes a finite number, got inf"),
            ("--lora_r=0", "--lora_r takes a whole number of at least 1, got 0"),
            (
                "--per_device_train_batch_size=0",
                "--per_device_train_batch_size takes a whole number of at least 1",
            ),
        )
    ],
)
def test_an_option_of_the_trainers_is_a_number_that_they_can_use(option, message, refuses, outcome):
    shown = refuses(train_reward_model.parse_arguments, ["--use_peft", option], message)
    outcome(shown.split(": error: ")[-1])
