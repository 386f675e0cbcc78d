"""Scripts for TRL up to 0.11 run with their import lines changed, or stop with a sentence.

Each is written afresh after one of TRL's examples, with tiny random models and few steps.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from builders import EOS, SAMPLING, invalid, make_policy, make_samples, make_trainer
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from test_lora import make_tokenizer, randomise
from torch.optim import Adam
from transformers import (
    Adafactor,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    pipeline,
)

import rlhf_course
from rlhf_course import (
    AutoModelForCausalLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
    set_seed,
)
from rlhf_course.course.presets import ROOT
from rlhf_course.policy.adapters import RewardAdapter
from rlhf_course.runtime.old_names import (
    ARGUMENT,
    CONFIG,
    IMPORT,
    OLD_NAMES,
    OVERRIDE,
    POLICY,
    TRAINER,
)

CLASSIFIER = str(ROOT / "models/distilbert-imdb-mini")
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}


def collator(data):
    return {key: [d[key] for d in data] for key in data[0]}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """The folder of a tiny random Llama with its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
    ends = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**sizes, **ends)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def questions(tokenizer, number: int = 16) -> Dataset:
    rows = Dataset.from_dict({"question": [f"w{2 + i} w{4 + i}" for i in range(number)]})

    def tokenize(row):
        row["query"] = row["question"]
        row["input_ids"] = tokenizer(row["query"])["input_ids"]
        return row

    rows = rows.map(tokenize, remove_columns=["question"])
    rows.set_format(type="torch")
    return rows


@dataclass
class ScriptArguments:
    """Arguments of StackLLaMA's rl_training.py."""

    model_name: str = field(default="", metadata={"help": "the model name"})
    learning_rate: float = field(default=1.41e-5)
    output_max_length: int = field(default=12)
    mini_batch_size: int = field(default=1)
    batch_size: int = field(default=8)
    ppo_epochs: int = field(default=2)
    gradient_accumulation_steps: int = field(default=4)
    adafactor: bool = field(default=False)
    steps: int = field(default=9)
    load_in_8bit: bool = field(default=True)


@pytest.mark.parametrize("adafactor", ["False", "True"])
def test_stackllama(base, adafactor, tmp_path):
    arguments = ["--model_name", base, "--adafactor", adafactor]
    script_args = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses(arguments)[0]
    config = PPOConfig(
        steps=script_args.steps,
        model_name=script_args.model_name,
        learning_rate=script_args.learning_rate,
        batch_size=script_args.batch_size,
        mini_batch_size=script_args.mini_batch_size,
        gradient_accumulation_steps=script_args.gradient_accumulation_steps,
        optimize_cuda_cache=True,
        early_stopping=False,
        target_kl=0.1,
        ppo_epochs=script_args.ppo_epochs,
        seed=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name)
    if getattr(tokenizer, "pad_token", None) is None:
        tokenizer.pad_token = tokenizer.eos_token
    set_seed(config.seed)
    settings = {
        "device_map": {"": Accelerator().local_process_index},
        "peft_config": LoraConfig(**LORA, bias="none", task_type="CAUSAL_LM"),
    }
    with invalid('load_in_8bit .* Pass `quantization_config=quantization\\("8bit"\\)`'):
        AutoModelForCausalLMWithValueHead.from_pretrained(
            config.model_name, load_in_8bit=script_args.load_in_8bit, **settings
        )
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        config.model_name, load_in_8bit=False, **settings
    )
    optimizer = None
    if script_args.adafactor:
        optimizer = Adafactor(
            filter(lambda p: p.requires_grad, model.parameters()),
            scale_parameter=False,
            relative_step=False,
            warmup_init=False,
            lr=config.learning_rate,
        )
    ppo_trainer = PPOTrainer(
        config,
        model,
        ref_model=None,
        tokenizer=tokenizer,
        dataset=questions(tokenizer, 40),
        data_collator=collator,
        optimizer=optimizer,
    )
    sentiment_pipe = pipeline("sentiment-analysis", model=CLASSIFIER, device="cpu")
    generation_kwargs = {
        "top_k": 0.0,
        "top_p": 1.0,
        "do_sample": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": 100_000,
    }
    sent_kwargs = {"top_k": None, "function_to_apply": "none", "batch_size": 8, "truncation": True}
    for epoch, batch in enumerate(ppo_trainer.dataloader):
        if epoch >= config.total_ppo_epochs:
            break
        response_tensors = ppo_trainer.generate(
            batch["input_ids"],
            return_prompt=False,
            length_sampler=LengthSampler(4, script_args.output_max_length),
            **generation_kwargs,
        )
        batch["response"] = tokenizer.batch_decode(response_tensors, skip_special_tokens=True)
        texts = [q + r for q, r in zip(batch["query"], batch["response"], strict=True)]
        outputs = sentiment_pipe(texts, **sent_kwargs)
        rewards = [torch.tensor(output[0]["score"] - 0.1) for output in outputs]
        stats = ppo_trainer.step(batch["input_ids"], response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards)
        ppo_trainer.save_pretrained(str(tmp_path / f"step_{epoch}"))
    assert epoch == config.total_ppo_epochs == 2  # 9 samples are 2 batches of 8
    assert ppo_trainer.current_step == 2
    assert (tmp_path / "step_1/v_head.safetensors").exists()


