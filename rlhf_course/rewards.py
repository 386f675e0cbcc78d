"""Score texts with a sentiment classifier, and answers with a reward model."""

import copy
import re
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Protocol, Self
from zlib import crc32

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding_bag
from tqdm.auto import tqdm
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from rlhf_course.data.encoding import answer_ids, default_form, encode, read_form
from rlhf_course.data.transcripts import ASSISTANT
from rlhf_course.policy.network import say_once, without_dropout
from rlhf_course.policy.save_load import (
    check_vocabulary,
    load_model,
    load_tokenizer,
    local_folder,
)

IN_MEMORY = (
    'The reward model is in memory, so form="chat" puts plain prompts before answers as they are;'
    " for a model that reads dialogues in the tokenizer's chat template, pass"
    ' RewardModel(..., form="template").'
)
NO_LIMIT = 10**9  # tokens; a tokenizer without a maximum reports 1e30, which overflows
SHARED_BATCH = 4  # answers of similar length that extend one prompt together


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
                " one with SentimentReward(..., label=...), --label or the setting reward_label."
            )
        self.index = labels[label.upper()]
        self.batch_size = batch_size

    @torch.no_grad()
    def logits(self, texts: Sequence[str]) -> Tensor:
        """Return the texts' logits (B, labels), in the given order."""
        texts = check_texts("texts", texts)
        longest = _longest(self.model, self.tokenizer)
        tokens = []
        if texts:
            tokens = self.tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
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
        self.weight = weight  # (size, 1)
        self.bias = bias  # (1,)

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

    Decoders read the score at the last token that is not padding; that is the token before EOS, if
    EOS is also the padding token. The padding token is the config's, else the tokenizer's, else
    EOS. Encoders such as BERT read the score at the first token. Padding and the rest of the batch
    do not change a score.

    Args:
        model: a model in memory, or the folder or hub id of a model or adapter.
        tokenizer: default: the one saved with the model.
        max_length: in tokens; default: the most that model and tokenizer both accept.
        batch_size: rows per forward pass.
        form: how prompt and answer become token ids, a key of ``FORMS`` in data/encoding.py;
            default: see :func:`find_form`.
        share_prompts: run a prompt that several rows share once, and keep its keys and values.
            This saves most of the time if prompts are long. Only for causal language models.
        show_progress: show a progress bar.

    Raises ``ValueError`` for several outputs and, when scoring, for an overlong answer.
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        tokenizer=None,
        max_length: int | None = None,
        batch_size: int = 64,
        form: str | None = None,
        share_prompts: bool = False,
        show_progress: bool = False,
    ) -> None:
        source = model if isinstance(model, str | Path) else None
        self.model = load_reward_model(source) if source else model
        if self.model.config.num_labels != 1:
            raise ValueError(
                f"A reward model has one output; this one has {self.model.config.num_labels}."
                " To score a label, use SentimentReward."
            )
        self.tokenizer = _prepare(tokenizer or load_tokenizer(model), self.model)
        self.form = form or find_form(self.model, self.tokenizer, source)
        self.says_form = not form and not source and self.form == "chat"
        self.max_length = max_length or _longest(self.model, self.tokenizer)
        self.batch_size = batch_size
        self.share_prompts = share_prompts
        self.show_progress = show_progress

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], answers: Sequence[str]) -> Tensor:
        """Return scores (B,): the log-odds of being preferred, up to a constant."""
        rows = self.encode(prompts, answers)
        with without_dropout(self.model):
            if self.share_prompts:
                return _by_prompt(self, rows, list(prompts))
            return _by_length(self, rows, self._score_batch)[:, 0]

    def encode(self, prompts: Sequence[str], answers: Sequence[str]) -> list[list[int]]:
        """Return the token ids that the model reads, one row per prompt and answer."""
        prompts = check_texts("prompts", prompts)
        answers = check_texts("answers", answers)
        if self.says_form and not all(text.rstrip().endswith(ASSISTANT) for text in prompts):
            say_once(IN_MEMORY)
        rows = encode(self.tokenizer, prompts, answers, self.form)
        return [self._fit(ids, answer) for ids, answer in zip(rows, answers, strict=True)]

    def _score_batch(self, input_ids: Tensor, attention_mask: Tensor, **_) -> Tensor:
        return last_token_scores(
            self.model, input_ids, attention_mask, token_types=self._token_types(input_ids)
        )

    def _token_types(self, input_ids: Tensor) -> Tensor | None:
        """Return BERT's token types, 1 after the first separator; None for other models."""
        if self.form != "pair" or "token_type_ids" not in self.tokenizer.model_input_names:
            return None
        is_separator = input_ids == self.tokenizer.sep_token_id
        before = is_separator.cumsum(1) - is_separator.long()
        return (before == 1).long()

    def _fit(self, ids: list[int], answer: str) -> list[int]:
        """Return the dialogue's ids; if there are too many, drop the oldest tokens except [CLS]."""
        if len(ids) <= self.max_length:
            return ids
        first = ids[:1] if ids[0] == self.tokenizer.cls_token_id else []
        needed = len(first) + self._answer_length(answer)
        if needed > self.max_length:
            raise ValueError(
                f"An answer of {needed} tokens is longer than max_length={self.max_length}:"
                f" {answer[:60]!r}… Generate fewer tokens, or increase max_length."
            )
        return [*first, *ids[len(first) - self.max_length :]]

    def read_at(self, ids: list[int]) -> str:
        """Return, as text, the token of an encoded row at which the score is read."""
        if self.form == "pair":
            return f"the first token, {self.tokenizer.decode(ids[:1])!r}"
        pad = self.tokenizer.pad_token_id
        last = max(place for place, token in enumerate(ids) if token != pad)
        return f"token {last + 1} of {len(ids)}, {self.tokenizer.decode(ids[last])!r}"

    def _answer_length(self, answer: str) -> int:
        """Return an answer's length in tokens, with the tokens that end it."""
        if self.form in ("transcript", "chat"):
            return len(answer_ids(self.tokenizer, [answer], self.form)[0])
        words = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return len(words) + 2  # the end of the turn and a line break, or two separators


