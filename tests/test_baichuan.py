"""Converting Baichuan checkpoints: logits of an independent forward pass, refusals, the command."""

import json
import pickle
from functools import partial

import pytest
import torch
from baichuan_checkpoints import (
    EPS,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    VOCABULARY,
    make_config,
    make_tensors,
    save_source,
)
from builders import invalid, write_json
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf_course.baichuan import convert
from rlhf_course.baichuan.convert import convert_to_llama
from rlhf_course.baichuan.toy_checkpoint import norm_head, write_baichuan_checkpoint
from rlhf_course.command_line import exits
from scripts import convert_baichuan as script

SILENT = {"report": lambda line: None}


# A Baichuan forward pass, from its description.


def rms_norm(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def rotate(x, positions):
    """(B, heads, T, 8) turned by its positions (B, T): channel i together with channel i + 4."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * (
        1.0 / 10_000.0 ** (torch.arange(half) * 2 / x.shape[-1])
    )
    angles = torch.cat([angles, angles], -1)
    return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()


def baichuan_logits(w, ids, mask, positions, has_norm_head):
    """Logits (B, T, V) of the tensors ``w`` under Baichuan's names; ``mask`` (B, T) is 0 at
    padding.
    """
    batch, length = ids.shape
    allowed = torch.ones(length, length).tril().bool() & mask[:, None, None, :].bool()
    x = w["model.embed_tokens.weight"][ids]
    for i in range(LAYERS):
        layer = {name.split(f"layers.{i}.")[1]: w[name] for name in w if f"layers.{i}." in name}
        h = rms_norm(x, layer["input_layernorm.weight"])
        packed = F.linear(h, layer["self_attn.W_pack.weight"]).unflatten(
            -1, (3, HEADS, HIDDEN // HEADS)
        )
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        scores = (
            rotate(q, positions)
            @ rotate(k, positions).transpose(-1, -2)
            * (HIDDEN // HEADS) ** -0.5
        )
        attended = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) @ v
        x = x + F.linear(
            attended.transpose(1, 2).reshape(batch, length, HIDDEN),
            layer["self_attn.o_proj.weight"],
        )
        h = rms_norm(x, layer["post_attention_layernorm.weight"])
        gated = F.silu(F.linear(h, layer["mlp.gate_proj.weight"])) * F.linear(
            h, layer["mlp.up_proj.weight"]
        )
        x = x + F.linear(gated, layer["mlp.down_proj.weight"])
    head = w["lm_head.weight"]
    return F.linear(
        rms_norm(x, w["model.norm.weight"]), F.normalize(head, dim=1) if has_norm_head else head
    )


def left_padded():
    """Three rows of 9, 6 and 1 real tokens, as generate() feeds them."""
    torch.manual_seed(1)
    mask = (torch.arange(9) >= torch.tensor([[0], [3], [8]])).long()
    return torch.randint(3, VOCABULARY, (3, 9)) * mask, mask, (mask.cumsum(1) - 1).clamp(min=0)


def difference(folder, tensors, has_norm_head):
    """Largest difference of logits at real tokens from the forward pass above, as a share of the
    largest logit.
    """
    ids, mask, positions = left_padded()
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    assert type(model) is LlamaForCausalLM
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    wanted = baichuan_logits(tensors, ids, mask, positions, has_norm_head)[mask.bool()]
    assert wanted.std() > 0.05
    return ((found[mask.bool()] - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize(
    ("kind", "shards"),
    [("bin", 3), ("bin", 0), ("legacy", 2), ("safetensors", 3), ("safetensors", 0)],
)
@pytest.mark.parametrize("second", [False, True], ids=["plain", "norm"])
def test_the_converted_model_gives_baichuans_logits(
    tmp_path, tokenizer_model, kind, shards, second
):
    tensors, lines = make_tensors(), []
    source = save_source(
        tmp_path / "source", tokenizer_model, tensors, make_config(second), kind, shards
    )
    target = convert_to_llama(source, tmp_path / "deep" / "target", report=lines.append)
    assert difference(target, tensors, second) <= 1e-6
    assert len(lines) == 1 and ("NormHead" in lines[0]) == second and "Guessed" in lines[0]


def test_asking_for_a_head_overrides_the_guess(tmp_path, source, capsys):
    for asked, word in ((False, "no"), (True, "yes")):
        target = tmp_path / word
        assert script.main([str(source), str(target), "--norm-head", word]) == 0
        assert str(target) in capsys.readouterr().out
        assert difference(target, make_tensors(), asked) <= 1e-6
        assert difference(target, make_tensors(), not asked) > 0.01


def test_bfloat16_is_kept_and_the_files_hold_llamas_tensors(tmp_path, tokenizer_model, monkeypatch):
    monkeypatch.setattr(
        convert, "save_torch_state_dict", partial(save_torch_state_dict, max_shard_size=50_000)
    )
    w = make_tensors(torch.bfloat16)
    source = save_source(tmp_path / "source", tokenizer_model, w)
    target = convert_to_llama(source, tmp_path / "target", **SILENT)
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 4096 and "auto_map" not in config
    assert [config[f"{role}_token_id"] for role in ("pad", "bos", "eos")] == [0, 1, 2]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 1 and files == sorted(set(index["weight_map"].values()))
    tensors = {name: tensor for file in files for name, tensor in load_file(target / file).items()}
    assert index["weight_map"].keys() == tensors.keys()
    assert tensors.keys() == LlamaForCausalLM(LlamaConfig(**config)).state_dict().keys()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["lm_head.weight"], F.normalize(w["lm_head.weight"], dim=1))
    assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16
    assert not list(target.glob("*.py")) and not list(target.glob(".*"))


def drop(name):
    def change(source):
        (source / name).unlink()

    return change


def config(**changes):
    """Change entries of config.json; None takes one away."""

    def change(source):
        content = json.loads((source / "config.json").read_text()) | changes
        kept = {key: value for key, value in content.items() if value is not None}
        write_json(source / "config.json", kept)

    return change


def put(name, content):
    return lambda source: (source / name).write_bytes(content)


def in_shard(**changes):
    """Change tensors of the first shard; None takes one away."""

    def change(source):
        file = source / FIRST
        tensors = torch.load(file, weights_only=True) | changes
        torch.save({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)

    return change


FIRST = "pytorch_model-00001-of-00003.bin"
PACK = "model.layers.0.self_attn.W_pack.weight"
EMBEDDING = "model.embed_tokens.weight"
NO_TOKENIZER = "cannot be turned into a fast tokenizer: "
REFUSED = {
    "llama": (config(architectures=["LlamaForCausalLM"]), "has no Baichuan checkpoint"),
    "no sizes": (config(rms_norm_eps=None), "has no Baichuan checkpoint"),
    "13B by width": (config(hidden_size=5120), "looks like a 13B model, which uses ALiBi"),
    "13B by positions": (config(max_position_embeddings=None), "looks like a 13B model"),
    "either generation": (config(z_loss_weight=None), "--norm-head"),
    "no shard": (drop(FIRST), f"{FIRST} was not loaded: it is missing"),
    "git-lfs": (put(FIRST, b"version https://git-lfs.github.com/spec/v1"), "or damaged"),
    "lacks one": (in_shard(**{EMBEDDING: None}), rf"{EMBEDDING} is None, but .* needs \[640"),
    "has more": (in_shard(mask=torch.ones(3)), r"mask is \[3\], but config.json needs None"),
    "no tokenizer": (drop("tokenizer.model"), NO_TOKENIZER + "it is missing or damaged"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_sentence_for_what_cannot_be_converted(tmp_path, source, case):
    change, sentence = REFUSED[case]
    change(source)
    with invalid(sentence):
        convert_to_llama(source, tmp_path / "target", **SILENT)
    assert not (tmp_path / "target").exists()


def test_generation_settings_and_the_tokenizers_file_are_kept(tmp_path, source, capsys):
    generation = {"user_token_id": 195, "assistant_token_id": 196, "do_sample": True, "top_k": 5}
    write_json(source / "generation_config.json", generation)
    (source / "added_tokens.json").write_text("{}")
    folder = convert_to_llama(source, tmp_path / "llama")
    for name in convert.COPIED:
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert "Not copied: added_tokens.json." in capsys.readouterr().out
    text = "你好 world 12345"
    expected = convert.read_tokenizer(source, convert.read_config(source))(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == expected
    loaded = AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert loaded.user_token_id == 195 and loaded.top_k == 5


def test_a_target_that_holds_something_is_left_alone(tmp_path, source):
    target = tmp_path / "target"
    target.mkdir()
    convert_to_llama(source, target, **SILENT)  # an empty one is used
    before = sorted(target.iterdir())
    with invalid("already exists and is not an empty folder"):
        convert_to_llama(source, target, **SILENT)
    assert sorted(target.iterdir()) == before


class Runs:
    """What a hostile checkpoint could hold."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, source, kind):
    marker = tmp_path / "ran"
    content = {EMBEDDING: Runs(marker)}
    if kind == "pickle":
        (source / FIRST).write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, source / FIRST, _use_new_zipfile_serialization=kind == "zip")
    with invalid(f"{FIRST} was not loaded: it is missing or damaged, or would run code"):
        convert_to_llama(source, tmp_path / "target", **SILENT)
    assert not marker.exists()


