"""Sampling by a CUDA graph gives the tokens of sampling without, whatever has happened since it was
captured.
"""

import pytest
import torch
from builders import EOS, PadTokenizer, make_policy, make_samples, make_trainer
from peft import LoraConfig
from pretend_gpu import graphs
from pretend_gpu.counts import COUNTS

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.ppo.decoder import Decoders
from rlhf_course.ppo.sampling import generate

QUERIES = make_samples()[0]
PLAIN = {"do_sample": True, "top_k": 0, "top_p": 1.0}


def sample(policy, decoders=None, seed: int = 0, **settings) -> list[list[int]]:
    """Responses of 20 tokens without EOS: no row leaves the batch, so that both ways draw the same
    random numbers.
    """
    torch.manual_seed(seed)
    settings = {"max_new_tokens": 20, "eos_token_id": []} | settings
    return [
        r.tolist()
        for r in generate(policy, PadTokenizer(), QUERIES, decoders=decoders, **PLAIN | settings)
    ]


def test_the_tokens_are_those_of_sampling_without_a_graph_also_after_an_update():
    policy, decoders = make_policy().to("cuda"), Decoders()
    trainer, seen = make_trainer(policy, learning_rate=1e-2), set()
    for seed in range(3):
        found = sample(policy, decoders, seed, begin_suppress=[3])
        assert found == sample(policy, None, seed, begin_suppress=[3]) and decoders.decoder.graph
        seen.add(id(decoders.decoder.graph))
        trainer.step(*make_samples(seed=seed))
    assert len(seen) == 1


def test_with_autocast_no_cast_of_older_weights_is_read():
    """In bfloat16 attention over other widths rounds otherwise, so that some tokens differ; few of
    the first ones.
    """
    policy, decoders = make_policy().to("cuda"), Decoders()
    shares = []
    for seed in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            both = zip(sample(policy, decoders, seed), sample(policy, None, seed), strict=True)
            shares.append(
                sum(a == b for x, y in both for a, b in zip(x[:6], y[:6], strict=True)) / 48
            )
        policy.load_state_dict(make_policy(7).state_dict())
    assert min(shares) > 0.9 and decoders.decoder.graph


def test_weights_at_another_place_and_other_shapes_make_a_new_decoder():
    policy, decoders = make_policy().to("cuda"), Decoders()
    sample(policy, decoders)
    first = decoders.decoder
    assert sample(policy, decoders) and decoders.decoder is first
    policy.to("cpu").load_state_dict(make_policy(7).state_dict())
    policy.to("cuda")
    assert sample(policy, decoders) == sample(policy) and decoders.decoder is not first
    assert sample(policy, decoders, max_new_tokens=40) == sample(policy, max_new_tokens=40)


def test_an_adapter_is_sampled_as_it_is_and_switching_it_makes_a_new_decoder():
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], init_lora_weights=False
    )
    network = make_policy().pretrained_model
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(network, peft_config=lora).to("cuda")
    decoders = Decoders()
    tuned = sample(policy, decoders)
    assert tuned == sample(policy)
    policy.pretrained_model.add_adapter("other", lora)
    policy.pretrained_model.set_adapter("other")
    assert sample(policy, decoders) == sample(policy) != tuned


def test_rows_end_at_their_lengths_and_at_eos():
    policy, decoders, lengths = make_policy().to("cuda"), Decoders(), [3 + row for row in range(8)]
    torch.manual_seed(0)
    for _ in range(3):
        responses = generate(
            policy, PadTokenizer(), QUERIES, lengths, eos_token_id=EOS, decoders=decoders, **PLAIN
        )
        assert all(
            0 < len(r) <= n and EOS not in r.tolist()[:-1]
            for r, n in zip(responses, lengths, strict=True)
        )
        assert all(len(r) == n or r[-1] == EOS for r, n in zip(responses, lengths, strict=True))


def test_weights_of_nan_are_named():
    policy = make_policy().to("cuda")
    torch.nn.init.constant_(policy.pretrained_model.transformer.h[0].ln_1.weight, float("nan"))
    with pytest.raises(FloatingPointError, match="next-token probabilities hold NaN"):
        sample(policy, Decoders())


def test_a_model_that_cannot_be_captured_is_sampled_without_a_graph():
    policy, decoders = make_policy().to("cuda"), Decoders()
    policy.pretrained_model.transformer.h[0].register_forward_hook(
        lambda module, args, output: float(args[0].sum()) and None
    )
    with pytest.warns(
        UserWarning, match="goes on without a CUDA graph.*not permitted when stream is capturing"
    ):
        found = sample(policy, decoders)
    assert found == sample(policy) == sample(policy, decoders) and graphs.capturing is None


def test_a_token_is_one_launch():
    policy, decoders = make_policy().to("cuda"), Decoders()
    sample(policy, decoders)
    COUNTS.clear()
    with COUNTS("again"):
        sample(policy, decoders)
    assert COUNTS.launches["again"]["graph"] == 19 and COUNTS.replayed["again"] > 19 * 30
    assert sum(COUNTS.launches["again"].values()) < 19 + 120
