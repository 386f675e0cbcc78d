"""Prepare datasets: reviews and queries for PPO, pairs for a reward model, answers for SFT."""
# ruff: noqa: F401

from rlhf_course.data.answers import hold_out, load_answers, tokenize_answers
from rlhf_course.data.encoding import answer_ids, decode_answers, encode, prompt_ids
from rlhf_course.data.preferences import load_pairs, tokenize_pairs
from rlhf_course.data.reviews import build_queries, held_out_reviews, load_reviews
from rlhf_course.data.rows import collate, describe, endless
from rlhf_course.data.transcripts import ASSISTANT, HUMAN, as_messages, as_prompt, last_question
