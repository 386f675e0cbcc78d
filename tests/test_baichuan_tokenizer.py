"""Baichuan's tokenizer: the token ids of SentencePiece, or a refusal."""

import io

import pytest
import sentencepiece
from baichuan_checkpoints import TEXTS
from builders import edit_json
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer

from rlhf_course.baichuan.convert import convert_to_llama
from rlhf_course.baichuan.sentencepiece import PROBES, sentencepiece_to_fast
from rlhf_course.baichuan.toy_checkpoint import ASSISTANT, USER, train_sentencepiece

SAID = [*PROBES, *TEXTS[:5], "你好　世界 12,345", "a" * 70, "   \n\n  x", "🙂" * 3]
SAID += ["\x00\x01", "▁ ▁"]
SILENT = {"report": lambda line: None}
PLAIN = {
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
}


def train(folder, **options):
    """A SentencePiece model with these options, which need not be Baichuan's."""
    model = io.BytesIO()
    given = {"model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "num_threads": 1}
    given |= PLAIN
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, hard_vocab_limit=False, **given | options
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


def assert_same_ids(model_file, tokenizer, texts):
    original = SentencePieceProcessor(model_file=str(model_file))
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids == original.encode(text), text
        assert tokenizer.decode(ids) == original.decode(ids), text


def test_ids_are_sentencepieces_through_auto_tokenizer(tmp_path, source):
    converted = convert_to_llama(source, tmp_path / "target", **SILENT)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    asked = [f"{USER}{text}{ASSISTANT}{text} {USER} {USER}" for text in SAID]
    assert_same_ids(source / "tokenizer.model", tokenizer, SAID + asked)
    assert tokenizer.convert_tokens_to_ids([USER, ASSISTANT]) == [195, 196]
    roles = ("pad", "bos", "eos", "unk")
    assert [getattr(tokenizer, f"{role}_token_id") for role in roles] == [0, 1, 2, 0]
    assert tokenizer(f"a</s>{USER}")["input_ids"][-2:] == [2, 195]  # </s> is a special token
    assert tokenizer.decode([1, 195, 2], skip_special_tokens=True) == USER
    assert tokenizer.model_max_length == 4096 and "token_type_ids" not in tokenizer("a")
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert_same_ids(source / "tokenizer.model", again, asked)


@pytest.mark.parametrize("reserved", [[], [USER, "▁▁▁▁", "<h>"]], ids=["plain", "reserved"])
@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no prefix"])
def test_spaces_of_other_models(tmp_path, prefix, reserved):
    path = train(tmp_path, add_dummy_prefix=prefix, user_defined_symbols=reserved)
    texts = SAID + [f"{USER}{text}  <h> {USER}    a" for text in SAID if reserved]
    assert_same_ids(path, sentencepiece_to_fast(path), texts)


def test_bos_and_eos_are_added_where_the_source_does(tmp_path, source):
    how = {"add_bos_token": True, "add_eos_token": True, "padding_side": "left"}
    edit_json(source / "tokenizer_config.json", **how)
    tokenizer = AutoTokenizer.from_pretrained(convert_to_llama(source, tmp_path / "b", **SILENT))
    plain = tokenizer("你好", add_special_tokens=False)["input_ids"]
    assert tokenizer("你好")["input_ids"] == [1, *plain, 2] and tokenizer.padding_side == "left"
    assert 1 not in plain and 2 not in plain


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nfkc"},
        {"remove_extra_whitespaces": True},
        {"model_type": "unigram", "vocab_size": 400},
        {"treat_whitespace_as_suffix": True, "add_dummy_prefix": True},
    ],
)
def test_what_a_fast_tokenizer_cannot_do_is_refused(tmp_path, options):
    with pytest.raises(ValueError, match="into a fast tokenizer: ids for"):
        sentencepiece_to_fast(train(tmp_path, **options))


def test_the_small_tokenizer_is_deterministic_and_has_baichuans_ids(tmp_path, tokenizer_model):
    again = train_sentencepiece(TEXTS, 600, tmp_path)
    assert again.read_bytes() == tokenizer_model.read_bytes()
    pieces = SentencePieceProcessor(model_file=str(again))
    wanted = {0: "<unk>", 1: "<s>", 2: "</s>", 195: USER, 196: ASSISTANT}
    assert {i: pieces.id_to_piece(i) for i in wanted} == wanted and pieces.get_piece_size() <= 600
    text = f"{USER}  天气 2024{ASSISTANT}"
    assert pieces.decode(pieces.encode(text)) == text
    assert pieces.encode("12345", out_type=str) == list("12345")
