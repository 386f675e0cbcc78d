"""Value head, saving and loading, adapters."""

import numpy as np
import pytest
import torch
from builders import difference, make_policy, make_samples, make_trainer, python, snapshot
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.course.presets import ROOT
from rlhf_course.policy.network import FullPrecisionLinear
from rlhf_course.ppo.rollout import Samples, forward

load = AutoModelForCausalLMWithValueHead.from_pretrained
LORA = LoraConfig(
    task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True
)


def test_forward_gives_logits_loss_and_values():
    policy, ids = make_policy(), torch.tensor([[1, 2, 3]])
    logits, loss, values = policy(ids, labels=ids)
    assert logits.shape == (1, 3, 40) and loss.dim() == 0 and values.shape == (1, 3)
    selected = policy(ids, select=torch.tensor([[True, False, True]]))
    torch.testing.assert_close(selected[0], logits[0, [0, 2]])
    torch.testing.assert_close(selected[2], values[0, [0, 2]])


def test_both_ways_to_logits_agree():
    """The projection of selected hidden states, and the model's own logits, of which some are
    selected.
    """
    projecting, own = make_policy(), make_policy()
    assert own.logits_are_projections
    own.logits_are_projections = False
    ids, select = torch.arange(12).view(2, 6), torch.rand(2, 6) < 0.5
    for chosen in (None, select):
        pairs = zip(projecting(ids, select=chosen), own(ids, select=chosen), strict=True)
        for one, other in pairs:
            assert one is other or torch.equal(one, other)
    updated = []
    for policy in (projecting, own):
        trainer = make_trainer(policy, make_policy(1), mini_batch_size=4)
        np.random.seed(0)
        trainer.step(*make_samples())
        updated.append(snapshot(policy))
    assert difference(*updated) < 1e-6


@pytest.mark.parametrize(
    "change",
    [
        (Gemma2Config, {"final_logit_softcapping": 30.0}),
        (CohereConfig, {"logit_scale": 0.25}),
        (GraniteConfig, {"logits_scaling": 4.0}),
    ],
)
def test_a_model_that_changes_its_logits_keeps_its_own(change):
    kind, option = change
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(kind(**sizes | special | option)).eval()
    policy, ids = AutoModelForCausalLMWithValueHead(network).eval(), torch.arange(5).unsqueeze(0)
    assert not policy.logits_are_projections
    logits, _, values = policy(ids)
    torch.testing.assert_close(logits, network(ids).logits)
    hidden = network.base_model(ids).last_hidden_state
    torch.testing.assert_close(values, policy.v_head(hidden).squeeze(-1))
    with pytest.raises(ValueError, match="changes its logits after the projection"):
        policy(ids, project=False)


@pytest.mark.parametrize("adapted", [False, True])
def test_the_projection_stays_tied_to_the_embeddings(adapted):
    network = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2))
    if adapted:
        network = get_peft_model(network, LORA)
    policy = AutoModelForCausalLMWithValueHead(network)
    assert type(policy.projection) is FullPrecisionLinear
    assert policy.projection.weight is network.get_input_embeddings().weight


def test_the_value_head_fits_peft_s_copy_of_a_tied_projection():
    """peft makes the copy with in_features and out_features exchanged."""
    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32, tie_word_embeddings=True
    )
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        modules_to_save=["wte", "lm_head"],
        ensure_weight_tying=True,
    )
    policy = AutoModelForCausalLMWithValueHead(get_peft_model(GPT2LMHeadModel(config), lora))
    assert policy.v_head.summary.in_features == 16
    assert policy(torch.tensor([[1, 2, 3]]))[2].shape == (1, 3)


def test_layers_that_share_an_adapters_weights_are_saved(tmp_path):
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj"],
        layer_replication=[[0, 2], [0, 2]],
        init_lora_weights=False,
    )
    policy = load(tmp_path / "base", peft_config=lora)
    policy.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(load(tmp_path / "adapter")(ids)[0], policy(ids)[0])


def test_value_head_follows_the_models_final_norm():
    policy, ids = make_policy(), torch.tensor([[1, 2, 3]])
    hidden = policy.pretrained_model.transformer(ids).last_hidden_state
    torch.testing.assert_close(policy.v_head(hidden).squeeze(-1), policy(ids)[2])


def test_saved_policy_loads_here_and_in_plain_transformers(tmp_path):
    policy, ids = make_policy(), torch.tensor([[1, 2, 3]])
    policy.save_pretrained(tmp_path)
    assert difference(snapshot(policy), snapshot(load(tmp_path))) == 0
    plain, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]
    torch.testing.assert_close(plain(ids).logits, policy(ids)[0])


def test_value_head_initialisation():
    how = {"v_head_init_strategy": "normal", "v_head_initializer_range": 0.5}
    policy = load(make_policy(n_embd=64).pretrained_model, **how)
    assert policy.v_head.summary.bias.abs().max() == 0
    assert 0.3 < policy.v_head.summary.weight.std() < 0.7