def test_sentiment(base):
    parser = HfArgumentParser(PPOConfig)
    [config] = parser.parse_args_into_dataclasses(
        ["--model_name", base, "--batch_size", "8", "--mini_batch_size", "8", "--ppo_epochs", "2"]
    )
    set_seed(config.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name, device_map=None)
    ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
    ppo_trainer = PPOTrainer(
        config, model, ref_model, tokenizer, dataset=questions(tokenizer), data_collator=collator
    )
    sentiment_pipe = pipeline("sentiment-analysis", model=CLASSIFIER, device="cpu")
    with pytest.raises(KeyError):  # troubleshooting.md says what to do
        sentiment_pipe(["w2"], return_all_scores=True)[0][1]["score"]
    generation_kwargs = {
        "min_length": -1,
        "top_k": 0.0,
        "top_p": 1.0,
        "do_sample": True,
        "pad_token_id": tokenizer.eos_token_id,
        "max_new_tokens": 8,
    }
    for batch in ppo_trainer.dataloader:
        response_tensors = ppo_trainer.generate(
            batch["input_ids"], return_prompt=False, **generation_kwargs
        )
        batch["response"] = tokenizer.batch_decode(response_tensors)
        texts = [q + r for q, r in zip(batch["query"], batch["response"], strict=True)]
        outputs = sentiment_pipe(texts, top_k=None, function_to_apply="none", batch_size=8)
        named = [{entry["label"]: entry["score"] for entry in output} for output in outputs]
        rewards = [torch.tensor(scores["POSITIVE"]) for scores in named]
        stats = ppo_trainer.step(batch["input_ids"], response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards)
    assert ppo_trainer.current_step == 2
    assert stats["ppo/mean_scores"] == pytest.approx(torch.stack(rewards).mean().item(), abs=1e-5)


