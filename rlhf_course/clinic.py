"""Train reward models and run PPO for a few steps in the synthetic Chinese world.

Notebook 06 and the deeper notebooks that continue it provoke faults in these runs.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from pandas.io.formats.style import Styler
from torch import Tensor
from transformers import AutoTokenizer

from rlhf_course.course.presets import Settings, load_preset
from rlhf_course.data import collate, endless, last_question, load_pairs, tokenize_pairs
from rlhf_course.evaluation import evaluate, mean_ci
from rlhf_course.policy.network import AutoModelForCausalLMWithValueHead
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.trainer import PPOTrainer
from rlhf_course.rewards import RewardModel, last_token_scores, load_reward_model, pairwise_loss
from rlhf_course.synthetic import chinese, small_models
from rlhf_course.synthetic.build import build_base, build_preferences, build_sft_adapter


def zero_reward(queries: Sequence[str], texts: Sequence[str]) -> Tensor:
    """Return a reward of 0 for every answer."""
    return torch.zeros(len(texts))


class Clinic:
    """The model under test (an SFT adapter), its questions and its preference pairs.

    ``settings`` has the sizes of reward models (reward_steps, reward_learning_rate) and of PPO runs
    (steps, batch_size, mini_batch_size, ppo_epochs, learning_rate, init_kl_coef, max_new_tokens),
    and the numbers of ``pairs`` and of ``eval_prompts``.
    """

    def __init__(self, settings: Settings, seed: int = 0) -> None:
        self.settings = settings
        self.seed = seed
        self.world = load_preset("05_lora_rlhf_baichuan", "tiny")
        self.base_folder = build_base(self.world)
        self.sft_folder = build_sft_adapter(self.world)
        self.tokenizer = AutoTokenizer.from_pretrained(self.base_folder, padding_side="left")
        self.pairs, _ = load_pairs(build_preferences(), f"train[:{settings.pairs}]")
        held_out, _ = load_pairs(build_preferences(), "test[:500]")
        self.audited = held_out.select(range(settings.eval_prompts))
        questions = list(dict.fromkeys(self.pairs["prompt"]))
        self.eval_prompts = questions[: settings.eval_prompts]
        self.prompts = questions[settings.eval_prompts :]
        self.generation = {"do_sample": True, "top_k": 0, "max_new_tokens": settings.max_new_tokens}

    def train_reward_model(self, pairs: Dataset, steps: int | None = None) -> RewardModel:
        """Train all weights on ``steps`` (default: reward_steps) batches of 32 pairs."""
        torch.manual_seed(self.seed)
        tokenizer = self.tokenizer
        tokens, _ = tokenize_pairs(pairs, tokenizer, self.world.max_length)
        chosen = tokens["chosen_ids"][:]
        rejected = tokens["rejected_ids"][:]
        model = load_reward_model(self.base_folder, new_head=True)
        model.config.pad_token_id = tokenizer.pad_token_id
        order = np.argsort(tokens["length"][:])  # group similar lengths to reduce padding

        def loss() -> Tensor:
            begin = torch.randint(max(1, len(order) - 31), ()).item()
            rows = order[begin : begin + 32].tolist()
            batch = [chosen[row] for row in rows] + [rejected[row] for row in rows]
            batch = tokenizer.pad({"input_ids": batch}, return_tensors="pt").to(model.device)
            return pairwise_loss(*last_token_scores(model, **batch).chunk(2))

        steps = steps or self.settings.reward_steps
        small_models.fit(model, loss, self.settings.reward_learning_rate, steps)
        return RewardModel(model, tokenizer)

    def sft_policy(self) -> AutoModelForCausalLMWithValueHead:
        """Load the SFT adapter with a new value head."""
        return AutoModelForCausalLMWithValueHead.from_pretrained(self.sft_folder)

    def new_trainer(self, reference=None, policy=None, **config) -> PPOTrainer:
        """Build a trainer from the SFT adapter, or from another policy; ``config`` overrides."""
        torch.manual_seed(self.seed)
        policy = policy or self.sft_policy()
        names = ("batch_size", "mini_batch_size", "ppo_epochs", "learning_rate", "init_kl_coef")
        defaults = {name: getattr(self.settings, name) for name in names}
        defaults |= {"seed": self.seed, "adap_kl_ctrl": False}
        rows = {"query": self.prompts, "input_ids": self.tokenizer(self.prompts)["input_ids"]}
        queries = Dataset.from_dict(rows).with_format("torch")
        return PPOTrainer(
            PPOConfig(**defaults | config),
            policy,
            reference,
            self.tokenizer,
            dataset=queries,
            data_collator=collate,
        )

    def run_ppo(
        self,
        reward: Callable[[Sequence[str], Sequence[str]], Tensor],
        steps: int | None = None,
        sampling: Mapping | None = None,
        **components,
    ) -> tuple[PPOTrainer, pd.DataFrame, list[str]]:
        """Run PPO on a reward; return the trainer, a row per step, and the warnings.

        ``sampling`` has more arguments for generation, and ``components`` are those of
        :meth:`new_trainer`.
        """
        generation = self.generation | dict(sampling or {})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = self.new_trainer(**components)
            batches = islice(endless(trainer.dataloader), steps or self.settings.steps)
            rows = [self._step(trainer, batch, reward, generation) for batch in batches]
        history = pd.DataFrame(rows, index=pd.RangeIndex(1, len(rows) + 1, name="step"))
        messages = [str(item.message) for item in caught if issubclass(item.category, UserWarning)]
        return trainer, history, messages

    def _step(self, trainer, batch, reward, generation) -> dict[str, float]:
        """Run one PPO step; return its row of the history."""
        queries = batch["query"]
        ids = batch["input_ids"]
        responses = trainer.generate(ids, return_prompt=False, **generation)
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        texts = [text.strip() for text in texts]
        scores = reward(queries, texts)
        stats = trainer.step(ids, responses, scores)
        trainer.log_stats(stats, {"query": queries, "response": texts}, scores)
        return {
            "score": scores.mean().item(),
            "gold": np.mean(gold(queries, texts)),
            "KL": stats["objective/kl"],
            "length": stats["tokens/responses_len_mean"],
            "empty": np.mean([not text for text in texts]),
        }

    def examine(self, trainer: PPOTrainer, score=zero_reward, **sampling) -> pd.DataFrame:
        """Answer the held-out questions; return a row each of question, answer, gold, KL, score."""
        generation = self.generation | sampling
        results = evaluate(trainer, score, self.eval_prompts, seed=self.seed, **generation)
        return pd.DataFrame(
            {
                "question": [last_question(query) for query in results["query"]],
                "answer": results["response"],
                "gold": gold(results["query"], results["response"]),
                "KL": results["kl"],
                "score": results["score"],
            }
        )


def gold(queries: Sequence[str], texts: Sequence[str]) -> list[float]:
    """Return the true utility of answers, which no real run can measure."""
    return [
        chinese.gold_utility(last_question(query), text)
        for query, text in zip(queries, texts, strict=True)
    ]


def show(policies: Mapping[str, pd.DataFrame], rows: int = 3) -> Styler:
    """Return a table of answers side by side with translations; headers give the mean gold."""
    texts = {"question": next(iter(policies.values()))["question"]}
    for name, answers in policies.items():
        mean, ci = mean_ci(answers["gold"])
        texts[f"{name}: gold {mean:.2f} ± {ci:.2f}"] = answers["answer"]
    table = pd.DataFrame(texts).head(rows)
    table = table.map(lambda text: f"{text}\n{chinese.in_english(text)}".strip())
    layout = {"text-align": "left", "vertical-align": "top", "white-space": "pre-line"}
    escaped = table.style.format(escape="html").hide(axis="index")
    return escaped.set_properties(**layout)
