"""Normalize the settings of one call of ``generate``: one form, one place, one limit per row."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig

from rlhf_course.ppo.config import read_number

COUNTS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length", "top_k")
# Settings that would be ignored, or would change what a response is.
REFUSED = {
    "input_ids": "Pass the token ids of queries as the first argument.",
    "inputs": "Pass the token ids of queries as the first argument.",
    "inputs_embeds": "Pass the token ids of queries as the first argument.",
    "attention_mask": "Pass it to PPOTrainer.generate, or pass queries without padding.",
    "position_ids": "Positions count the tokens of each query.",
    "token_type_ids": "Pass only input_ids.",
    "model": "PPOTrainer.generate samples from its own policy.",
    "tokenizer": "PPOTrainer.generate uses its own tokenizer; leave it out.",
    "max_tokens": "Pass max_new_tokens.",
    "stop": "It would add EOS that was not sampled. Set eos_token_id instead.",
    "seed": "Call set_seed(seed) before generate.",
    "past_key_values": "Each call begins with an empty cache.",
    "return_dict_in_generate": "generate returns token ids; step returns log-probabilities.",
    "num_return_sequences": "For more responses, repeat queries.",
    "stop_strings": "It would add EOS that was not sampled. Set eos_token_id instead.",
    "stopping_criteria": "It would add EOS that was not sampled. Set eos_token_id instead.",
}
WITHOUT_EFFECT = {"num_return_sequences": 1}


def normalize(
    model, tokenizer, queries: Sequence[Tensor], lengths: Sequence[int] | None, given: Mapping
) -> tuple[dict, Tensor]:
    """Return the settings in one form, and how many tokens each response may have, (B,).

    A ``generation_config`` counts as if its settings were given one by one. A limit is the row's
    own: ``lengths``, or ``max_new_tokens``, or ``max_length`` without the tokens of its query; 0
    leaves it to transformers' default. Raises ``ValueError`` for a setting that cannot be honored.
    """
    settings = unpack(given)
    refuse(settings, queries)
    for name in COUNTS:
        if settings.get(name) is not None:
            settings[name] = read_number(name, settings[name], int)
    refuse_other_conventions(settings)
    for name in ("min_length", "min_new_tokens"):
        if settings.get(name, 0) is None or settings.get(name, 0) < 0:
            del settings[name]  # "no minimum" in classic scripts
    if settings.get("eos_token_id") is not None:
        settings["eos_token_id"] = token_list("eos_token_id", settings["eos_token_id"])
    if settings.get("pad_token_id") is None:
        settings["pad_token_id"] = pad_token_id(tokenizer)
    pad = read_number("pad_token_id", settings["pad_token_id"], int)
    if not 0 <= pad < model.vocab_size:
        raise ValueError(
            f"pad_token_id {pad} is not in 0–{model.vocab_size - 1}. Leave it out, or pass"
            " tokenizer.eos_token_id."
        )
    settings["pad_token_id"] = pad
    limits = row_limits(queries, lengths, settings)
    settings.pop("max_length", None)
    return settings, limits


def unpack(given: Mapping) -> dict:
    """Return the settings with those of ``generation_config``, which keyword arguments override."""
    settings = dict(given)
    config = settings.pop("generation_config", None)
    if config is None:
        return settings
    if not isinstance(config, GenerationConfig | Mapping):
        raise ValueError(
            f"generation_config is a {type(config).__name__}; pass a GenerationConfig or a dict."
        )
    saved = config.to_diff_dict() if isinstance(config, GenerationConfig) else dict(config)
    saved.pop("transformers_version", None)
    return saved | settings


def refuse(settings: dict, queries: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` for settings that cannot be honored; remove them if without effect."""
    for name, advice in REFUSED.items():
        value = settings.get(name)
        if value is None or value is False or value == WITHOUT_EFFECT.get(name):
            settings.pop(name, None)
        else:
            raise ValueError(f"generate cannot honor {name}. {advice}")
    minimum = settings.get("min_length") or 0
    if minimum > 0 and len({len(query) for query in queries}) > 1:
        raise ValueError(
            f"min_length={minimum} also counts the query, and in a batch its padding. Use"
            " min_new_tokens."
        )


def refuse_other_conventions(settings: dict) -> None:
    """Raise ``ValueError`` for values that only other libraries accept when they sample.

    A temperature that is a text, as in YAML, becomes a number.
    """
    if settings.get("do_sample") is False:
        return
    top_k = settings.get("top_k")
    if top_k is not None and top_k < 0:
        raise ValueError(
            f"top_k is {top_k}, which transformers does not accept; pass top_k=0 to sample from the"
            " whole vocabulary."
        )
    if settings.get("temperature") is not None:
        temperature = read_number("temperature", settings["temperature"])
        if temperature <= 0:
            raise ValueError(
                f"temperature is {temperature:g}, but sampling needs one above 0; pass"
                " temperature=1.0 for PPO, or do_sample=False for greedy decoding."
            )
        settings["temperature"] = temperature


def row_limits(
    queries: Sequence[Tensor], lengths: Sequence[int] | None, settings: Mapping
) -> Tensor:
    """Return the most tokens per response, (B,); 0 where no limit is given."""
    if lengths:
        limits = list(lengths)
    elif settings.get("max_new_tokens") is not None:
        limits = [settings["max_new_tokens"]] * len(queries)
    elif settings.get("max_length") is not None:
        limits = [settings["max_length"] - len(query) for query in queries]
        if min(limits) < 1:
            longest = max(len(query) for query in queries)
            raise ValueError(
                f"max_length={settings['max_length']} counts the query, and a query has"
                f" {longest} tokens. Use max_new_tokens."
            )
    else:
        return torch.zeros(len(queries), dtype=torch.long)
    if min(limits) < 1:
        raise ValueError(
            "A response needs at least 1 token. Raise max_new_tokens, or the length sampler's"
            " minimum."
        )
    return torch.tensor(limits)


def token_list(name: str, tokens) -> list[int]:
    """Return one token id or several as a list of integers; raise ``ValueError`` for a text."""
    several = tokens if isinstance(tokens, list | tuple) else [tokens]
    for token in several:
        if isinstance(token, str):
            raise ValueError(
                f"{name} has the text {token!r}; pass tokenizer.convert_tokens_to_ids({token!r})."
            )
    return [read_number(name, token, int) for token in torch.as_tensor(tokens).view(-1).tolist()]


def end_tokens(model, settings: Mapping) -> Tensor:
    """Return the ids (n,) of tokens that end a response; a chat model's config lists several.

    They are ``settings["eos_token_id"]`` if given (None and ids outside the vocabulary never end
    one), or the model's. Id 0 is a token like any other.
    """
    saved = getattr(model.pretrained_model, "generation_config", None)
    eos = getattr(saved, "eos_token_id", None)
    if eos is None:
        eos = model.config.eos_token_id
    if "eos_token_id" in settings:
        eos = settings["eos_token_id"]
    tokens = [] if eos is None else token_list("eos_token_id", eos)
    return torch.tensor(tokens, dtype=torch.long, device=model.device)


def pad_token_id(tokenizer) -> int:
    """Return the id of the padding token, or of EOS if the tokenizer has no padding token."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError("The tokenizer has no pad and no EOS token; set tokenizer.pad_token.")