def test_detoxify(base, tmp_path):
    config = PPOConfig(
        model_name=base, learning_rate=1e-4, batch_size=8, mini_batch_size=2, ppo_epochs=1
    )
    set_seed(config.seed)
    model = AutoModelForCausalLM.from_pretrained(config.model_name, torch_dtype=torch.float32)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(model)
    ref_model = create_reference_model(model, num_shared_layers=1)
    optimizer = Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.eos_token
    ppo_trainer = PPOTrainer(
        config,
        model,
        ref_model=ref_model,
        tokenizer=tokenizer,
        dataset=questions(tokenizer, 8),
        data_collator=collator,
        optimizer=optimizer,
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    toxicity_model = RobertaForSequenceClassification(
        RobertaConfig(vocab_size=40, intermediate_size=16, pad_token_id=0, **sizes)
    ).eval()
    generation_kwargs = {
        "min_length": -1,
        "top_k": 0.0,
        "top_p": 1.0,
        "do_sample": True,
        "pad_token_id": tokenizer.eos_token_id,
    }
    output_length_sampler = LengthSampler(6, 10)
    for batch in ppo_trainer.dataloader:
        response_tensors = []
        for query in batch["input_ids"]:
            generation_kwargs["max_new_tokens"] = output_length_sampler()
            response = ppo_trainer.generate(query, **generation_kwargs)
            response_tensors.append(response.squeeze()[len(query) :])
        batch["response"] = [tokenizer.decode(r.squeeze()) for r in response_tensors]
        inputs = make_tokenizer()(batch["response"], padding=True, return_tensors="pt")
        logits = toxicity_model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).logits
        rewards = [torch.tensor(output) for output in logits[:, 0].tolist()]
        stats = ppo_trainer.step(batch["input_ids"], response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards)
    ppo_trainer.save_pretrained(str(tmp_path / "detoxified"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "detoxified", dtype=torch.float32)
    trained = dict(model.pretrained_model.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in plain.named_parameters())


def test_calculator_stops_with_a_sentence_and_its_masks_work():
    with pytest.raises(ImportError, match=r"Run the tools in your own loop.*`response_masks`"):
        from rlhf_course import TextEnvironment  # noqa: F401
    policy = make_policy()
    trainer = make_trainer(policy, batch_size=2, mini_batch_size=2)
    queries = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    settings = SAMPLING | {"max_new_tokens": 4, "return_prompt": False, "eos_token_id": -1}
    calls = trainer.generate(queries, **settings)
    tool = torch.tensor([7, 8, 9])
    seen = [torch.cat([q, c, tool]) for q, c in zip(queries, calls, strict=True)]
    answers = trainer.generate(seen, **settings)
    responses = [torch.cat([c, tool, a]) for c, a in zip(calls, answers, strict=True)]
    masks = [
        torch.cat([torch.ones(len(c)), torch.zeros(3), torch.ones(len(a))])
        for c, a in zip(calls, answers, strict=True)
    ]
    stats = trainer.step(queries, responses, [torch.tensor(1.0), torch.tensor(0.0)], masks)
    assert (stats["objective/logprobs"][:, 4:7] == 0).all()
    assert (stats["objective/logprobs"][:, :4] != 0).all()


@pytest.fixture(scope="module")
def reward_folder(base, tmp_path_factory) -> str:
    """The folder of a reward model's adapter on the base, as TRL's RewardTrainer saves it."""
    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model = get_peft_model(classifier, LoraConfig(**LORA, task_type="SEQ_CLS"))
    randomise(model, 1)
    model.save_pretrained(folder)
    return str(folder)


def test_multi_adapter(base, reward_folder):
    lora = LoraConfig(**LORA, bias="none", task_type="CAUSAL_LM")
    load = AutoModelForCausalLMWithValueHead.from_pretrained
    with invalid("reward_adapter .* `RewardAdapter\\(policy, folder\\)`"):
        load(base, device_map={"": 0}, peft_config=lora, reward_adapter=reward_folder)
    model = load(base, device_map={"": 0}, peft_config=lora, use_safetensors=True)
    with pytest.raises(AttributeError, match="Make the policy first, then `RewardAdapter"):
        model.compute_reward_score(torch.tensor([[1, 2]]))
    reward_adapter = RewardAdapter(model, reward_folder)
    tokenizer = make_tokenizer(padding_side="left")
    config = PPOConfig(
        model_name=base,
        learning_rate=1e-3,
        batch_size=8,
        mini_batch_size=2,
        gradient_accumulation_steps=2,
        use_score_scaling=True,
    )
    ppo_trainer = PPOTrainer(
        config,
        model,
        ref_model=None,
        tokenizer=tokenizer,
        dataset=questions(tokenizer, 8),
        data_collator=collator,
    )
    for batch in ppo_trainer.dataloader:
        response_tensors = ppo_trainer.generate(
            batch["input_ids"], return_prompt=False, max_new_tokens=6, **SAMPLING
        )
        batch["response"] = tokenizer.batch_decode(response_tensors, skip_special_tokens=True)
        texts = [q + " " + r for q, r in zip(batch["query"], batch["response"], strict=True)]
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        raw_rewards = reward_adapter.compute_reward_score(**inputs)
        rewards = [raw_rewards[i, -1, 0] for i in range(len(raw_rewards))]  # the last token
        stats = ppo_trainer.step(batch["input_ids"], response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards)
    assert ppo_trainer.current_step == 1
    assert torch.stack(rewards).std() > 1e-3


def test_the_reward_adapters_score_is_that_of_a_plain_classifier(base, reward_folder):
    lora = LoraConfig(**LORA, task_type="CAUSAL_LM")
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=lora)
    randomise(policy, 5)  # the policy's own adapter must not matter
    adapter = RewardAdapter(policy, reward_folder)
    classifier = get_peft_model(
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=1),
        LoraConfig(**LORA, task_type="SEQ_CLS"),
    )
    randomise(classifier, 1)
    plain = classifier.merge_and_unload().eval()
    rows = [torch.tensor([2, 3, 4, 5, 6]), torch.tensor([7, 8])]
    with torch.no_grad():
        expected = torch.cat([plain(input_ids=row.unsqueeze(0)).logits for row in rows])
    input_ids = torch.tensor([[2, 3, 4, 5, 6], [0, 0, 0, 7, 8]])
    scores = adapter.compute_reward_score(input_ids, attention_mask=(input_ids > 0).long())
    assert scores.shape == (2, 5, 1)
    torch.testing.assert_close(scores[:, -1], expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 1e-3


class NoPenalty(PPOTrainer):
    """Rewards without the penalty for KL, as people override ``compute_rewards``."""

    def compute_rewards(self, scores, logprobs, ref_logprobs, masks):
        rewards, kls = [], []
        for score, logprob, ref_logprob, mask in zip(
            scores, logprobs, ref_logprobs, masks, strict=True
        ):
            kls.append(self._kl_penalty(logprob, ref_logprob))
            reward = torch.zeros_like(logprob)
            reward[mask.nonzero()[-1]] += score
            rewards.append(reward)
        return torch.stack(rewards), torch.zeros_like(logprobs), torch.stack(kls)


def test_an_overridden_compute_rewards_is_called():
    """It gives the numbers of a trainer whose KL coefficient is 0."""
    stats = []
    for kind, coefficient in ((NoPenalty, 0.2), (PPOTrainer, 0.0)):
        config = PPOConfig(
            batch_size=8, mini_batch_size=8, init_kl_coef=coefficient, learning_rate=1e-2
        )
        policy = make_policy()
        trainer = kind(config, policy, make_policy(1), make_trainer(policy).tokenizer)
        stats.append(trainer.step(*make_samples()))
    for name in ("objective/kl", "ppo/mean_non_score_reward", "ppo/loss/total"):
        assert stats[0][name] == pytest.approx(stats[1][name], rel=1e-5, abs=1e-7)

    class TwoTensors(PPOTrainer):
        def compute_rewards(self, scores, logprobs, ref_logprobs, masks):
            return super().compute_rewards(scores, logprobs, ref_logprobs, masks)[:2]

    trainer = make_trainer()
    trainer.__class__ = TwoTensors
    with invalid("compute_rewards returned 2 tensors. Return three"):
        trainer.step(*make_samples())


@pytest.mark.parametrize("name", OLD_NAMES[OVERRIDE])
def test_a_method_that_would_never_be_called_is_refused(name):
    with pytest.raises(TypeError, match=f"Mine.{name} would never be called"):
        type("Mine", (PPOTrainer,), {name: lambda self: None})


def test_every_old_name_has_its_sentence_where_it_is_used():
    trainer = make_trainer()
    for name in OLD_NAMES[ARGUMENT]:
        with invalid(f"{name} of TRL up to 0.11 is not supported"):
            AutoModelForCausalLMWithValueHead.from_pretrained("gpt2", **{name: True})
    for name in OLD_NAMES[IMPORT]:
        with pytest.raises(ImportError, match=f"{name} of TRL"):
            getattr(rlhf_course, name)
    for name in OLD_NAMES[POLICY]:
        with pytest.raises(AttributeError, match=f"{name} of TRL"):
            getattr(trainer.policy, name)
    for name in OLD_NAMES[CONFIG]:
        with pytest.raises(AttributeError, match=f"{name} of TRL"):
            getattr(trainer.config, name)
    for name in OLD_NAMES[TRAINER]:
        with pytest.raises(TypeError, match=f"{name} of TRL"):
            PPOTrainer(trainer.config, make_policy(), **{name: None})
    with pytest.raises(TypeError, match="PPOTrainer has no argument 'nothing'"):
        PPOTrainer(trainer.config, make_policy(), nothing=1)
    with pytest.raises(AttributeError, match="Use `accelerator.device`"):
        _ = trainer.current_device
    with pytest.raises(AttributeError, match="'PPOTrainer' object has no attribute 'nothing'"):
        _ = trainer.nothing
    with pytest.raises(AttributeError, match="Pass `peft_config=`"):
        get_peft_model(make_policy(), LoraConfig(task_type="CAUSAL_LM"))
    with invalid("peft_config is a dict"):
        AutoModelForCausalLMWithValueHead.from_pretrained(
            make_policy().pretrained_model, peft_config={"r": 4}
        )


def test_the_page_shows_the_table_of_old_names():
    page = (ROOT / "docs/ppo-api.md").read_text(encoding="utf-8")
    section = page.split("## Names that are not here")[1].split("\n## ")[0]
    expected = [
        f"| `{name}` | {kind} | {sentence} |"
        for kind, names in OLD_NAMES.items()
        for name, sentence in names.items()
    ]
    assert [row for row in section.splitlines() if row.startswith("| `")] == expected


def test_a_data_set_of_splits_and_an_endless_one_are_refused():
    rows = Dataset.from_dict({"input_ids": [[1, 2]] * 8})
    with invalid("has the splits train, test. Pass one of them"):
        make_trainer(dataset=DatasetDict(train=rows, test=rows))
    stream = rows.to_iterable_dataset()
    with invalid("IterableDataset, has no length.*list"):
        make_trainer(dataset=stream)
    trainer = make_trainer(dataset=list(stream.take(8)))
    assert len(next(iter(trainer.dataloader))["input_ids"]) == 8


def test_a_column_that_is_missing_is_named(tmp_path):
    trainer = make_trainer(log_with="tensorboard", project_kwargs={"logging_dir": str(tmp_path)})
    samples = make_samples()
    stats = trainer.step(*samples)
    batch = {"query": ["a"] * 8, "response": ["b"] * 8}
    with invalid("no column 'answer' to log, only query, response"):
        trainer.log_stats(stats, batch, samples[2], columns_to_log=["query", "response", "answer"])


@pytest.mark.parametrize("initialization", ["pissa", "pissa_niter_4", "olora", "gaussian"])
def test_an_adapter_that_splits_its_base_is_loaded_again(base, initialization, tmp_path):
    lora = LoraConfig(**LORA, task_type="CAUSAL_LM", init_lora_weights=initialization)
    torch.manual_seed(7)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=lora)
    for name, weight in policy.named_parameters():
        if "lora_" in name:
            weight.data += 0.1 * torch.randn_like(weight)
    policy.save_pretrained(tmp_path)
    torch.manual_seed(8)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    input_ids = torch.arange(2, 12).unsqueeze(0)
    policy.eval()
    np.testing.assert_allclose(
        loaded(input_ids)[0].detach().numpy(), policy(input_ids)[0].detach().numpy(), atol=1e-4
    )
