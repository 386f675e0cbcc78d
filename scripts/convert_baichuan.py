"""Write a Baichuan-7B or Baichuan2-7B checkpoint as a native Llama one, which needs no
trust_remote_code.

SOURCE is a folder with the downloaded checkpoint, TARGET a new folder. A 7B takes 15 GB more on the
disk, and about 5 GB of memory; 20 GB where .bin files are of torch before 1.6. An interrupted run
leaves nothing; the same command starts again. LoRA's target W_pack becomes q_proj, k_proj and
v_proj.
"""

import argparse
import sys
from pathlib import Path

from command_line import exits

NORM_HEAD = {"auto": None, "yes": True, "no": False}


def main(arguments: list[str] | None = None) -> int:
    """Convert, and print how to load the result; ``ValueError`` or ``OSError`` if it fails."""
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    add = (parser := argparse.ArgumentParser("convert_baichuan.py", **how)).add_argument
    add("source", type=Path, metavar="SOURCE", help="config.json, tokenizer.model and the weights")
    add("target", type=Path, metavar="TARGET", help="a folder that does not exist yet, or is empty")
    text = "whether the head is Baichuan2's NormHead (default: auto, by config.json)"
    add("--norm-head", default="auto", choices=NORM_HEAD, help=text)
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
