"""Download from the hub; check configs first, run no remote code, and explain errors."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from transformers import AutoConfig

from rlhf_course.runtime.files import is_damaged

ID = r"(?a)(\w[\w.-]*/)?\w[\w.-]*"
SMALL = ["*.json", "*.txt", "*.model", "*.jinja"]
SAFETENSORS = ["*model*.safetensors", "v_head.safetensors"]
BIN = ["pytorch_model*.bin", "adapter_model.bin"]  # only if there are no safetensors
LOGIN = "run hf auth login or set HF_TOKEN."
NEEDS_CODE = (
    "that needs its own code, which the course does not run. Convert the model first"
    " (Baichuan: scripts/convert_baichuan.py)."
)


def check_source(source: str | Path, kind: str = "model") -> None:
    """Raise ``FileNotFoundError`` if the source is neither a folder nor a possible hub id."""
    path = Path(source)
    may_be_id = re.fullmatch(ID, str(source)) and not path.is_file()
    if not path.is_dir() and not may_be_id:
        raise FileNotFoundError(
            f"No {kind} folder at {source}. Give an existing folder, or a hub id like owner/name."
        )


def download(
    source: str | Path, revision: str | None = None, to_convert: bool = False, **options
) -> Path:
    """Return the folder with a model's files: a local ``source`` or its hub download.

    Raises ``OSError`` for an unavailable model and, before downloading weights, ``ValueError`` for
    an architecture that transformers does not support, unless ``to_convert`` is set. ``options`` go
    to huggingface_hub's ``snapshot_download``.
    """
    check_source(source)
    is_local = Path(source).exists()
    options |= {"revision": revision, "ignore_patterns": "*/*"}  # no subfolders
    with hub_errors(source):
        if is_local:
            folder = Path(source)
        else:
            folder = Path(snapshot_download(source, allow_patterns=SMALL, **options))
        if not to_convert and (folder / "config.json").exists():
            AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if not is_local:
            snapshot_download(source, allow_patterns=SAFETENSORS, **options)
            if not any(folder.glob(SAFETENSORS[0])):
                snapshot_download(source, allow_patterns=BIN, **options)
    return folder


@contextmanager
def hub_errors(source: str | Path, kind: str = "model") -> Iterator[None]:
    """Re-raise known errors from the hub's libraries with a sentence about ``source``."""
    try:
        yield
    except Exception as error:
        explained = _explain(error, str(source), kind)
        if explained:
            raise explained from None
        raise


def _explain(error: BaseException, source: str, kind: str) -> Exception | None:
    """Return an error that explains ``error``, or None; match names and text because types vary."""
    if kind == "model":
        for file in Path(source).glob("*"):
            if is_damaged(file):
                return ValueError(
                    f"{file} is damaged, cut short or a git-lfs pointer. Download it again."
                )
    description = _describe_chain(error)
    hub = constants.ENDPOINT
    page = f"{hub}/datasets/{source}" if kind == "dataset" else f"{hub}/{source}"
    explanations = {  # pattern in the description: (type of the new error, its message)
        "trust_remote_code": (ValueError, f"{source} is a {kind} {NEEDS_CODE}"),
        "Unrecognized configuration class": (
            ValueError,
            f"{source} is no text model that transformers can load for this purpose, for example"
            " because it also reads images. Use a text model.",
        ),
        "GatedRepoError|is a gated dataset": (
            PermissionError,
            f"{source} is gated. Accept its terms at {page}, and {LOGIN}",
        ),
        "RepositoryNotFoundError|DatasetNotFoundError": (
            FileNotFoundError,
            f"There is no {kind} {source} at {hub}, or it is private. Check the name, or give a"
            f" local folder; for a private {kind}, {LOGIN}",
        ),
        "RemoteProtocolError|ReadError|ReadTimeout|Consistency check failed": (
            ConnectionError,
            f"The download of {source} from {hub} was interrupted. Start again.",
        ),
        "TransportError|LocalEntryNotFoundError|OfflineModeIsEnabled|ConnectionError": (
            ConnectionError,
            f"{hub} cannot be reached, and {source} is not in the cache. Check the connection and"
            " HF_HUB_OFFLINE, set HF_ENDPOINT to a mirror, or give a local folder.",
        ),
    }
    for pattern, (error_type, message) in explanations.items():
        if re.search(pattern, description):
            return error_type(message)
    return None


def _describe_chain(error: BaseException | None) -> str:
    """Return a line for an error and for each of its causes: names of its classes, and its text."""
    description = ""
    while error is not None:
        classes = " ".join(base.__name__ for base in type(error).__mro__)
        description += f"{classes} {error}\n"
        if error.__cause__ is None and not error.__suppress_context__:
            error = error.__context__
        else:
            error = error.__cause__
    return description
