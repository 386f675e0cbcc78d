"""A SentencePiece BPE model as a fast tokenizer with the same ids."""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor
from sentencepiece import sentencepiece_model_pb2 as spm
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPACE = "▁"  # how SentencePiece writes a space
Piece = spm.ModelProto.SentencePiece
PROBES = [
    "",
    " ",
    "   ",
    "\n",
    "你好，世界！今天的天气怎么样？",
    "强化学习（RLHF）用 PPO 训练语言模型。",
    "The quick brown fox, isn't it? It costs $3.50!",
    " leading,  two,   three and trailing  ",
    "0 12 345 6789 3.14159 2024年12月31日 ４２",
    "def f(x):\n    if x:\n\treturn x  # 注释\n\n\n        y = 1\r\n",
    "🙂👍🏽 👩‍👩‍👧 🇨🇳 ❤️",
    "ＡＢＣ，①②③ ﬁne ½ ㎏ Ⅳ …",
    "e\u0301 a\u0308 A\u030a ñ naïve Ångström",
    "한국어 \u1112\u1161\u11ab かな カナ ｶﾅ ภาษาไทย हिन्दी עברית العربية Ελληνικά",
    "𠮷野家 𝒳 \u00a0\u3000\u200b\u2028 ܐ ⵣ ꙮ",
    "问：什么是强化学习？\n答：一种  学习方法。<b>粗体</b> [1] {a: 'b'} \\n",
]


def sentencepiece_to_fast(
    model_file: str | Path, tokenizer_config: dict | None = None, special_ids: dict[str, int] | None = None
) -> PreTrainedTokenizerFast:
    """The fast tokenizer with SentencePiece's pieces, merges and normalisation.

    Control pieces (``<s>``) are special tokens, which SentencePiece itself does not look for in a text; user-defined
    ones (``<reserved_106>``) are found in texts by both.

    Args:
        model_file: the SentencePiece model.
        tokenizer_config: what the tokenizer_config.json beside it says; of use are the special tokens, whether BOS and
            EOS are added (default: neither), model_max_length, padding_side and chat_template.
        special_ids: role (``"pad_token"``) → id, for the special tokens that it does not name.

    Raises ``FileNotFoundError`` without the file, ``ValueError`` when it is damaged, and when it does something that a
    fast tokenizer cannot do: what is built is compared on texts of many kinds and on all pieces.
    """
    model_file, given = Path(model_file), tokenizer_config or {}
    if not model_file.is_file():
        raise FileNotFoundError(f"There is no {model_file.name} in {model_file.parent}; download it again.")
    content = model_file.read_bytes()
    try:
        proto = spm.ModelProto.FromString(content)
        original = SentencePieceProcessor(model_proto=content)
    except (DecodeError, RuntimeError) as error:
        raise ValueError(f"{model_file} is not a SentencePiece model, or is damaged; download it again.") from error
    if reason := _unsupported(proto):
        raise ValueError(f"{model_file} cannot be turned into a fast tokenizer: {reason}.")
    tokenizer = _build(proto)
    _compare(model_file, original, tokenizer, PROBES + _own_probes(proto))
    kept = ("add_bos_token", "add_eos_token", "model_max_length", "padding_side", "chat_template")
    options = {key: given[key] for key in kept if given.get(key) is not None}
    special = _special_tokens(model_file, proto, given, special_ids or {})
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **{"add_bos_token": False} | options | special
    )


def _special_tokens(
    model_file: Path, proto: spm.ModelProto, given: dict, special_ids: dict[str, int]
) -> dict[str, str]:
    """Role → token, as tokenizer_config.json names it or by its id; raises ``ValueError`` for one that is no piece."""
    pieces = [piece.piece for piece in proto.pieces]
    named = {role: given[role] for role in ("unk_token", "bos_token", "eos_token", "pad_token") if given.get(role)}
    named = {role: token["content"] if isinstance(token, dict) else token for role, token in named.items()}
    special = {role: pieces[index] for role, index in special_ids.items() if index < len(pieces)} | named
    if unknown := [f"{role} {token!r}" for role, token in special.items() if token not in pieces]:
        raise ValueError(f"{model_file} has no piece for the {', '.join(unknown)} that tokenizer_config.json names.")
    return special


