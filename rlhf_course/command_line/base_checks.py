"""Warn, in one sentence each, if a base does not fit the data or the step size."""

import re
from collections.abc import Sequence

from torch import nn

LARGE = 50_000_000  # weights; the course's own models have fewer
LARGE_STEP = 5e-4  # Adam's step size for an adapter on a large base is about 1e-4
# Tokens per character. Measured: English by SmolLM2 0.28, Chinese by baichuan-mini 0.51; the other
# way round, Chinese by SmolLM2 1.84, English by baichuan-mini 0.88.
MOST_TOKENS = 0.8
COMPARED = 200  # texts
TURN = re.compile(r"\n\n(?:Human|Assistant):")
MARKERS = re.compile(
    r"<\|(?:im_start|im_end|user|assistant|start_header_id|eot_id)\|>|\[/?INST\]|<start_of_turn>"
    r"|### (?:Instruction|Response):"
)


def warn_about_texts(tokenizer, texts: Sequence[str]) -> None:
    """Print a sentence if texts seem to be of another language or template than the tokenizer's.

    The test for the language: the tokenizer needs more than ``MOST_TOKENS`` tokens per character.
    The test for the template: a tenth of the texts contain a chat template's markers, such as
    <|im_start|> or [INST]. The commands apply the tokenizer's own template, so the markers would
    appear twice, or be another model's.
    """
    texts = [text for text in texts[:COMPARED] if text.strip()]
    if not texts:
        return
    bare = [TURN.sub("", text) for text in texts]  # these marks say nothing about the language
    tokens = sum(len(ids) for ids in tokenizer(bare, add_special_tokens=False)["input_ids"])
    characters = sum(len(text) for text in bare)
    if tokens > MOST_TOKENS * characters:
        print(
            f"Warning: the tokenizer needs {tokens / characters:.1f} tokens per character of the"
            " data, as for a language that the base does not know. Use data in the base's language."
        )
    found = [match[0] for match in map(MARKERS.search, texts) if match]
    if 10 * len(found) >= len(texts):
        print(
            f"Warning: {len(found)} of {len(texts)} texts contain {found[0]}, a chat template's"
            " marker. Remove the markers from the data: the base's own template is applied here."
        )


def warn_about_step_size(model: nn.Module, preset: str, learning_rate: float) -> None:
    """Print a sentence if a large base would be trained with a small model's step size."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    if weights > LARGE and learning_rate >= LARGE_STEP:
        print(
            f"Warning: --learning_rate {learning_rate:g} (preset {preset}) is for models below"
            f" {LARGE // 10**6} million weights, and this one has {weights / 1e6:.0f} million."
            " Use --preset small, or --learning_rate 1e-4."
        )