def test_weights_load_in_float32_whatever_they_were_saved_in(tmp_path):
    make_policy().pretrained_model.to(torch.float16).save_pretrained(tmp_path)
    assert load(tmp_path).pretrained_model.dtype == torch.float32
    half = load(tmp_path, torch_dtype=torch.bfloat16)
    assert half.pretrained_model.dtype == torch.bfloat16


def test_deviation_a_fresh_adapters_reference_is_the_base():
    policy = load(make_policy().pretrained_model, peft_config=LORA)
    trainer = make_trainer(policy, learning_rate=1e-2)
    named = policy.named_parameters()
    base = {n: p.clone() for n, p in named if "lora" not in n and "v_head" not in n}
    assert abs(trainer.step(*make_samples())["objective/kl"]) < 1e-6
    assert abs(trainer.step(*make_samples())["objective/kl"]) > 1e-4
    assert all(torch.equal(base[n], p) for n, p in policy.named_parameters() if n in base)


def test_deviation_an_sft_adapters_reference_is_its_frozen_copy(tmp_path):
    """Continuing an adapter that is far from the base: KL is 0 at step 1 all the same."""
    sft = load(make_policy().pretrained_model, peft_config=LORA)
    with torch.no_grad():
        for name, parameter in sft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    trainer = make_trainer(sft, learning_rate=1e-2)
    frozen = {n: p.clone() for n, p in sft.named_parameters() if ".ref." in n}
    assert frozen and abs(trainer.step(*make_samples())["objective/kl"]) < 1e-6
    trainer.step(*make_samples())
    after = dict(sft.named_parameters())
    assert all(torch.equal(frozen[n], after[n]) and not after[n].requires_grad for n in frozen)
    sft.save_pretrained(tmp_path / "adapter")
    plain = PeftModel.from_pretrained(make_policy().pretrained_model, tmp_path / "adapter")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(plain.eval()(ids).logits, sft(ids)[0], atol=1e-5, rtol=0)


def test_logits_and_values_stay_in_float32_under_autocast():
    policy, ids = make_policy(), torch.tensor([[1, 2, 3]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        network = policy.pretrained_model(ids).logits.dtype
        logits, _, values = policy(ids)
    assert network == logits.dtype == values.dtype == torch.float32
    assert (logits != logits.bfloat16()).any()


def test_logits_of_bfloat16_weights_are_a_float32_product():
    policy, seen = make_policy(), []
    policy.pretrained_model.to(torch.bfloat16)
    head = policy.pretrained_model.get_output_embeddings()
    head.register_forward_pre_hook(lambda head, inputs: seen.append(inputs[0]))
    logits = policy(torch.tensor([[1, 2, 3]]))[0]
    expected = seen[0].double() @ head.weight.double().T
    assert (expected != expected.bfloat16()).any()
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)
    alone, together = head(seen[0][:, :1]), head(seen[0])[:, :1]
    torch.testing.assert_close(alone, together, atol=1e-6, rtol=1e-6)


def test_bf16_moves_ratios_by_percents_and_float32_does_not():
    policy = load(str(ROOT / "models" / "gpt2-imdb-mini")).eval()
    torch.manual_seed(0)
    queries, responses = ([torch.randint(5, 4000, (n % 9 + k,)) for n in range(64)] for k in (2, 4))
    samples = Samples.from_lists(queries, responses, torch.zeros(64), 0)
    for bf16, low, high in ((False, 0, 1e-4), (True, 0.01, 0.3)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            together, apart = forward(policy, samples)[0], forward(policy, samples, at_most=7)[0]
        ratio = (apart - together).exp()[samples.mask > 0]
        assert low <= (ratio - 1).abs().max() < high
        assert (ratio - 1).abs().mean() < 0.02


def test_deviation_a_reference_given_beside_an_adapter_is_used():
    policy = load(make_policy().pretrained_model, peft_config=LORA)
    given = make_trainer(policy, make_policy(1)).step(*make_samples())
    plain = make_trainer(reference=make_policy(1)).step(*make_samples())
    assert given["objective/kl"] == pytest.approx(plain["objective/kl"], abs=1e-5)


def test_a_disk_that_fills_while_saving_leaves_the_previous_policy_whole(tmp_path):
    """The operating system refuses files beyond 20 kB in a process that saves 200 kB."""
    code = (
        "from tests.builders import make_policy\n"
        "import resource, signal\n"
        "policy = make_policy(1, n_embd=64)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        f"policy.save_pretrained({str(tmp_path / 'policy')!r})\n"
    )
    policy = make_policy(0, n_embd=64)
    policy.save_pretrained(tmp_path / "policy")
    failed = python("-c", code, cwd=ROOT)
    assert failed.returncode != 0 and "File too large" in failed.stderr
    assert difference(snapshot(policy), snapshot(load(tmp_path / "policy"))) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
