"""Three PPO steps per case on this process's share of 16 samples; the first process saves
statistics and weights. Then commands, given as a list of script and arguments.

accelerate launch … parallel_worker.py FOLDER COMMANDS
"""

import importlib
import json
import sys
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from builders import make_policy, make_samples, make_trainer, sgd
from peft import LoraConfig, get_peft_model

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.runtime.tracking import init_process

CASES = {  # settings for all 16 samples; sizes are divided among the processes
    "plain": {},
    "accumulation": {"mini_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "scores": dict.fromkeys(("use_score_scaling", "use_score_norm", "whiten_rewards"), True)
    | {"score_clip": 1.0},
    "stopping": {"early_stopping": True, "target_kl": 1e-5, "mini_batch_size": 8},
    "skipping": {"ratio_threshold": 1.02, "max_grad_norm": 5.0},
    "full KL": {"kl_penalty": "full"},
    "chunks": {"logprob_chunk_size": 5},
    "checkpointing": {"gradient_checkpointing": True},
    "fused Adam": {"ratio_threshold": 1.02},
    "adapters": {},
}


def sample(trainer) -> list[list[int]]:
    """Greedy answers, and sampled ones of very different lengths: eight queries per process, or per
    seed of one.
    """
    state, found = init_process(), []
    for part in range(2) if state.num_processes == 1 else [state.process_index]:
        queries = make_samples(16)[0][8 * part : 8 * part + 8]
        torch.manual_seed(part)
        greedy = {"do_sample": False, "max_new_tokens": 4}
        sampled = {"do_sample": True, "top_k": 0, "max_new_tokens": 3 + 9 * part}
        for how in (greedy, sampled):
            found += [
                (part, *tokens.tolist())
                for tokens in trainer.generate(queries, return_prompt=False, **how)
            ]
    return gather_object(found)


def run(case: str, folder: Path, name: str) -> None:
    """Three steps of one case."""
    state = init_process()
    n, rank = state.num_processes, state.process_index
    settings = {"batch_size": 16, "mini_batch_size": 16} | CASES[case]
    settings |= {name: settings[name] // n for name in ("batch_size", "mini_batch_size")}
    policy, reference = make_policy(), make_policy(1)
    if case == "adapters":
        torch.manual_seed(0)
        lora = LoraConfig(
            r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
        )
        network = get_peft_model(policy.pretrained_model, lora)
        policy, reference = AutoModelForCausalLMWithValueHead(network, summary_dropout_prob=0), None
    optimizer = sgd(policy)
    if (
        case == "fused Adam"
    ):  # a large ε: of gradients that are rounding alone Adam would make whole steps
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2, eps=1e-3, fused=True)
    trainer = make_trainer(policy, reference, optimizer, **settings)
    mine = [i for i in range(16) if i // settings["mini_batch_size"] % n == rank]
    history = []
    for step in range(3):
        queries, responses, scores = ([part[i] for i in mine] for part in make_samples(16, step))
        stats = trainer.step(queries, responses, scores)
        history.append(
            {k: v for k, v in stats.items() if isinstance(v, float) and not k.startswith("time/")}
        )
        epochs = len(stats["ppo/policy/ratio"]) / sum(map(len, responses))
        lengths = sorted(stats["tokens/responses_dist"].tolist())
        history[-1] |= {"β": trainer.kl_ctl.value, "epochs": epochs, "lengths": lengths}
    model = trainer.accelerator.unwrap_model(trainer.model)
    samples = (
        sample(trainer) if case == "plain" else None
    )  # right after a step, with no forward pass in between
    weights = model.state_dict()
    if rank == 0:
        torch.save(
            {key: weight.clone() for key, weight in weights.items()}, folder / f"{case} {name}.pt"
        )
        found = {"history": history, "samples": samples}
        (folder / f"{case} {name}.json").write_text(json.dumps(found))


def run_cases(folder: Path, name: str) -> None:
    with warnings.catch_warnings(), mock.patch("numpy.random.permutation", np.arange):
        warnings.simplefilter("ignore")  # of the faults that some cases are made of
        for case in CASES:  # mini-batches are the same samples, whoever has them
            run(case, folder, name)


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), "two")
    from rlhf_course.command_line.processes import shutdown

    with mock.patch("rlhf_course.command_line.processes.shutdown"):  # the group goes on
        for script, arguments in json.loads(sys.argv[2]):
            AcceleratorState._reset_state()
            assert importlib.import_module(script).main(arguments) == 0
    init_process().wait_for_everyone()
    shutdown()
