"""Faults around files: what is not ours stays, what is half-written goes, what is saved can be
read.
"""

import os
import re
import resource
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders import make_policy, reviews
from fault_page import case
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_course.baichuan.convert import convert_to_llama
from rlhf_course.baichuan.toy_checkpoint import (
    SPECIAL_IDS,
    norm_head,
    train_sentencepiece,
    write_baichuan_checkpoint,
)
from rlhf_course.course.presets import ROOT
from rlhf_course.runtime import command
from rlhf_course.worlds import build, cache, dialogues

KIND = "Files"
NOBODY = 65534


@pytest.fixture
def built(tmp_path, monkeypatch):
    """An empty cache and quick dialogues; a list with an entry for each time that these were made."""
    monkeypatch.setenv("RLHF_COURSE_CACHE", str(tmp_path / "cache"))
    times, some = [], dialogues.make_pairs(8)

    def make(number: int, seed: int) -> list:
        times.append(number)
        time.sleep(0.2)
        return some * (number // 8)

    monkeypatch.setattr(dialogues, "make_pairs", make)
    return times


@pytest.mark.fault("save_pretrained into a folder with notes and data in it")
def test_what_is_not_ours_stays(tmp_path, outcome):
    (tmp_path / "mywork" / "data").mkdir(parents=True)
    (tmp_path / "mywork" / "notes.txt").write_text("mine")
    (tmp_path / "mywork" / "data" / "rows.csv").write_text("mine")
    for _ in range(2):
        make_policy().save_pretrained(tmp_path / "mywork")
    assert (
        (tmp_path / "mywork/notes.txt").read_text()
        == (tmp_path / "mywork/data/rows.csv").read_text()
        == "mine"
    )
    assert (tmp_path / "mywork/model.safetensors").exists() and os.listdir(tmp_path) == ["mywork"]
    outcome("The policy's files are written there; all others stay.")


@pytest.mark.parametrize(
    ("given", "place"),
    [
        case("my/cache", ROOT / "my/cache", done="RLHF_COURSE_CACHE=my/cache, relative"),
        case("", ROOT / "build/cache", done="RLHF_COURSE_CACHE= with nothing behind it"),
        case("~/cache", Path.home() / "cache", done="RLHF_COURSE_CACHE='~/cache', quoted"),
    ],
)
def test_a_cache_path_means_what_it_says(given, place, monkeypatch, tmp_path, outcome):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_COURSE_CACHE", given)
    assert cache.cache_root() == place
    where = (
        f"{given} below the course's folder"
        if given == "my/cache"
        else f"{'~' if given else 'build'}/cache"
    )
    outcome(f"Built models are kept in {where}, wherever the command was typed.")


@pytest.mark.fault("four commands that need the same cached item at once")
def test_one_of_four_builds_and_the_others_wait(built, outcome):
    found = []
    together = [
        threading.Thread(target=lambda: found.append(sorted(build.build_dialogues().iterdir())))
        for _ in "1234"
    ]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join(20)
    assert (
        len(built) == 1
        and len(found) == 4
        and all(files == found[0] for files in found)
        and len(found[0]) == 3
    )
    outcome("One builds it, the others wait and use it.")


def damage(folder: Path, how: str) -> None:
    test, manifest = folder / "test-00000-of-00001.parquet", folder / cache.MANIFEST
    {
        "cut": lambda: os.truncate(test, 100),
        "gone": test.unlink,
        "more": lambda: (folder / "train-00001-of-00002.parquet").write_bytes(test.read_bytes()),
        "manifest": lambda: manifest.write_text("{"),
        "empty": lambda: [path.unlink() for path in folder.iterdir()],
    }[how]()


@pytest.mark.parametrize(
    "how",
    [
        case("cut", done="a file in the cache is cut off"),
        case("gone", done="a file in the cache is missing"),
        case("more", done="a file too many in a cached folder"),
        case("manifest", done="the list of a cached folder's files is garbled"),
        case("empty", done="a cached folder is empty"),
    ],
)
def test_a_damaged_item_is_built_again(how, built, capsys, outcome):
    whole = cache.hashes(folder := build.build_dialogues())
    damage(folder, how)
    assert build.build_dialogues() == folder and cache.hashes(folder) == whole and len(built) == 2
    said = capsys.readouterr().out
    (folder / ".DS_Store").write_bytes(b"a file browser's")
    assert (
        build.build_dialogues() == folder and len(built) == 2
    )  # once, and not for what nobody loads
    outcome(re.sub(r"-\w{12} ", "-… ", said))


@pytest.mark.fault("an item of the cache is built again while another command reads it")
def test_a_reader_finds_files_while_they_are_built_again(built, outcome):
    folder, read = build.build_dialogues(), 0
    train = folder / "train-00000-of-00001.parquet"
    content = train.read_bytes()
    damage(folder, "cut")
    builder = threading.Thread(target=build.build_dialogues)
    builder.start()
    while builder.is_alive():
        assert train.read_bytes() == content
        read += 1
    assert read > 10 and len(built) == 2
    outcome("It reads whole files all the time: each is replaced in one go.")


@pytest.mark.parametrize(
    "signum",
    [
        case(signal.SIGINT, done="Ctrl-C while the embedded world is built"),
        case(signal.SIGTERM, done="SIGTERM while the embedded world is built"),
    ],
)
def test_a_stopped_builder_leaves_nothing_half_built(
    signum, built, tmp_path, monkeypatch, capsys, outcome
):
    monkeypatch.setattr(dialogues, "make_pairs", lambda number, seed: os.kill(os.getpid(), signum))
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert command.run("rlhf_course.worlds.build", build.main, []) == 128 + signum
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
    outcome(capsys.readouterr().err)


@contextmanager
def full_disk():
    """No file of this process can grow beyond 1,000 bytes: the error comes where a full disk's
    would.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:  # before pytest writes to its own log
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.fault("the disk is full while the embedded world is built")
def test_a_full_disk_ends_with_a_sentence(built, tmp_path, capsys, outcome):
    with full_disk():
        code = command.run("rlhf_course.worlds.build", build.main, [])
    said = capsys.readouterr().err
    assert (
        code == 1
        and "The disk took no more" in said
        and not list((tmp_path / "cache").glob("dialogues*"))
    )
    assert not list((tmp_path / "cache").glob("*.part"))
    outcome(re.sub(r" \([\d,]+ MB left\)", "", re.sub(r"-\w{12} ", "-… ", said)))


def umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.rglob("[!.]*")}


def save_policy(folder: Path) -> Path:
    make_policy().save_pretrained(folder / "policy")
    return folder / "policy"


def save_base(folder: Path) -> Path:
    texts = [review["text"] for review in reviews(160)]
    pieces = train_sentencepiece(texts, 640, folder)
    sizes = {"vocab_size": 640, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = norm_head(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, **SPECIAL_IDS)))
    source = write_baichuan_checkpoint(model, pieces, folder / "baichuan")
    return convert_to_llama(source, folder / "base", report=lambda line: None)


def save_dialogues(folder: Path) -> Path:
    return build.build_dialogues()


@pytest.mark.parametrize(
    "save",
    [
        case(save_policy, done="another user reads a policy that you saved"),
        case(save_base, done="another user reads a base that you converted"),
        case(save_dialogues, done="another user reads what you built in a shared cache"),
    ],
)
def test_saved_files_can_be_read_by_whom_the_umask_lets_read(save, built, tmp_path, outcome):
    before = os.umask(0o027)
    try:
        assert modes(save(tmp_path)) <= {0o750, 0o640}
    finally:
        os.umask(before)
    outcome("All files have the permissions that the umask says.")


def as_nobody(action) -> int:
    """The exit code of a process of another user: 0 where ``action()`` is true. Without root it is
    one's own.
    """
    if (child := os.fork()) == 0:
        code = 1
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            code = 0 if action() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def as_me(action) -> int:
    """The same here."""
    return 0 if action() else 1


@pytest.mark.fault("two users with one RLHF_COURSE_CACHE")
def test_two_users_share_a_cache(built, monkeypatch, outcome):
    def write() -> bool:
        return cache.is_intact(build.build_dialogues())

    def read() -> bool:
        made = len(built)
        return write() and len(built) == made

    with (
        tempfile.TemporaryDirectory() as shared
    ):  # the folders that pytest gives are closed to others
        os.chmod(shared, 0o777)
        for first, second in ((as_me, as_nobody), (as_nobody, as_me)):
            folder = Path(shared, first.__name__)
            folder.mkdir()
            folder.chmod(0o777)
            monkeypatch.setenv("RLHF_COURSE_CACHE", str(folder))
            assert first(write) == 0 and second(read) == 0
            assert modes(folder) == {0o777 & ~umask(), 0o666 & ~umask()}
            assert next(folder.glob(".*.lock")).stat().st_mode & 0o666 == 0o666
    outcome("What the one built, the other reads; where both may write, either builds.")