def _unsupported(proto: spm.ModelProto) -> str:
    """Why this model cannot be reproduced; empty when nothing is known to be in the way."""
    kind = spm.TrainerSpec.ModelType.Name(proto.trainer_spec.model_type)
    if kind != "BPE":
        return f"it is a {kind.lower()} model, and only BPE is known here"
    if not proto.normalizer_spec.escape_whitespaces:
        return "it keeps spaces as they are (escape_whitespaces is off)"
    if proto.trainer_spec.treat_whitespace_as_suffix:
        return "it puts the mark of a space behind the word (treat_whitespace_as_suffix)"
    if _of_type(proto, Piece.UNUSED):
        return "it has unused pieces"
    return ""


def _of_type(proto: spm.ModelProto, *types: int) -> list[str]:
    return [piece.piece for piece in proto.pieces if piece.type in types]


def _build(proto: spm.ModelProto) -> Tokenizer:
    spec, defined = proto.normalizer_spec, _of_type(proto, Piece.USER_DEFINED)
    unknown = _of_type(proto, Piece.UNKNOWN)[0]
    tokenizer = Tokenizer(
        BPE(
            vocab={piece.piece: index for index, piece in enumerate(proto.pieces)},
            merges=_merges(proto),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=proto.trainer_spec.byte_fallback,
        )
    )
    tokenizer.normalizer = _normalizer(spec)
    stripped = spec.add_dummy_prefix or spec.remove_extra_whitespaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", left=1, right=0)] if stripped else steps)
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in _of_type(proto, Piece.CONTROL)])
    tokenizer.add_special_tokens([AddedToken(unknown, normalized=False)])
    if not stripped:
        # SentencePiece looks for user-defined pieces after it has normalised the whole text: normalized=True.
        tokenizer.add_tokens([AddedToken(piece, normalized=True) for piece in defined])
    elif defined:
        # An added token's own name would be normalised, too, and get the prefix; so they are cut out as words instead.
        longest_first = sorted(defined, key=len, reverse=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
        tokenizer.model.ignore_merges = True  # a word that is a piece is that piece
    return tokenizer


def _merges(proto: spm.ModelProto) -> list[tuple[str, str]]:
    """All pairs that SentencePiece would join, in its order: the score of what they become, best first."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == Piece.NORMAL}
    pairs = [
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [pair[2:] for pair in sorted(pairs, key=lambda pair: pair[:2])]


def _normalizer(spec: spm.NormalizerSpec) -> normalizers.Normalizer:
    """SentencePiece's steps in its order; only U+0020 counts as whitespace there."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        if "nfkc" in spec.name:
            # Precompiled leaves out sequences of six bytes and more; NFC composes those that NFKC would compose.
            steps.append(normalizers.NFC())
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", SPACE))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))  # leaves an empty text empty, as SentencePiece does
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))  # the prefix, too, when nothing comes after it
    return normalizers.Sequence(steps)


def _own_probes(proto: spm.ModelProto) -> list[str]:
    """Every user-defined piece alone and between letters, and all other pieces, 32 to a text."""
    defined = [piece.replace(SPACE, " ") for piece in _of_type(proto, Piece.USER_DEFINED)]
    normal = [piece.replace(SPACE, " ") for piece in _of_type(proto, Piece.NORMAL)]
    rows = ["".join(normal[start : start + 32]) for start in range(0, len(normal), 32)]
    return [*defined, *(f"{piece}a {piece} 你{piece}{piece}" for piece in defined), *rows]


def _compare(model_file: Path, original: SentencePieceProcessor, tokenizer: Tokenizer, texts: list[str]) -> None:
    """Raises ``ValueError`` at the first text to which the two give different ids."""
    for text, wanted in zip(texts, original.encode(texts), strict=True):
        found = tokenizer.encode(text, add_special_tokens=False).ids
        if found != wanted:
            raise ValueError(
                f"{model_file} cannot be turned into a fast tokenizer: SentencePiece gives {text[:60]!r} the ids "
                f"{wanted[:20]}, a fast tokenizer {found[:20]}."
            )
