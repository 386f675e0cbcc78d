"""Set up PPO on 40 tokens without text; a step takes a fraction of a second."""

import numpy as np
import torch
from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

EOS = 39
BATCH = 32
SHAPE = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
SHAPE |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), EOS)
SHAPE["initializer_range"] = 0.2
SAMPLING = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": 12}
logging.set_verbosity_error()


class Tokens:
    """Imitate a tokenizer for the trainer; padding is EOS, as in GPT-2."""

    pad_token_id = eos_token_id = EOS

    def batch_decode(self, rows, skip_special_tokens=False) -> list[str]:
        """Return each row's token ids as a text."""
        return [" ".join(map(str, row.tolist())) for row in rows]


def random_policy(seed: int, **config) -> AutoModelForCausalLMWithValueHead:
    """Return a random GPT-2 with a value head, no dropout, and GPT2Config(**config)."""
    torch.manual_seed(seed)
    config |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0)
    network = GPT2LMHeadModel(GPT2Config(**config))
    return AutoModelForCausalLMWithValueHead(network, summary_dropout_prob=0.0).eval()


def make_policy(
    seed: int = 0, eos_shift: float = 0.15
) -> AutoModelForCausalLMWithValueHead:
    """Return a random policy of 40 tokens; ``eos_shift`` makes EOS more likely."""
    policy = random_policy(seed, **SHAPE)
    network = policy.pretrained_model.transformer
    with torch.no_grad():  # EOS becomes more likely, so lengths vary
        network.ln_f.bias.fill_(0.5)
        network.wte.weight[EOS] += eos_shift
    return policy


def make_trainer(seed: int, eos_shift: float = 0.15, **config) -> PPOTrainer:
    """Return a trainer; config is for PPOConfig, and seed is for sampling."""
    sizes = {"batch_size": BATCH, "mini_batch_size": BATCH // 2}
    config = PPOConfig(**sizes | {"horizon": 1000.0} | config)
    policy = make_policy(0, eos_shift)
    torch.manual_seed(seed)
    np.random.seed(seed)
    return PPOTrainer(config, policy, tokenizer=Tokens())


def draw_queries(generator: torch.Generator, n: int = BATCH) -> list[torch.Tensor]:
    """Return n queries of 2 to 5 tokens."""
    lengths = torch.randint(2, 6, (n,), generator=generator).tolist()
    return [torch.randint(EOS, (size,), generator=generator) for size in lengths]


def score(responses: list[torch.Tensor]) -> torch.Tensor:
    """Return scores (B,): 4 · (share of tokens below 13 minus share above 25)."""
    means = [
        ((x < 13).float() - ((x > 25) & (x < EOS)).float()).mean() for x in responses
    ]
    return 4 * torch.stack(means)
