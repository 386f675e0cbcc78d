"""Make a fast tokenizer with the same ids as a SentencePiece BPE model."""

import re
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

PROBES = [
    "",
    "  ",
    "强化学习（RLHF）用 PPO 训练语言模型：今天的天气怎么样？\r\n",
    " leading,  two,   three! The quick brown fox, isn't it? It costs $3.50 and trailing  ",
    "0 12 345 6789 3.14159 2024年12月31日 ４２",
    "def f(x):\n    if x:\n\treturn x  # 注释\n\n\n        y = 1",
    "🙂👍🏽 👩‍👩‍👧 ❤️ ＡＢＣ，①②③ ﬁne ½ ㎏ Ⅳ … e\u0301 a\u0308 A\u030a naïve",
    "한국어 \u1112\u1161\u11ab かな ｶﾅ ภาษาไทย हिन्दी עברית العربية Ελληνικά 𠮷野家 𝒳",
    " \u00a0\u3000\u200b\u2028",
]


def sentencepiece_to_fast(model_file: str | Path, **options) -> PreTrainedTokenizerFast:
    """Make a fast tokenizer from a model file; ``options`` can set special tokens.

    Control pieces (``<s>``) become special tokens, although SentencePiece does not match them in
    texts. Both tokenizers match user-defined pieces (``<reserved_106>``). Raises ``ValueError`` if
    the file is damaged or ids would change.
    """
    refused = f"{model_file} cannot be turned into a fast tokenizer"
    try:
        original = SentencePieceProcessor(model_file=str(model_file))
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{refused}: it is missing or damaged. Download it again.") from error
    native = PreTrainedTokenizerFast.convert_to_native_format(vocab_file=str(model_file))
    tokenizer = native["tokenizer_object"]
    pieces = native["additional_special_tokens"]
    control_pieces = [str(piece) for piece in pieces if piece.special]
    user_pieces = [str(piece) for piece in pieces if not piece.special]
    has_dummy_prefix = "".join(original.encode("a", out_type=str)).startswith("▁")
    if has_dummy_prefix:
        _add_dummy_prefix(tokenizer, user_pieces)
    else:
        tokenizer.add_tokens([AddedToken(name, normalized=True) for name in user_pieces])
    tokenizer.add_tokens(
        [AddedToken(name, normalized=False, special=True) for name in control_pieces]
    )
    _check_ids(original, tokenizer, refused)
    settings = {"pad_token": native["unk_token"], "clean_up_tokenization_spaces": False}
    for role in ("unk_token", "bos_token", "eos_token"):
        if role in native:
            settings[role] = native[role]
    settings |= options
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def _check_ids(original: SentencePieceProcessor, tokenizer: Tokenizer, refused: str) -> None:
    """Raise ``ValueError`` unless both tokenizers give the probes and all pieces the same ids."""
    pieces = [
        original.id_to_piece(i).replace("▁", " ")
        for i in range(len(original))
        if not (original.is_control(i) or original.is_unknown(i))
    ]
    repeated_pieces = [f"{piece}a {piece} 你{piece}{piece}" for piece in pieces]
    texts = [*PROBES, *pieces, *repeated_pieces]
    all_expected = original.encode(texts)
    all_encoded = tokenizer.encode_batch(texts)
    for text, expected, encoded in zip(texts, all_expected, all_encoded, strict=True):
        if encoded.ids != expected:
            raise ValueError(f"{refused}: ids for {text[:60]!r} would differ. Use another model.")


def _add_dummy_prefix(tokenizer: Tokenizer, user_pieces: list[str]) -> None:
    """Put a space before every text and remove it when decoding; transformers does neither.

    As added tokens, user-defined pieces would also get the prefix. So they are split off as words
    instead, and the BPE model keeps a word whole if the word is in its vocabulary.
    """
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(" ", "▁"), normalizers.Prepend("▁")]
    )
    tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Strip(" ", left=1, right=0)])
    if user_pieces:
        longest_first = sorted(user_pieces, key=len, reverse=True)
        pattern = "|".join(re.escape(piece) for piece in longest_first)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.model.ignore_merges = True
