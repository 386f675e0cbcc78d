"""Score texts with a sentiment classifier, and answers with a reward model."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Protocol, Self
from zlib import crc32

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding_bag
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf_course.data import answer_ids, as_messages, as_prompt, encode
from rlhf_course.policy.network import without_dropout
from rlhf_course.policy.save_load import check_vocabulary, load_model, load_tokenizer

NO_LIMIT = 10**9  # tokens; a tokenizer without a maximum reports 1e30, which overflows


class Reward(Protocol):
    """Map B texts to scores (B,); higher is better. To add a reward, see CONTRIBUTING.md.

    A :class:`RewardModel` instead takes two lists, prompts and answers.
    """

    def __call__(self, texts: Sequence[str]) -> Tensor: ...


class SentimentReward:
    """Score texts by a classifier's raw logits for ``label``; return (B,), float32, on the CPU.

    The classifier, from a folder or hub id, runs on a GPU if available. A long text is cut
    at its start, because the response is at its end. Raises ``ValueError`` for an unknown label.
    """

    def __init__(self, model_name_or_path: str, label="POSITIVE", batch_size=64) -> None:
        model = load_model(
            AutoModelForSequenceClassification, model_name_or_path, dtype=torch.float32
        )
        self.tokenizer = _prepare(load_tokenizer(model_name_or_path, truncation_side="left"), model)
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        labels = {name.upper(): index for index, name in model.config.id2label.items()}
        if label.upper() not in labels:
            raise ValueError(
                f"{model_name_or_path} has no label {label!r}; it has {', '.join(labels)}. Choose"
                " one with SentimentReward(..., label=...) or the setting reward_label."
            )
        self.index, self.batch_size = labels[label.upper()], batch_size

    @torch.no_grad()
    def logits(self, texts: Sequence[str]) -> Tensor:
        """Return the texts' logits (B, labels), in the given order."""
        texts, longest = check_texts("texts", texts), _longest(self.model, self.tokenizer)
        tokens = texts and self.tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
        return _by_length(self, tokens, lambda **batch: self.model(**batch).logits)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return self.logits(texts)[:, self.index]


class NgramSentiment:
    """Judge texts without a transformer: add each word's and word pair's weight to a bias.

    Returns POSITIVE logits (B,) for B texts. A weight's index is its n-gram's CRC-32 modulo the
    number of weights. A repeated n-gram counts once per text (Wang and Manning 2012,
    aclanthology.org/P12-2018).
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias  # (size, 1) and (1,)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        tensors = load_file(Path(folder) / "model.safetensors")
        return cls(tensors["weight"].float(), tensors["bias"].float())

    def __call__(self, texts: Sequence[str]) -> Tensor:
        rows = [self.places(text) for text in check_texts("texts", texts)]
        ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
        places = torch.tensor([*chain(*rows)], dtype=torch.long)
        return embedding_bag(places, self.weight, ends[:-1], mode="sum")[:, 0] + self.bias

    def places(self, text: str) -> set[int]:
        words = re.findall(r"[a-z0-9']+|[!?]", text.lower())
        pairs = (f"{first} {second}" for first, second in pairwise(words))
        return {crc32(ngram.encode()) % len(self.weight) for ngram in (*words, *pairs)}


class RewardModel:
    """Score answers to prompts with a one-output classifier; return (B,), float32, on the CPU.

    EOS is appended to each dialogue, as in training. The score is read at the last token (at the
    token before EOS, if EOS is also the padding token); BERT-like models read it at the first
    token. Padding and the rest of the batch do not change a score.

    ``model`` is a model in memory, or the folder or hub id of a model or adapter. By default, the
    tokenizer is the one saved with it, and ``max_length`` is the largest number of tokens that
    model and tokenizer both accept. Raises ``ValueError`` for several outputs and, when scoring,
    for an overlong answer.
    """

    def __init__(
        self, model: PreTrainedModel | str, tokenizer=None, max_length=None, batch_size=64
    ):
        self.batch_size = batch_size
        self.model = load_reward_model(model) if isinstance(model, str | Path) else model
        if self.model.config.num_labels != 1:
            raise ValueError(
                f"A reward model has one output; this one has {self.model.config.num_labels}."
                " To score a label, use SentimentReward."
            )
        self.tokenizer = _prepare(tokenizer or load_tokenizer(model), self.model)
        self.max_length = max_length or _longest(self.model, self.tokenizer)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], answers: Sequence[str]) -> Tensor:
        """Return scores (B,): the log-odds of being preferred, up to a constant."""
        prompts, answers = check_texts("prompts", prompts), check_texts("answers", answers)
        tokens = [*map(self._fit, self.encode(prompts, answers), answers)]
        with without_dropout(self.model):
            return _by_length(self, tokens, partial(last_token_scores, self.model))[:, 0]

    def encode(self, prompts: list[str], answers: list[str]) -> list[list[int]]:
        return encode(self.tokenizer, prompts, answers)

    def _fit(self, ids: list[int], answer: str) -> list[int]:
        """Return the dialogue's ids; if there are too many, drop the oldest tokens except [CLS]."""
        if len(ids) <= self.max_length:
            return ids
        first = ids[: ids[0] == self.tokenizer.cls_token_id]
        needed = len(first) + len(answer_ids(self.tokenizer, [answer])[0])
        if needed > self.max_length:
            raise ValueError(
                f"An answer of {needed} tokens is longer than max_length={self.max_length}:"
                f" {answer[:60]!r}… Generate fewer tokens, or increase max_length."
            )
        return [*first, *ids[len(first) - self.max_length :]]