def find_form(model: PreTrainedModel, tokenizer, source: str | Path | None = None) -> str:
    """Return how a reward model's prompt and answer become token ids, a key of ``FORMS``.

    A model trained here has a record in its folder, ``source``. Without a record, an encoder gets a
    pair of texts; a model from elsewhere whose tokenizer has a chat template gets whole dialogues
    in that template; a model in memory gets the form that training uses here.
    """
    if source:
        form = read_form(local_folder(source))
        if form:
            return form
    if is_encoder(model):
        return "pair"
    if source and tokenizer.chat_template:
        return "template"
    return default_form(tokenizer)


def is_encoder(model: PreTrainedModel) -> bool:
    """Return whether a model reads texts in both directions, as BERT does."""
    return type(model.config) in MODEL_FOR_MASKED_LM_MAPPING


def load_reward_model(source: str | Path, new_head: bool = False, **kwargs) -> PreTrainedModel:
    """Return a classifier with one output, in float32; raise ``load_model``'s errors.

    With ``new_head``, a language model gets a random head for training.
    """
    kwargs = {"num_labels": 1, "dtype": torch.float32} | kwargs
    return load_model(AutoModelForSequenceClassification, source, new_head, **kwargs)


def _prepare(tokenizer, model: PreTrainedModel):
    """Give model and tokenizer one padding token to mark where texts end; return the tokenizer.

    A decoder's score is read before the padding of its config, so the config decides. An encoder
    masks its padding, and an adapter has its base's config, so their tokenizers decide.
    """
    config = model.config.get_text_config()
    configured = getattr(config, "pad_token_id", None)
    own = _token(tokenizer, configured)
    is_decoder = isinstance(model, PreTrainedModel) and not is_encoder(model)
    if is_decoder and own is not None and configured != tokenizer.pad_token_id:
        tokenizer.pad_token = own
    elif tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token if own is None else own
    check_vocabulary(tokenizer, model)
    config.pad_token_id = tokenizer.pad_token_id
    return tokenizer


def _token(tokenizer, number: int | None) -> str | None:
    """Return the token with this id; None without one, as for the id -1 of old LLaMA models."""
    if number is None or not 0 <= number < len(tokenizer):
        return None
    return tokenizer.convert_ids_to_tokens(number)


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


def _by_prompt(scorer: RewardModel, tokens: list[list[int]], prompts: list[str]) -> Tensor:
    """Return scores (B,) for rows of token ids; the rows of a prompt share the prompt's pass."""
    groups: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    scores = torch.empty(len(tokens))
    hidden = not scorer.show_progress or len(groups) == 1
    for rows in tqdm(groups.values(), desc="prompts", leave=False, disable=hidden):
        scores[rows] = _score_answers(scorer, [tokens[row] for row in rows])
    return scores


def _score_answers(scorer: RewardModel, tokens: list[list[int]]) -> Tensor:
    """Return scores (N,) for rows of token ids that begin with the same prompt."""
    device = scorer.model.device
    shared = count_shared(tokens)
    prompt = torch.tensor([tokens[0][:shared]], device=device)
    prompt_cache = scorer.model.base_model(prompt, use_cache=True).past_key_values
    scores = torch.empty(len(tokens))
    order = sorted(range(len(tokens)), key=lambda row: len(tokens[row]))
    for start in range(0, len(order), SHARED_BATCH):
        rows = order[start : start + SHARED_BATCH]
        rests = {"input_ids": [tokens[row][shared:] for row in rows]}
        batch = scorer.tokenizer.pad(rests, padding_side="right", return_tensors="pt").to(device)
        cache = copy.deepcopy(prompt_cache)  # a forward pass extends its cache
        cache.batch_repeat_interleave(len(rows))
        past = torch.ones(len(rows), shared, dtype=torch.long, device=device)
        positions = shared + torch.arange(batch["input_ids"].shape[1], device=device)
        logits = scorer.model(
            input_ids=batch["input_ids"],
            attention_mask=torch.cat([past, batch["attention_mask"]], dim=1),
            position_ids=positions.expand_as(batch["input_ids"]),
            past_key_values=cache,
            use_cache=True,
        ).logits
        # transformers reads each row's score at its last token that is not padding.
        scores[rows] = logits[:, 0].float().cpu()
    return scores


