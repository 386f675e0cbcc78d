"""Build the data and models that preset tiny needs, and print their paths."""

from rlhf_course.course.presets import load_preset
from rlhf_course.course.run_card import quiet_libraries
from rlhf_course.synthetic.build import (
    build_base,
    build_sft_adapter,
    prepare_chat,
    prepare_reward_model,
)


def main() -> None:
    quiet_libraries()
    pairs = prepare_reward_model(load_preset("01_reward_modeling", "tiny"))
    settings = load_preset("05_lora_rlhf_baichuan", "tiny")
    built = {"dialogues": pairs.dataset, "reward base": pairs.model, **vars(prepare_chat(settings))}
    built |= {"converted": build_base(settings), "SFT adapter": build_sft_adapter(settings)}
    for what, where in built.items():
        print(f"{what:13} {where}")


if __name__ == "__main__":
    main()
