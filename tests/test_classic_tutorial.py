"""The classic GPT-2/IMDB tutorial, as people have it, runs on the shipped models after its import
lines are changed.
"""

import datasets
import torch
from tqdm import tqdm
from transformers import AutoTokenizer, pipeline

from dev.simulated_hub import serve
from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer
from rlhf_course.course.presets import ROOT

MODELS = ROOT / "models"


def test_the_tutorial_runs_with_its_import_line_changed(tmp_path, monkeypatch):
    ds = datasets.load_dataset(str(MODELS / "imdb-openings"), split="train[:200]")
    config = PPOConfig(
        model_name=str(MODELS / "gpt2-imdb-mini"),
        learning_rate=1.41e-5,
        batch_size=16,
        mini_batch_size=16,
    )
    sent_kwargs = {"top_k": None, "function_to_apply": "none", "batch_size": 16}

    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.eos_token
    ds = ds.rename_columns({"text": "review"})
    ds = ds.filter(lambda x: len(x["review"]) > 200, batched=False)
    input_size = LengthSampler(2, 8)

    def tokenize(sample):
        sample["input_ids"] = tokenizer.encode(sample["review"])[: input_size()]
        sample["query"] = tokenizer.decode(sample["input_ids"])
        return sample

    ds = ds.map(tokenize, batched=False)
    ds.set_format(type="torch")

    def collator(data):
        return dict((key, [d[key] for d in data]) for key in data[0])

    model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
    ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
    ppo_trainer = PPOTrainer(
        config, model, ref_model, tokenizer, dataset=ds, data_collator=collator
    )
    sentiment_pipe = pipeline(
        "sentiment-analysis", model=str(MODELS / "distilbert-imdb-mini"), device="cpu"
    )

    gen_kwargs = {
        "min_length": -1,
        "top_k": 0.0,
        "top_p": 1.0,
        "do_sample": True,
        "pad_token_id": tokenizer.eos_token_id,
    }
    output_length_sampler = LengthSampler(4, 16)
    generation_kwargs = dict(gen_kwargs)
    for epoch, batch in enumerate(tqdm(ppo_trainer.dataloader)):
        assert set(batch) == {"label", "input_ids", "query"}  # unused columns are gone
        query_tensors, response_tensors = batch["input_ids"], []
        for query in query_tensors:
            gen_len = output_length_sampler()
            generation_kwargs["max_new_tokens"] = gen_len
            query_response = ppo_trainer.generate(query, **generation_kwargs).squeeze()
            response_len = len(query_response) - len(query)
            response_tensors.append(query_response[-response_len:])
        batch["response"] = [tokenizer.decode(r.squeeze()) for r in response_tensors]
        texts = [q + r for q, r in zip(batch["query"], batch["response"], strict=True)]
        pipe_outputs = sentiment_pipe(texts, **sent_kwargs)
        positive_scores = [
            item["score"]
            for output in pipe_outputs
            for item in output
            if item["label"] == "POSITIVE"
        ]
        rewards = [torch.tensor(score) for score in positive_scores]
        stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards, columns_to_log=["query", "response"])
        if epoch == 1:
            break
    assert ppo_trainer.current_step == 2 and stats["ppo/mean_scores"] != 0

    monkeypatch.chdir(tmp_path)
    with serve({}) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        monkeypatch.setenv("HF_TOKEN", "hf_a")
        model.save_pretrained("gpt2-imdb-pos-v2", push_to_hub=True)
        tokenizer.save_pretrained("gpt2-imdb-pos-v2")
        [(repository, files)] = hub.files.items()
    assert repository.endswith("gpt2-imdb-pos-v2@main")
    assert {"model.safetensors", "v_head.safetensors"} <= {*files}
