"""Say what to do instead of names of TRL 0.4 to 0.11 that this package does not have.

The table is the only place of these sentences; docs/ppo-api.md shows it.
"""

from collections.abc import Mapping

ARGUMENT = "an argument of `from_pretrained`"
IMPORT = "an import"
OVERRIDE = "a method of `PPOTrainer` that you override or call"
ATTRIBUTE = "an attribute of `PPOTrainer`"
TRAINER = "an argument of `PPOTrainer`"
CONFIG = "an attribute of `PPOConfig`"
POLICY = "an attribute of the policy"
ELSEWHERE = "in other libraries"

_ADAPTER = "rlhf_course.policy.adapters"
_REWARD_ADAPTER = f"Make the policy first, then `RewardAdapter(policy, folder)` from {_ADAPTER}"
_LATER_TRAINER = "Import it from trl, which still has it."
_COMPUTED_IN_STEP = "`step` computes this itself, without padding."

OLD_NAMES: dict[str, dict[str, str]] = {
    ARGUMENT: {
        "load_in_8bit": f'Pass `quantization_config=quantization("8bit")` from {_ADAPTER}.',
        "load_in_4bit": f'Pass `quantization_config=quantization("4bit")` from {_ADAPTER}.',
        "use_auth_token": "Pass `token=`.",
        "resume_download": "Leave it out: a download always resumes.",
        "use_flash_attention_2": 'Pass `attn_implementation="flash_attention_2"`.',
        "reward_adapter": f"{_REWARD_ADAPTER}; it has `compute_reward_score`.",
        "reward_adapter_name": f"{_REWARD_ADAPTER}; it chooses the name.",
        "use_gradient_checkpointing": "Pass `PPOConfig(gradient_checkpointing=True)`.",
        "layer_norm_names": "Leave it out: the base keeps its dtypes, and adapters are float32.",
    },
    IMPORT: {
        "TextEnvironment": (
            "Run the tools in your own loop: call `generate`, append the tool's tokens, and pass"
            " `step` a `response_masks` with 0 on these tokens."
        ),
        "TextHistory": "Keep the texts in your own lists; `TextEnvironment` is not here either.",
        "BestOfNSampler": (
            "Call `generate` with each query repeated n times, score the responses, and keep the"
            " best."
        ),
        "AutoModelForSeq2SeqLMWithValueHead": (
            "Use a decoder-only model with `AutoModelForCausalLMWithValueHead`."
        ),
        "PreTrainedModelWrapper": "Use `AutoModelForCausalLMWithValueHead`.",
        "GPT2HeadWithValueModel": "Use `AutoModelForCausalLMWithValueHead`.",
        "PPOv2Trainer": "Use `PPOTrainer` with your own loop.",
        "PPOv2Config": "Use `PPOConfig`; ppo-api.md lists the names that differ.",
        "respond_to_batch": "Use `PPOTrainer.generate(queries, return_prompt=False, top_k=0)`.",
        "setup_chat_format": "Use a model whose tokenizer has a chat template.",
        "core": (
            "Import `LengthSampler` and `set_seed` from rlhf_course, and formulas from"
            " `rlhf_course.ppo.algorithm`."
        ),
        "import_utils": "Use `is_npu_available` and `is_xpu_available` from accelerate.utils.",
        "is_xpu_available": "Import it from accelerate.utils.",
        "is_npu_available": "Import it from accelerate.utils.",
        "RewardTrainer": _LATER_TRAINER,
        "SFTTrainer": _LATER_TRAINER,
        "DPOTrainer": _LATER_TRAINER,
        "DataCollatorForCompletionOnlyLM": (
            "Use trl's `SFTConfig(completion_only_loss=True)`, with columns prompt and completion."
        ),
    },
    OVERRIDE: {
        "loss": (
            "Pass `PPOConfig(policy_loss=function)`; `vf_coef` and `cliprange_value` set the value"
            " loss."
        ),
        "compute_advantages": (
            "Set `gamma`, `lam` and `whiten_rewards`, or override `compute_rewards`."
        ),
        "batched_forward_pass": (
            "For log-probabilities of your own texts, use `rlhf_course.ppo.rollout.forward`."
        ),
        "prepare_model_inputs": _COMPUTED_IN_STEP,
        "train_minibatch": "Pass your optimizer to `PPOTrainer`, or `PPOConfig(policy_loss=...)`.",
        "record_step_stats": "Add to the dictionary that `step` returns.",
        "gather_stats": "The statistics of `step` cover all processes.",
        "_early_stop": "Set `early_stopping` and `target_kl`.",
        "_step_safety_checker": "Change queries, responses and scores before you call `step`.",
        "_generate_batched": "Override `generate`, or pass it `batch_size`.",
        "prepare_dataloader": "Pass `dataset` and `data_collator`, or make your own DataLoader.",
        "_remove_unused_columns": "Set `remove_unused_columns=False`.",
    },
    ATTRIBUTE: {
        "current_device": "Use `accelerator.device`.",
        "is_distributed": "Use `accelerator.num_processes > 1`.",
        "is_encoder_decoder": "It is always False: policies are decoder-only.",
        "is_peft_model": "Use `policy.is_peft_model`.",
        "optional_peft_ctx": "Use `with trainer.reference() as model`.",
        "push_to_hub": "Call `policy.save_pretrained(name, push_to_hub=True)`.",
        "_save_pretrained": "Call `save_pretrained`.",
        "create_model_card": "Write README.md into the folder that `save_pretrained` made.",
    },
    TRAINER: {
        "training_data_collator": "Leave it out: `step` makes its own batches.",
        "processing_class": "Pass `tokenizer=`.",
    },
    CONFIG: {
        "backward_batch_size": "Use `mini_batch_size * gradient_accumulation_steps`.",
        "global_batch_size": "Use `batch_size * trainer.accelerator.num_processes`.",
        "global_backward_batch_size": (
            "Use `mini_batch_size * gradient_accumulation_steps` times"
            " `trainer.accelerator.num_processes`."
        ),
        "world_size": "Use `trainer.accelerator.num_processes`.",
        "is_encoder_decoder": "It is always False: policies are decoder-only.",
        "is_peft_model": "Use `policy.is_peft_model`.",
    },
    POLICY: {
        "compute_reward_score": f"{_REWARD_ADAPTER}, and call its `compute_reward_score`.",
        "prepare_inputs_for_generation": (
            "peft's `get_peft_model` cannot wrap a policy. Pass `peft_config=` to"
            " `AutoModelForCausalLMWithValueHead.from_pretrained`."
        ),
        "push_to_hub": "Call `save_pretrained(name, push_to_hub=True)`.",
        "gradient_checkpointing_disable": (
            "Call `policy.pretrained_model.gradient_checkpointing_disable()`."
        ),
        "resize_token_embeddings": (
            "Resize the model first, and then make a policy of it with"
            " `AutoModelForCausalLMWithValueHead.from_pretrained(model)`."
        ),
    },
    ELSEWHERE: {
        "return_all_scores": (
            "transformers 5 ignores it, and `output[1]` raises `KeyError: 1`. Use"
            " `rlhf_course.rewards.SentimentReward`, or `top_k=None` and choose the label by name."
        ),
    },
}


