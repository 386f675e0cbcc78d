"""The hub: a model's files without code and weights only once, and what goes wrong there in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import CONFIG_MAPPING

from rlhf_course.runtime.files import is_damaged

SMALL = ("*.json", "*.txt", "*.model", "*.jinja")  # configs and tokenizers
WEIGHTS = ("*model*.safetensors", "v_head.safetensors"), ("pytorch_model*.bin", "adapter_model.bin")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_FILES = (".json", ".jsonl", ".csv", ".parquet", ".gz", ".safetensors", ".bin", ".model")

CONVERT = "Convert it first to one that transformers knows (Baichuan: scripts/convert_baichuan.py)."
NEEDS_CODE = f"which needs code of its own, and that is not run here. {CONVERT}"


def is_id(source: str | Path) -> bool:
    """Whether this names something on the hub: owner/name, or a name alone, and neither it nor a folder owner is here.

    Where a folder owner is, it is a path with a typo: the hub would be asked in vain, for up to a minute.
    """
    path = Path(source)
    try:
        validate_repo_id(str(source))
    except HFValidationError:
        return False
    return not path.exists() and (len(path.parts) == 1 or not path.parent.is_dir())


def check_source(source: str | Path, kind: str = "model") -> None:
    """Look before anything is asked of the hub: at a folder's files, or whether this is an id at all.

    Raises ``FileNotFoundError`` for a folder that is missing, and ``ValueError`` where git-lfs left pointers in it.
    """
    path = Path(source)
    if not path.is_dir() and not (is_id(source) and (kind == "model" or len(path.parts) == 2)):
        if path.exists():
            raise FileNotFoundError(
                f"{source} is a file, where a {kind}'s folder is needed: name the one that holds it."
            )
        here = f" (There is a folder {path.parent} here, so this is no id.)"
        raise FileNotFoundError(
            f"No {kind} folder at {source}. Give an existing folder, or a hub id like owner/name."
            + here * (len(path.parts) == 2 and path.parent.is_dir())
        )
    for file in path.rglob("*"):
        if file.name.endswith(LFS_FILES) and file.is_file():
            with file.open("rb") as content:
                if content.read(len(LFS_POINTER)) == LFS_POINTER:
                    raise ValueError(f"{file} is not the file itself but git-lfs's pointer to it: run git lfs pull.")


def download(source: str | Path, revision: str | None = None, to_convert: bool = False) -> Path:
    """The folder with a model's files: ``source`` itself, or where a hub id's are, downloaded if not yet there.

    Safetensors are preferred to .bin, and files in subfolders are left where they are. Raises ``OSError`` with a
    sentence for what cannot be had, and ``ValueError``, before it downloads weights, for a model that transformers
    does not know, unless it is ``to_convert``.
    """
    check_source(source)
    here, (safetensors, bins) = Path(source).exists(), WEIGHTS
    options = {"revision": revision, "ignore_patterns": "*/*"}
    with hub_errors(source):
        folder = Path(source) if here else Path(snapshot_download(source, allow_patterns=[*SMALL], **options))
        if not to_convert and (folder / "config.json").exists():
            check_known(source, json.loads((folder / "config.json").read_text(encoding="utf-8")))
        elif not to_convert and not (folder / "adapter_config.json").exists():
            near = sorted(path.parent for place in (folder, folder.parent) for path in place.glob("*/config.json"))
            hint = f" There is one in {near[0]}." if here and near else ""
            raise FileNotFoundError(f"{source} holds no model: it has no config.json.{hint}")
        if here:
            return folder
        snapshot_download(source, allow_patterns=[*safetensors], **options)
        if not any(folder.glob(safetensors[0])):
            snapshot_download(source, allow_patterns=[*bins], **options)
    return folder


def check_known(source: str | Path, config: dict) -> None:
    """Raise ``ValueError`` for a model's config that transformers has no class for."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING and (kind or "auto_map" in config):
        raise ValueError(f"{source} is a {kind or 'nameless'} model, {NEEDS_CODE}")


@contextmanager
def hub_errors(source: str | Path, kind: str = "model") -> Iterator[None]:
    """What the hub and its libraries raise about ``source`` becomes one sentence; the rest passes.

    An ``OSError``, and for a damaged file, which is named, or a model with code of its own, a ``ValueError``.
    """
    try:
        yield
    except Exception as error:
        if explained := _explain(error, str(source), kind):
            raise explained from None
        raise


def _explain(error: BaseException, source: str, kind: str) -> Exception | None:
    """The error in a sentence: what was wrong, where, and what to do. By names, as the HTTP library varies."""
    files = (path for path in Path(source).glob("*") if kind == "model" and is_damaged(path))
    if damaged := next(files, None):
        return ValueError(f"{damaged} cannot be read: it is damaged or cut short. Copy, download or save it again.")
    if isinstance(error, NotADirectoryError | FileExistsError) and error.filename:
        return OSError(f"{error.filename} cannot be made: a file is in the way. Set HF_HOME to a folder for downloads.")
    names, texts, hub = set(), "", constants.ENDPOINT
    while error is not None:
        names |= {ancestor.__name__ for ancestor in type(error).__mro__}
        texts += f"{error}\n"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if "trust_remote_code" in texts and kind == "model":
        return ValueError(f"{source} is a model {NEEDS_CODE}")
    if "GatedRepoError" in names or "is a gated dataset" in texts:
        page = f"{hub}/{'datasets/' if kind == 'dataset' else ''}{source}"
        return PermissionError(f"{source} is gated. Accept its terms at {page}, and run hf auth login or set HF_TOKEN.")
    if names & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return FileNotFoundError(
            f"There is no {kind} {source} at {hub}, or it is private. Check the name, or give a local folder; for a "
            "private one run hf auth login or set HF_TOKEN."
        )
    if names & {"RemoteProtocolError", "ReadError", "ReadTimeout"} or "Consistency check failed" in texts:
        return ConnectionError(
            f"The download of {source} from {hub} broke off. Start again: whole files are kept, half ones are not."
        )
    if "UnsupportedProtocol" in names:
        return ValueError(f"HF_ENDPOINT is {hub}; it must begin with https:// or http://.")
    if names & {"TransportError", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError"}:
        if constants.HF_HUB_OFFLINE:
            return ConnectionError(
                f"HF_HUB_OFFLINE is set, and {source} is not in the cache. Unset it once to download it."
            )
        return ConnectionError(
            f"{hub} cannot be reached, and {source} is not in the cache. Check the connection, set HF_ENDPOINT to a "
            "mirror, or give a local folder."
        )
    if "RemoteEntryNotFoundError" in names or "Unable to find 'hf://" in texts:
        file = re.search(r"(?:/resolve/[^/]+/|'hf://datasets/[^'@]+@\w+/)([^\s\"']+\w)", texts)
        return FileNotFoundError(f"There is no file {file[1] if file else 'of that name'} in {kind} {source} at {hub}.")
    return None