def count_shared(tokens: list[list[int]]) -> int:
    """Return how many first tokens all rows have in common, at most their length minus two.

    Each row keeps two tokens, because a model may read the score at the token before EOS.
    """
    most = min(len(ids) for ids in tokens) - 2
    shared = 0
    while shared < most and all(ids[shared] == tokens[0][shared] for ids in tokens):
        shared += 1
    return shared


@torch.no_grad()
def shares_prompts(scorer: RewardModel, prompts: list[str], answers: list[str]) -> bool:
    """Return whether a prompt's keys and values can be kept without changing a score.

    They cannot in an encoder, which reads both ways, and in models with a recurrent state. This
    scores the first prompt's texts, at most four, in both ways.
    """
    if is_encoder(scorer.model):
        return False
    rows = [row for row, prompt in enumerate(prompts) if prompt == prompts[0]][:SHARED_BATCH]
    tokens = scorer.encode([prompts[0]] * len(rows), [answers[row] for row in rows])
    with without_dropout(scorer.model):
        plain = _by_length(scorer, tokens, scorer._score_batch)[:, 0]
        try:
            shared = _score_answers(scorer, tokens)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return False
    return torch.allclose(plain, shared, rtol=1e-3, atol=1e-4)


def measure_speed(scorer: RewardModel, prompts: list[str], answers: list[str]) -> tuple[int, float]:
    """Return how many tokens the texts have, and how many seconds scoring them will take.

    A shared prompt counts once. The estimate times the texts of two prompts.
    """
    groups: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    sizes = {}
    for prompt, rows in groups.items():
        tokens = scorer.encode([prompt] * len(rows), [answers[row] for row in rows])
        shared = count_shared(tokens) if scorer.share_prompts else 0
        sizes[prompt] = shared + sum(len(ids) - shared for ids in tokens)
    sample = sorted(sizes, key=sizes.get)[len(sizes) // 2 :][:2]
    rows = [row for prompt in sample for row in groups[prompt]]
    started = time.perf_counter()
    shown = scorer.show_progress
    scorer.show_progress = False
    scorer([prompts[row] for row in rows], [answers[row] for row in rows])
    scorer.show_progress = shown
    seconds = time.perf_counter() - started
    total = sum(sizes.values())
    return total, seconds * total / sum(sizes[prompt] for prompt in sample)


def check_texts(name: str, texts: Iterable[str]) -> list[str]:
    """Return the texts as a list; raise ``TypeError`` for a single string or non-string entries.

    A single string would be scored letter by letter.
    """
    rows = [None] if isinstance(texts, str) else [*texts]
    if not all(isinstance(text, str) for text in rows):
        raise TypeError(f"{name} must be a list of texts; got {texts!r:.60}.")
    return rows


def _longest(model: PreTrainedModel, tokenizer) -> int:
    """Return the largest token count that both model and tokenizer accept.

    RoBERTa numbers positions from its padding token's id plus 1.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", NO_LIMIT)
    embeddings = getattr(getattr(model, "base_model", None), "embeddings", None)
    table = getattr(embeddings, "position_embeddings", None)
    if getattr(table, "padding_idx", None) is not None:
        positions -= table.padding_idx + 1
    return min(positions, tokenizer.model_max_length, NO_LIMIT)


def last_token_scores(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, token_types=None, **_
) -> Tensor:
    """Return scores (B,) at each row's last real token, for inputs (B, T) padded on either side.

    ``token_types`` (B, T) are BERT's, if given.
    """
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if not attention_mask[:, 0].all():  # left padding: a row's first token gets position 0
        inputs["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
    if token_types is not None:
        inputs["token_type_ids"] = token_types
    return model(**inputs).logits[:, 0]


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
        bad_rows = (~scores.isfinite()).nonzero()
        row = int(bad_rows[0])
        raise FloatingPointError(
            f"The score of text {row} is {scores[row].item()}: {texts[row][:60]!r}. The reward"
            " model diverged in training or overflows in float16: load another, or use float32."
        )
    return scores


def pairwise_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the mean of −log σ(chosen − rejected): Ouyang et al. 2022, arXiv:2203.02155, eq. 1."""
    return -torch.nn.functional.logsigmoid(chosen - rejected.reshape(chosen.shape)).mean()
