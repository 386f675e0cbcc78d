"""One encoding of a prompt and an answer: SFT, reward training, PPO and the check-up read the same
ids, and the score is read at the same token.
"""

from types import SimpleNamespace

import pytest
import torch
from builders import invalid
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from dev.simulated_hub.chat import chat_repositories
from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.audit.checkup import collect_texts, plan_audit, score_once
from rlhf_course.data import (
    answer_ids,
    as_messages,
    decode_answers,
    encode,
    prompt_ids,
    tokenize_answers,
    tokenize_pairs,
)
from rlhf_course.data.encoding import read_form, write_form
from rlhf_course.policy.adapters import RewardAdapter
from rlhf_course.policy.network import say_once
from rlhf_course.rewards import RewardModel, count_shared, find_form, load_reward_model
from tests.test_reward_model import make_classifier, make_tokenizer

pytestmark = pytest.mark.quick

QUESTION = "\n\nHuman: How can I sleep well?\n\nAssistant:"
LONGER = "\n\nHuman: Is it late?\n\nAssistant: No.\n\nHuman: How do I cook rice?\n\nAssistant:"
PROMPTS = [QUESTION, QUESTION, QUESTION, LONGER, LONGER, QUESTION]
ANSWERS = ["Read a book.", "", "No.", "Wash it, then boil it.", "Yes. " * 20, "Read a film."]
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def chat_base(tmp_path_factory):
    """A folder with a small chat model: its padding token is its end-of-turn token, after which
    its ChatML template writes a line break.
    """
    folder = tmp_path_factory.mktemp("smollm2")
    for name, content in chat_repositories(tmp_path_factory.mktemp("bpe"))[SMOLLM2].items():
        file = folder / name
        file.write_bytes(content) if isinstance(content, bytes) else file.write_text(content)
    return folder


@pytest.fixture(scope="module")
def chat_reward(chat_base):
    """The chat model with a random score head."""
    torch.manual_seed(1)
    model = load_reward_model(chat_base, new_head=True)
    torch.nn.init.normal_(model.score.weight)
    return model


@pytest.fixture(scope="module", params=["base", "chat"])
def kind(request, chat_base, chat_reward):
    """A tokenizer and a reward model: of a base without a chat template, and of a chat model."""
    if request.param == "base":
        tokenizer = make_tokenizer()
        return SimpleNamespace(tokenizer=tokenizer, model=make_classifier(tokenizer))
    return SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(chat_base), model=chat_reward)


def read_alone(model, tokenizer, ids: list[int]) -> float:
    """The score as trl's RewardTrainer sees it: one row, without padding."""
    row = torch.tensor([ids])
    with torch.no_grad():
        return model.eval()(input_ids=row, attention_mask=torch.ones_like(row)).logits.item()


def test_all_stages_read_the_same_ids(kind):
    tokenizer = kind.tokenizer
    rows = Dataset.from_dict({"prompt": PROMPTS, "answer": ANSWERS})
    pairs = Dataset.from_dict({"prompt": PROMPTS, "chosen": ANSWERS, "rejected": ["x"] * 6})
    sft, _ = tokenize_answers(rows, tokenizer, max_length=500)
    trained, _ = tokenize_pairs(pairs, tokenizer, max_length=500)
    scored = RewardModel(kind.model, tokenizer).encode(PROMPTS, ANSWERS)
    queries = prompt_ids(tokenizer, PROMPTS)
    sampled = answer_ids(tokenizer, ANSWERS)
    expected = [query + response for query, response in zip(queries, sampled, strict=True)]
    assert sft["input_ids"][:] == trained["chosen_ids"][:] == scored == expected
    assert encode(tokenizer, PROMPTS, ANSWERS) == expected
    assert all(ids[-1] == tokenizer.eos_token_id for ids in expected)


def test_a_sampled_answer_is_read_as_it_was_trained(kind):
    answers = ["No.", "", "    return a\n    b", "\tb"]
    assert decode_answers(kind.tokenizer, answer_ids(kind.tokenizer, answers)) == answers


def test_all_stages_read_the_same_score(kind):
    tokenizer = kind.tokenizer
    pairs = Dataset.from_dict({"prompt": PROMPTS, "chosen": ANSWERS, "rejected": ["x"] * 6})
    trained, _ = tokenize_pairs(pairs, tokenizer, max_length=500)
    expected = torch.tensor(
        [read_alone(kind.model, tokenizer, ids) for ids in trained["chosen_ids"]]
    )
    assert expected.std() > 0.1
    for options in ({}, {"batch_size": 2}, {"share_prompts": True}):
        scores = RewardModel(kind.model, tokenizer, **options)(PROMPTS, ANSWERS)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    shared = RewardModel(kind.model, tokenizer, share_prompts=True)
    known = score_once(shared, *collect_texts(pairs, plan_audit(pairs)))
    torch.testing.assert_close(known(PROMPTS, ANSWERS).float(), expected, atol=1e-5, rtol=0)


def test_the_score_of_a_chat_model_is_read_at_the_answers_last_token(chat_base, chat_reward):
    """EOS is also the padding token, so transformers reads the token before it."""
    tokenizer = AutoTokenizer.from_pretrained(chat_base)
    ids = encode(tokenizer, [QUESTION], ["Read a book."])[0]
    assert tokenizer.decode(ids[-1:]) == "<|im_end|>" and tokenizer.decode(ids[-2:-1]) == "."
    score = RewardModel(chat_reward, tokenizer)([QUESTION], ["Read a book."]).item()
    hidden = chat_reward.model(torch.tensor([ids])).last_hidden_state[0, -2]
    assert score == pytest.approx(chat_reward.score(hidden).item(), abs=1e-5)
    whole = encode(tokenizer, [QUESTION], ["Read a book."], form="template")[0]
    assert tokenizer.decode(whole[-2:]) == "<|im_end|>\n" and whole[:-1] == ids


