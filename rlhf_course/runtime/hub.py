"""The hub: a model's files without code and weights only once, and what goes wrong there in one
sentence.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from transformers import CONFIG_MAPPING

from rlhf_course.runtime.files import is_damaged, read_json

IDS = {"model": r"(?a)(\w[\w.-]*/)?\w[\w.-]*", "dataset": r"(?a)\w[\w.-]*/\w[\w.-]*"}
SMALL = ["*.json", "*.txt", "*.model", "*.jinja"]  # configs and tokenizers
WEIGHTS = ["*model*.safetensors", "v_head.safetensors"], ["pytorch_model*.bin", "adapter_model.bin"]
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_FILES = (".json", ".jsonl", ".csv", ".parquet", ".gz", ".safetensors", ".bin", ".model")
LOGIN = "run hf auth login or set HF_TOKEN."
NEEDS_CODE = (
    "which needs code of its own, and that is not run here. Convert it first to one that"
    " transformers knows "
)
NEEDS_CODE += "(Baichuan: scripts/convert_baichuan.py)."


def check_source(source: str | Path, kind: str = "model") -> None:
    """Check, before the hub is asked, that this is a folder with its files, or can be an id on the
    hub.

    Raises ``FileNotFoundError`` for a folder that is missing, and ``ValueError`` where git-lfs left
    pointers in it.
    """
    path = Path(source)
    if path.is_file():
        raise FileNotFoundError(
            f"{source} is a file, where a {kind}'s folder is needed: name the one that holds it."
        )
    # Where there is a folder owner, owner/name is a path with a typo, and the hub would answer
    # after up to a minute.
    has_owner = len(path.parts) == 2 and path.parent.is_dir()
    if not path.exists() and (has_owner or not re.fullmatch(IDS[kind], str(source))):
        hint = f" (There is a folder {path.parent} here, so this is no id.)" if has_owner else ""
        cure = "Give an existing folder, or a hub id like owner/name."
        raise FileNotFoundError(f"No {kind} folder at {source}. {cure}{hint}")
    for file in filter(Path.is_file, path.rglob("*")):
        is_small = file.name.endswith(LFS_FILES) and file.stat().st_size < 1000  # as pointers are
        if is_small and file.read_bytes().startswith(LFS_POINTER):
            raise ValueError(
                f"{file} is not the file itself but git-lfs's pointer to it: run git lfs pull."
            )


def download(source: str | Path, revision: str | None = None, to_convert: bool = False) -> Path:
    """The folder with a model's files: ``source`` itself, or of a hub id, downloaded if not yet
    there.

    Safetensors are preferred to .bin; subfolders are left out. Raises ``OSError`` for what cannot
    be had, and, before it downloads weights, ``ValueError`` for a model that transformers does not
    know, unless it is ``to_convert``.
    """
    check_source(source)
    is_local, (safetensors, bins) = Path(source).exists(), WEIGHTS
    options = {"revision": revision, "ignore_patterns": "*/*"}
    with hub_errors(source):
        folder = Path(
            source if is_local else snapshot_download(source, allow_patterns=SMALL, **options)
        )
        if not to_convert and (folder / "config.json").exists():
            check_known(source, read_json(folder / "config.json"))
        elif not to_convert and not (folder / "adapter_config.json").exists():
            near = sorted(
                path.parent
                for place in (folder, folder.parent)
                for path in place.glob("*/config.json")
            )
            hint = f" There is one in {near[0]}." if is_local and near else ""
            raise FileNotFoundError(f"{source} holds no model: it has no config.json.{hint}")
        if not is_local:
            snapshot_download(source, allow_patterns=safetensors, **options)
            if not any(folder.glob(safetensors[0])):
                snapshot_download(source, allow_patterns=bins, **options)
    return folder


def check_known(source: str | Path, config: dict) -> None:
    """Raise ``ValueError`` for a model's config that transformers has no class for."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING and (kind or "auto_map" in config):
        raise ValueError(f"{source} is a {kind or 'nameless'} model, {NEEDS_CODE}")


@contextmanager
def hub_errors(source: str | Path, kind: str = "model") -> Iterator[None]:
    """Turn what the hub's libraries raise about ``source`` into one sentence, as an ``OSError`` or
    ``ValueError``.
    """
    try:
        yield
    except Exception as error:
        if explained := _explain(error, str(source), kind):
            raise explained from None
        raise


def _explain(error: BaseException, source: str, kind: str) -> Exception | None:
    """The error in a sentence: what was wrong, where, and what to do. By names, as the HTTP library
    varies.
    """
    if kind == "model" and (damaged := next(filter(is_damaged, Path(source).glob("*")), None)):
        return ValueError(
            f"{damaged} cannot be read: it is damaged or cut short. Copy, download or save it"
            " again."
        )
    if isinstance(error, NotADirectoryError | FileExistsError) and error.filename:
        return OSError(
            f"{error.filename} cannot be made: a file is in the way. Set HF_HOME to a folder for"
            " downloads."
        )
    found, hub = "", constants.ENDPOINT  # found: names and messages of the error and its causes
    while error is not None:
        found += " ".join(base.__name__ for base in type(error).__mro__) + f" {error}\n"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    page = f"{hub}/{'datasets/' if kind == 'dataset' else ''}{source}"
    file = re.search(r"(?:/resolve/[^/]+/|'hf://datasets/[^'@]+@\w+/)([^\s\"']+\w)", found)
    why, cure = (
        f"{hub} cannot be reached",
        "Check the connection, set HF_ENDPOINT to a mirror, or give a local folder.",
    )
    if constants.HF_HUB_OFFLINE:
        why, cure = "HF_HUB_OFFLINE is set", "Unset it once to download it."
    errors = {
        "trust_remote_code": ValueError(f"{source} is a {kind}, {NEEDS_CODE}"),
        "GatedRepoError|is a gated dataset": PermissionError(
            f"{source} is gated. Accept its terms at {page}, and {LOGIN}"
        ),
        "RepositoryNotFoundError|DatasetNotFoundError": FileNotFoundError(
            f"There is no {kind} {source} at {hub}, or it is private. Check the name, or give a"
            f" local folder; for a private one {LOGIN}"
        ),
        "RemoteProtocolError|ReadError|ReadTimeout|Consistency check failed": ConnectionError(
            f"The download of {source} from {hub} broke off. Start again: whole files are kept,"
            " half ones are not."
        ),
        "UnsupportedProtocol": ValueError(
            f"HF_ENDPOINT is {hub}; it must begin with https:// or http://."
        ),
        "TransportError|LocalEntryNotFoundError|OfflineModeIsEnabled|ConnectionError": (
            ConnectionError(f"{why}, and {source} is not in the cache. {cure}")
        ),
        "RemoteEntryNotFoundError|Unable to find 'hf://": FileNotFoundError(
            f"There is no file {file[1] if file else 'of that name'} in {kind} {source} at {hub}."
        ),
    }
    return next((explained for names, explained in errors.items() if re.search(names, found)), None)