def advice(kind: str, name: str) -> str | None:
    """Return what to do instead of an old name, as one sentence or two; None for other names."""
    sentence = OLD_NAMES[kind].get(name)
    return None if sentence is None else f"{name} of TRL up to 0.11 is not supported. {sentence}"


def without_old_arguments(arguments: Mapping) -> dict:
    """Return the arguments without old ones that are switched off; refuse those that are on.

    Raises ``ValueError`` for an old argument that asks for something.
    """
    for name, value in arguments.items():
        sentence = advice(ARGUMENT, name)
        if sentence is not None and value:
            raise ValueError(sentence)
    return {key: value for key, value in arguments.items() if key not in OLD_NAMES[ARGUMENT]}


def refuse_arguments(arguments: Mapping) -> None:
    """Raise ``TypeError`` for arguments of the trainer that it does not have."""
    for name in arguments:
        sentence = advice(TRAINER, name)
        raise TypeError(sentence or f"PPOTrainer has no argument {name!r}.")


def refuse_overrides(trainer: type) -> None:
    """Raise ``TypeError`` if a subclass of the trainer defines a method that is never called."""
    for name in OLD_NAMES[OVERRIDE]:
        if hasattr(trainer, name):
            raise TypeError(
                f"{trainer.__name__}.{name} would never be called. {OLD_NAMES[OVERRIDE][name]}"
            )