class ChatRewardModel(RewardModel):
    """Score dialogues after formatting them with the tokenizer's chat template."""

    def encode(self, prompts: list[str], answers: list[str]) -> list[list[int]]:
        talks = [as_messages(f"{as_prompt(p)} {a}") for p, a in zip(prompts, answers, strict=True)]
        return self.tokenizer.apply_chat_template(talks, return_dict=False)


def load_reward_model(source: str | Path, new_head: bool = False, **kwargs) -> PreTrainedModel:
    """Return a classifier with one output, in float32; raise ``load_model``'s errors.

    With ``new_head``, a language model gets a random head for training.
    """
    kwargs = {"num_labels": 1, "dtype": torch.float32} | kwargs
    return load_model(AutoModelForSequenceClassification, source, new_head, **kwargs)


def _prepare(tokenizer, model: PreTrainedModel):
    """Give model and tokenizer one padding token to mark where texts end; return the tokenizer."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    check_vocabulary(tokenizer, model)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return tokenizer


def _by_length(
    scorer: SentimentReward | RewardModel, tokens: list[list[int]], score: Callable
) -> Tensor:
    """Return scores (B, labels) for rows of token ids; rows of similar length share a batch.

    Padding is on the right, because BERT reads the first token.
    """
    if scorer.batch_size < 1:
        raise ValueError(f"batch_size is {scorer.batch_size}; it must be at least 1.")
    scores = torch.empty(len(tokens), scorer.model.config.num_labels)
    order = sorted(range(len(tokens)), key=lambda row: len(tokens[row]))
    for start in range(0, len(order), scorer.batch_size):
        rows = order[start : start + scorer.batch_size]
        ids = {"input_ids": [tokens[row] for row in rows]}
        batch = scorer.tokenizer.pad(ids, padding_side="right", return_tensors="pt")
        scores[rows] = score(**batch.to(scorer.model.device)).view(len(rows), -1).float().cpu()
    return scores


def check_texts(name: str, texts: Iterable[str]) -> list[str]:
    """Return the texts as a list; raise ``TypeError`` for a single string or non-string entries.

    A single string would be scored letter by letter.
    """
    rows = [None] if isinstance(texts, str) else [*texts]
    if not all(isinstance(text, str) for text in rows):
        raise TypeError(f"{name} must be a list of texts; got {texts!r:.60}.")
    return rows


def _longest(model: PreTrainedModel, tokenizer) -> int:
    """Return the largest token count that both model and tokenizer accept."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", NO_LIMIT)
    return min(positions, tokenizer.model_max_length, NO_LIMIT)


def last_token_scores(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, **_
) -> Tensor:
    """Return scores (B,) at each row's last real token, for inputs (B, T) padded on either side."""
    positions = {}
    if not attention_mask[:, 0].all():  # left padding: a row's first token gets position 0
        positions["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=input_ids, attention_mask=attention_mask, **positions).logits[:, 0]


def require_finite(scores: Tensor, texts: Sequence[str]) -> Tensor:
    """Return the scores as a tensor (B,), one per text.

    Raises ``ValueError`` for any other shape, and ``FloatingPointError`` for NaN or Inf.
    """
    scores = torch.as_tensor(scores)
    if scores.shape != (len(texts),):
        raise ValueError(
            f"{len(texts)} texts got scores of shape {tuple(scores.shape)}; return one per text."
        )
    if not scores.isfinite().all():
        row = int((~scores.isfinite()).nonzero()[0])
        raise FloatingPointError(
            f"The score of text {row} is {scores[row].item()}: {texts[row][:60]!r}. The reward"
            " model diverged in training or overflows in float16: load another, or use float32."
        )
    return scores


def pairwise_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the mean of −log σ(chosen − rejected): Ouyang et al. 2022, arXiv:2203.02155, eq. 1."""
    return -torch.nn.functional.logsigmoid(chosen - rejected.reshape(chosen.shape)).mean()
