"""Nearly fifty architectures, at toy size: sampled and scored as the bare network would.

CI tests a fixed sample; ``make test-all`` tests every family.
"""

import pytest
import torch
import transformers
from builders import EOS, SAMPLING, make_trainer

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.policy.network import say_once

TOKENS = 40
COMMON = {"vocab_size": TOKENS, "bos_token_id": EOS, "eos_token_id": EOS}
PADDED = COMMON | {"pad_token_id": EOS}
LLAMA_LIKE = PADDED | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
ALL_HEADS = LLAMA_LIKE | {"num_key_value_heads": 2}
BERT_LIKE = {name: LLAMA_LIKE[name] for name in LLAMA_LIKE if name != "num_key_value_heads"}
GPT_LIKE = PADDED | {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR_HEADS = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}
SAMPLE = {
    "GPT2",
    "Llama",
    "Qwen3",
    "Gemma3Text",
    "Phi3",
    "Qwen3_5Text",
    "Lfm2",
    "Bloom",
    "OPT",
    "Llama4Text",
}

# The name of a configuration's class, without "Config", and its settings.
FAMILIES = {
    "GPT2": GPT_LIKE,
    "GPTNeo": PADDED
    | {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 128}
    | {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "GPTNeoX": BERT_LIKE,
    "GPTJ": GPT_LIKE | {"rotary_dim": 8},
    "CodeGen": GPT_LIKE | {"n_head": 4, "rotary_dim": 4},
    "GPTBigCode": GPT_LIKE,
    "OPT": BERT_LIKE | {"word_embed_proj_dim": 32, "ffn_dim": 48, "pad_token_id": 1},
    "Bloom": PADDED | {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "Mpt": PADDED | {"d_model": 32, "n_layers": 2, "n_heads": 2, "expansion_ratio": 2},
    "Falcon": PADDED | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "XGLM": PADDED
    | {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 2, "pad_token_id": 1},
    "BioGpt": BERT_LIKE | {"pad_token_id": 1},
    "Llama": LLAMA_LIKE,
    "Mistral": LLAMA_LIKE | {"sliding_window": 6},
    "Qwen2": LLAMA_LIKE,
    "Qwen3": LLAMA_LIKE | {"head_dim": 16},
    "Gemma": LLAMA_LIKE | {"head_dim": 16},
    "Gemma2": LLAMA_LIKE | {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "Gemma3Text": LLAMA_LIKE | {"head_dim": 16, "query_pre_attn_scalar": 16} | SLIDING,
    "Phi": ALL_HEADS,
    "Phi3": LLAMA_LIKE | {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    "StableLm": LLAMA_LIKE,
    "Starcoder2": LLAMA_LIKE,
    "Cohere": LLAMA_LIKE,
    "Cohere2": LLAMA_LIKE | SLIDING,
    "Granite": LLAMA_LIKE,
    "Olmo": LLAMA_LIKE,
    "Olmo2": LLAMA_LIKE,
    "Olmo3": LLAMA_LIKE | SLIDING,
    "Glm": LLAMA_LIKE | {"head_dim": 16},
    "Glm4": LLAMA_LIKE | {"head_dim": 16},
    "SmolLM3": LLAMA_LIKE,
    "Ernie4_5": LLAMA_LIKE | {"head_dim": 16},
    "Exaone4": LLAMA_LIKE | SLIDING,
    "HunYuanDenseV1": LLAMA_LIKE | {"head_dim": 16},
    "Mixtral": LLAMA_LIKE | EXPERTS,
    "GptOss": LLAMA_LIKE | EXPERTS | SLIDING | {"head_dim": 16},
    "Llama4Text": LLAMA_LIKE
    | {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 8}
    | {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 32},
    "Olmoe": LLAMA_LIKE | {"num_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": LLAMA_LIKE
    | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "DeepseekV3": ALL_HEADS
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    | {"v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    | {"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "Qwen3_5Text": LLAMA_LIKE | MIXED | LINEAR_HEADS,
    "Qwen3Next": LLAMA_LIKE
    | MIXED
    | LINEAR_HEADS
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"shared_expert_intermediate_size": 16},
    "Lfm2": LLAMA_LIKE | {"layer_types": ["conv", "full_attention"]},
    "FalconH1": LLAMA_LIKE
    | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "Bamba": LLAMA_LIKE | MAMBA_2 | {"attn_layer_indices": [1]},
    "GraniteMoeHybrid": LLAMA_LIKE
    | MAMBA_2
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 2}
    | {"num_experts_per_tok": 1, "shared_intermediate_size": 16},
    "Mamba": COMMON | {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
}


def build(name: str) -> torch.nn.Module:
    """Return a random network whose distributions are uneven."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() > 1 and weight.std() < 0.05:
                weight.normal_(std=0.2)
    return network


@torch.no_grad()
def logprobs_by_hand(network, query, response) -> torch.Tensor:
    """Return the response tokens' log-probabilities, (R,), from a forward pass without padding."""
    tokens = torch.cat([query, response])[None]
    logits = network(input_ids=tokens).logits[0, len(query) - 1 : -1].float()
    return logits.log_softmax(dim=-1).gather(1, response[:, None])[:, 0]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in FAMILIES],
)
def test_a_family_is_sampled_and_scored_as_by_hand(name):
    network = build(name)
    trainer = make_trainer(
        AutoModelForCausalLMWithValueHead(network), batch_size=4, mini_batch_size=4
    )
    generator = torch.Generator().manual_seed(1)
    queries = [torch.randint(EOS, (length,), generator=generator) for length in (3, 11, 6, 1)]
    greedy = {"return_prompt": False, "max_new_tokens": 10, "do_sample": False}
    alone = [trainer.generate(query, **greedy)[0] for query in queries]
    together = trainer.generate(queries, **greedy)
    assert [response.tolist() for response in together] == [row.tolist() for row in alone]
    responses = trainer.generate(queries, return_prompt=False, max_new_tokens=10, **SAMPLING)
    responses[1] = responses[1][:3]
    expected = [logprobs_by_hand(network, *pair) for pair in zip(queries, responses, strict=True)]
    stats = trainer.step(queries, responses, [torch.tensor(float(row)) for row in range(4)])
    logprobs = torch.as_tensor(stats["objective/logprobs"])
    for row, by_hand in enumerate(expected):
        assert (logprobs[row, : len(by_hand)] - by_hand).abs().max() < 1e-4


def test_router_logits_are_switched_off(capsys):
    say_once.cache_clear()
    config = transformers.MixtralConfig(**FAMILIES["Mixtral"], output_router_logits=True)
    policy = AutoModelForCausalLMWithValueHead(transformers.MixtralForCausalLM(config))
    assert "output_router_logits is switched off" in capsys.readouterr().out
    assert not policy.config.output_router_logits
    make_trainer(policy)
