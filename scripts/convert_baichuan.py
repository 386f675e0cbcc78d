"""Convert a Baichuan-7B or Baichuan2-7B checkpoint to Llama, to avoid trust_remote_code.

SOURCE is the downloaded checkpoint's folder, and TARGET is a new folder. A 7B model needs 15 GB of
free disk space and about 5 GB of memory (20 GB if torch before 1.6 wrote its .bin files). An
interrupted run leaves no files; repeat the command. LoRA's target module W_pack becomes
q_proj, k_proj and v_proj.
"""

import argparse
import sys
from pathlib import Path

from rlhf_course.command_line import exits

NORM_HEAD = {"auto": None, "yes": True, "no": False}


def main(arguments: list[str] | None = None) -> int:
    """Convert SOURCE, and print code to load TARGET.

    Raises ``ValueError`` or ``OSError`` on failure.
    """
    parser = argparse.ArgumentParser(
        "convert_baichuan.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="has config.json, tokenizer.model, and weights"
    )
    parser.add_argument(
        "target", type=Path, metavar="TARGET", help="folder that does not exist yet, or is empty"
    )
    parser.add_argument(
        "--norm-head",
        default="auto",
        choices=NORM_HEAD,
        help="whether the head is Baichuan2's NormHead (default: auto, from config.json)",
    )
    chosen = parser.parse_args(arguments)
    from rlhf_course.baichuan.convert import convert_to_llama  # so that --help is fast

    folder = convert_to_llama(chosen.source, chosen.target, NORM_HEAD[chosen.norm_head])
    print(f"The Llama checkpoint is in {folder}. To load it:")
    print("  from transformers import AutoModelForCausalLM, AutoTokenizer")
    print(f'  model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype="auto")')
    print(f"  tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})")
    return 0


if __name__ == "__main__":
    sys.exit(exits.run("convert_baichuan.py", main))