def test_the_form_of_a_model_in_memory_is_said_for_plain_prompts(chat_base, chat_reward, capsys):
    tokenizer = AutoTokenizer.from_pretrained(chat_base)
    say_once.cache_clear()
    RewardModel(chat_reward, tokenizer)([QUESTION], ["No."])
    RewardModel(chat_reward, tokenizer, form="template")(["Is it late?"], ["No."])
    assert "form=" not in capsys.readouterr().out
    for _ in range(2):
        RewardModel(chat_reward, tokenizer)(["Is it late?"], ["No."])
    assert capsys.readouterr().out.count('RewardModel(..., form="template")') == 1


def test_an_adapter_scores_the_same_on_the_policys_base(chat_base, tmp_path):
    """As train_ppo.py and notebook 05 use it."""
    tokenizer = AutoTokenizer.from_pretrained(chat_base)
    torch.manual_seed(2)
    base = load_reward_model(chat_base, new_head=True)
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", modules_to_save=["score"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path / "reward")
    write_form(tmp_path / "reward", "chat")
    tokenizer.save_pretrained(tmp_path / "reward")
    expected = RewardModel(model, tokenizer)(PROMPTS, ANSWERS)
    torch.testing.assert_close(RewardModel(tmp_path / "reward")(PROMPTS, ANSWERS), expected)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(
        chat_base, peft_config=LoraConfig(task_type="CAUSAL_LM")
    )
    adapter = RewardAdapter(policy, tmp_path / "reward")
    scores = RewardModel(adapter, tokenizer)(PROMPTS, ANSWERS)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_a_record_beside_the_model_decides(chat_base, chat_reward, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(chat_base)
    chat_reward.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert read_form(tmp_path) is None
    assert RewardModel(tmp_path).form == "template"  # trained elsewhere
    write_form(tmp_path, "chat")
    assert RewardModel(tmp_path).form == "chat"
    (tmp_path / "encoding.json").write_text('{"form": "letters"}')
    with invalid("has the form 'letters'; choose one of transcript, chat, template, pair"):
        RewardModel(tmp_path)


def test_a_chat_reward_model_from_elsewhere_reads_whole_dialogues(chat_base, chat_reward):
    tokenizer = AutoTokenizer.from_pretrained(chat_base)
    ids = RewardModel(chat_reward, tokenizer, form="template").encode([QUESTION], ["No."])
    talk = as_messages(f"{QUESTION} No.")
    assert ids == [tokenizer.apply_chat_template(talk, return_dict=False)]
    plain = encode(tokenizer, ["Which film?"], ["Heat."], form="template")[0]
    assert "user\nWhich film?" in tokenizer.decode(plain)


def make_encoder(kind: str):
    """A small encoder, and the tokenizer of the chat model's letters with separators."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<cls>", "<sep>", *"abcdefghijklmnopqrstuvwxyzAHIRNWY.?:,"]
    vocabulary = {name: index for index, name in enumerate(names)}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[("<cls>", 1), ("<sep>", 2)],
    )
    inputs = ["input_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters,
        pad_token="<pad>",
        cls_token="<cls>",
        sep_token="<sep>",
        model_input_names=[*inputs, "token_type_ids"] if kind == "bert" else inputs,
    )
    sizes = {"vocab_size": len(names), "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 64, "num_labels": 1}
    torch.manual_seed(0)
    if kind == "bert":
        config = BertConfig(**sizes, max_position_embeddings=300)
        return tokenizer, BertForSequenceClassification(config).eval()
    config = RobertaConfig(**sizes, max_position_embeddings=301, pad_token_id=0)
    return tokenizer, RobertaForSequenceClassification(config).eval()


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_reads_a_pair_of_texts(kind):
    tokenizer, model = make_encoder(kind)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.normal_(layer.weight, std=0.3)
    scorer = RewardModel(model, tokenizer)
    assert scorer.form == find_form(model, tokenizer) == "pair"
    expected = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        inputs = tokenizer([prompt], [answer], return_tensors="pt")
        assert ("token_type_ids" in inputs) == (kind == "bert")
        expected.append(model(**inputs).logits.item())
    torch.testing.assert_close(scorer(PROMPTS, ANSWERS), torch.tensor(expected), atol=1e-5, rtol=0)
    pairs = Dataset.from_dict({"prompt": PROMPTS, "chosen": ANSWERS, "rejected": ["x"] * 6})
    trained, _ = tokenize_pairs(pairs, tokenizer, max_length=300, form="pair")
    assert trained["chosen_ids"][:] == scorer.encode(PROMPTS, ANSWERS)
    assert scorer.max_length == 300


def test_a_shared_prompt_leaves_two_tokens_to_each_row():
    assert count_shared([[5, 6, 7, 8], [5, 6, 7, 9, 9]]) == 2
    assert count_shared([[5, 6, 7, 8, 9], [5, 9, 7, 8, 9]]) == 1
    assert count_shared([[5, 6, 7]]) == 1


def test_rows_that_contain_eos_are_dropped_and_counted(kind, capsys):
    tokenizer = kind.tokenizer
    rows = {"prompt": PROMPTS[:3], "answer": ["No.", f"Yes.{tokenizer.eos_token} No.", "Yes."]}
    kept, too_long = tokenize_answers(Dataset.from_dict(rows), tokenizer, max_length=500)
    assert len(kept) == 2 and too_long == 0
    assert "Dropped 1 rows that contain" in capsys.readouterr().out