# Small checkpoints for the embedded world.


def test_a_model_trained_with_a_norm_head_comes_back(tmp_path, tokenizer_model):
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": HEADS, "max_position_embeddings": 128}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    norm_head(model)
    ids = torch.randint(3, VOCABULARY, (4, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    original = model.lm_head.parametrizations.weight.original
    torch.testing.assert_close(model.lm_head.weight.norm(dim=1), torch.ones(VOCABULARY))
    assert original.norm(dim=1).std() > 1e-3

    source = write_baichuan_checkpoint(model, tokenizer_model, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], original)
    assert tensors[PACK].shape == (3 * HIDDEN, HIDDEN)
    with invalid("contains custom code which must be executed"):
        AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False)
    converted = AutoModelForCausalLM.from_pretrained(
        convert_to_llama(source, tmp_path / "target", **SILENT)
    )
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, model(ids).logits)


# The command.


def test_the_command_fails_with_a_sentence_and_ctrl_c_leaves_nothing(
    tmp_path, source, capsys, monkeypatch
):
    target = [str(tmp_path / "deep" / "target")]
    assert exits.run("convert_baichuan.py", script.main, [str(tmp_path / "nothing"), *target]) == 1
    error = capsys.readouterr().err
    assert error.startswith("convert_baichuan.py: ") and error.count("\n") == 1
    assert "config.json" in error

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaConfig, "save_pretrained", stop)  # after the weights
    assert exits.run("convert_baichuan.py", script.main, [str(source), *target]) == 130
    assert not any((tmp_path / "deep").iterdir())
