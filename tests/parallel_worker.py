"""Three PPO steps per case on this process's share of 16 samples; the first process saves statistics and weights.

accelerate launch … parallel_worker.py FOLDER
"""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from conftest import make_policy, make_samples, make_trainer, sgd
from peft import LoraConfig, get_peft_model

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.processes import join

CASES = {  # settings for all 16 samples; sizes are divided among the processes
    "plain": {},
    "accumulation": {"mini_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "scores": {"use_score_scaling": True, "use_score_norm": True, "score_clip": 1.0, "whiten_rewards": True},
    "stopping": {"early_stopping": True, "target_kl": 1e-5, "mini_batch_size": 8},
    "skipping": {"ratio_threshold": 1.02, "max_grad_norm": 5.0},
    "full KL": {"kl_penalty": "full"},
    "chunks": {"logprob_chunk_size": 5},
    "adapters": {},
}


def run(case: str, folder: Path) -> None:
    """Three steps of one case."""
    state = join()
    n, rank = state.num_processes, state.process_index
    settings = {"batch_size": 16, "mini_batch_size": 16} | CASES[case]
    settings |= {name: settings[name] // n for name in ("batch_size", "mini_batch_size")}
    policy, reference = make_policy(), make_policy(1)
    if case == "adapters":
        torch.manual_seed(0)
        lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        network = get_peft_model(policy.pretrained_model, lora)
        policy, reference = AutoModelForCausalLMWithValueHead(network, summary_dropout_prob=0), None
    trainer = make_trainer(policy, reference, sgd(policy), **settings)
    mine = [i for i in range(16) if i // settings["mini_batch_size"] % n == rank]
    history = []
    for step in range(3):
        queries, responses, scores = ([part[i] for i in mine] for part in make_samples(16, step))
        stats = trainer.step(queries, responses, scores)
        history.append({k: v for k, v in stats.items() if isinstance(v, float) and not k.startswith("time/")})
        epochs = len(stats["ppo/policy/ratio"]) / sum(map(len, responses))
        lengths = sorted(stats["tokens/responses_dist"].tolist())
        history[-1] |= {"β": trainer.kl_ctl.value, "epochs": epochs, "lengths": lengths}
    if rank == 0:
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        torch.save({name: weight.clone() for name, weight in weights.items()}, folder / f"{case} {n}.pt")
        (folder / f"{case} {n}.json").write_text(json.dumps(history))


if __name__ == "__main__":
    np.random.permutation = np.arange  # so that mini-batches are the same samples, whoever has them
    warnings.simplefilter("ignore")  # of the faults that some cases are made of
    for case in CASES:
        run(case, Path(sys.argv[1]))
    join().wait_for_everyone()
    join().destroy_process_group()
