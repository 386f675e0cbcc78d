"""Define the training losses of train_imdb_models.py: distillation, and a spelling penalty."""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import takewhile

import torch
from torch.nn.functional import cross_entropy

from rlhf_course.evaluation import words_of


class DistillationLoss:
    """Compute the cross-entropy to a teacher's next-token probabilities (arXiv:1503.02531)."""

    def __init__(self, teacher):
        self.teacher = teacher.eval().requires_grad_(False)

    def __call__(self, outputs, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
        """Return the loss for Trainer's ``compute_loss_func``; labels (B, L), -100 for padding."""
        rows = labels[:, 1:] >= 0
        self.teacher.to(labels.device)
        target = self.teacher(input_ids=labels.clamp(min=0)).logits[:, :-1][rows].float().softmax(1)
        return cross_entropy(outputs.logits[:, :-1][rows].float(), target)


class SpellingLoss:
    """Add ``weight`` times −log p(next token misspells no word) to another loss.

    A token misspells a word if the resulting letters start no word in ``texts``, or if it ends a
    word that is not in ``texts``. Without the penalty, such tokens have a few percent of the total
    probability, as in "ofthere" or "hatesk". The penalty is the unlikelihood of Welleck et al. 2019
    (arXiv:1908.04319, equation 4) with all these tokens as one negative candidate.
    """

    def __init__(self, texts: Sequence[str], tokenizer, weight: float, loss: Callable):
        self.weight = weight
        self.loss = loss
        self.words = sorted({word for text in texts for word in words_of(text)})
        known = {*self.words}
        begun = {word[:end] for word in known for end in range(len(word) + 1)}
        pieces = [tokenizer.decode([token]).lower() for token in range(len(tokenizer))]
        # A token's first letters continue a word; the rest ends it, and may start another word.
        self.pieces = [re.match("([a-z]*)(.*)", piece, re.DOTALL).groups() for piece in pieces]
        self.tokens = defaultdict(list)
        for token, (letters, rest) in enumerate(self.pieces):
            self.tokens[letters, bool(rest)].append(token)
        after_word = [not letters for letters, _ in self.pieces]
        after_none = [not x or x in (known if rest else begun) for x, rest in self.pieces]
        self.fits = torch.tensor([[False] * len(pieces), after_word, after_none])
        self.continuations = lru_cache(maxsize=None)(self._continuations)

    def _continuations(self, word: str) -> tuple[bool, torch.Tensor]:
        """Return whether ``word`` is complete, and the tokens that can follow its letters."""
        place = bisect_left(self.words, word)
        longer = [*takewhile(lambda other: other.startswith(word), self.words[place:])]
        ends = {other[len(word) :] for other in longer} - {""}
        keys = {(end[:k], False) for end in ends for k in range(1, len(end) + 1)}
        keys |= {(end, True) for end in ends}
        tokens = [token for key in keys for token in self.tokens.get(key, [])]
        return word in longer[:1], torch.tensor(tokens, dtype=torch.long)

    def unfinished(self, ids: list[int]) -> list[str]:
        """Return the letters of the unfinished word after each token."""
        word = ""
        words = []
        for token in ids:
            letters, rest = self.pieces[token]
            word = re.search("[a-z]*$", rest).group() if rest else word + letters
            words.append(word)
        return words

    def harmless(self, words: list[str]) -> torch.Tensor:
        """Return a mask (n, vocabulary): row i marks the tokens that do not misspell word i."""
        kinds = []
        tokens = []
        for word in words:
            is_complete, following = self.continuations(word)
            kinds.append(int(is_complete) if word else 2)
            tokens.append(following)
        mask = self.fits[torch.tensor(kinds)]
        mask[torch.repeat_interleave(torch.tensor([*map(len, tokens)])), torch.cat(tokens)] = True
        return mask

    def __call__(self, outputs, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
        """Return the loss for Trainer's ``compute_loss_func``; labels (B, L), -100 for padding."""
        rows = labels[:, 1:] >= 0
        logits = outputs.logits[:, :-1][rows].float()
        ids = ([token for token in row if token >= 0] for row in labels.tolist())
        words = [word for row in ids for word in self.unfinished(row)[:-1]]
        misspelled = ~self.harmless(words).to(logits.device)
        harmless = logits.masked_fill(misspelled, -torch.inf).logsumexp(1)
        penalty = (logits.logsumexp(1) - harmless).mean()
        return self.loss(outputs, labels) + self.weight * penalty
