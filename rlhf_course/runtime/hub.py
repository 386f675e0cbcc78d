"""Download from the hub; check configs first, run no remote code, and explain errors."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from transformers import AutoConfig

from rlhf_course.runtime.files import is_damaged

ID = r"(?a)(\w[\w.-]*/)?\w[\w.-]*"
SMALL = ["*.json", "*.txt", "*.model", "*.jinja"]
WEIGHTS = ["*model*.safetensors", "v_head.safetensors"], ["pytorch_model*.bin", "adapter_model.bin"]
LOGIN = "run hf auth login or set HF_TOKEN."
NEEDS_CODE = (
    "that needs its own code, which the course does not run. Convert the model first"
    " (Baichuan: scripts/convert_baichuan.py)."
)


def check_source(source: str | Path, kind: str = "model") -> None:
    """Raise ``FileNotFoundError`` if the source is neither a folder nor a possible hub id."""
    is_id = re.fullmatch(ID, str(source)) and not Path(source).is_file()
    if not is_id and not Path(source).is_dir():
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
    folder, is_local = Path(source), Path(source).exists()
    get = partial(snapshot_download, source, revision=revision, ignore_patterns="*/*", **options)
    with hub_errors(source):
        if not is_local:
            folder = Path(get(allow_patterns=SMALL))
        if not to_convert and (folder / "config.json").exists():
            AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if not is_local:
            get(allow_patterns=WEIGHTS[0])
            if not any(folder.glob(WEIGHTS[0][0])):
                get(allow_patterns=WEIGHTS[1])
    return folder


@contextmanager
def hub_errors(source: str | Path, kind: str = "model") -> Iterator[None]:
    """Re-raise known errors from the hub's libraries with a sentence about ``source``."""
    try:
        yield
    except Exception as error:
        if explained := _explain(error, str(source), kind):
            raise explained from None
        raise


def _explain(error: BaseException, source: str, kind: str) -> Exception | None:
    """Return an error that explains ``error``, or None; match names and text because types vary."""
    if kind == "model" and (damaged := next(filter(is_damaged, Path(source).glob("*")), None)):
        return ValueError(
            f"{damaged} is damaged, cut short or a git-lfs pointer. Download it again."
        )
    names, hub = "", constants.ENDPOINT
    while error is not None:
        names += " ".join(base.__name__ for base in type(error).__mro__) + f" {error}\n"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    page = f"{hub}/{'datasets/' if kind == 'dataset' else ''}{source}"
    sentences = {
        "trust_remote_code": (ValueError, f"{source} is a {kind} {NEEDS_CODE}"),
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
    return next((make(text) for k, (make, text) in sentences.items() if re.search(k, names)), None)
