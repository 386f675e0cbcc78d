"""Preset full with its own ids, and faults of a hub, on a hub that runs on this machine."""

import time

import datasets
import pytest
from accelerate.state import AcceleratorState
from huggingface_hub import constants

from dev.simulated_hub import serve
from dev.simulated_hub.repositories import repositories
from rlhf_course.data import load_answers, load_pairs
from rlhf_course.runtime.hub import download
from scripts import convert_baichuan, train_ppo, train_reward_model, train_sft

HC3, PAIRS = "Hello-SimpleAI/HC3-Chinese", "beyond/rlhf-reward-single-round-trans_chinese"
GPT2, BAICHUAN = "lvwerra/gpt2-imdb", "baichuan-inc/Baichuan2-7B-Base"
GPT2_CONFIG = '{"model_type": "gpt2"}'
LOGIN = "run hf auth login or set HF_TOKEN."
BROKEN = "was interrupted. Start again."


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """What preset full's ids hold."""
    return repositories(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture
def hub(contents):
    """A hub with them."""
    with serve(contents) as hub:
        yield hub


# --- preset full with its own ids


@pytest.fixture
def command(hub, tmp_path, monkeypatch, capsys):
    """Run a training command at preset full, with a cache of its own; return what it printed."""
    hub.use(monkeypatch, tmp_path / "home")
    monkeypatch.chdir(tmp_path)

    def run(script, *options: str) -> str:
        AcceleratorState._reset_state(reset_partial_state=True)  # its precision is its own
        assert script.main(["--preset=full", *options]) == 0
        return capsys.readouterr().out

    yield run
    AcceleratorState._reset_state(reset_partial_state=True)
    hub.check(tmp_path)


def test_the_commands_at_preset_full_run_with_their_own_ids(command):
    assert "/sft/model." in command(train_sft, "--subset=60", "--output_dir=sft")
    sizes = ("--train_subset=100", "--eval_subset=40", "--audit_prompts=10")
    said = command(train_reward_model, *sizes, "--output_dir=reward")
    assert "Accuracy on 39 held-out pairs" in said
    sizes = ("--steps=2", "--batch_size=8", "--mini_batch_size=8")
    assert "/ppo/policy." in command(train_ppo, *sizes, "--output=ppo")


def test_the_lora_pipeline_of_the_readme_runs_on_the_converted_download(command):
    assert convert_baichuan.main([str(download(BAICHUAN, to_convert=True)), "base"]) == 0
    base = "--model_name_or_path=base"
    command(train_sft, base, "--subset=60", "--output_dir=sft")
    lora = ("--use_peft", "--lora_r=8", "--gradient_checkpointing=true", "--dtype=bfloat16")
    sizes = ("--train_subset=60", "--eval_subset=20", "--audit_prompts=10")
    command(train_reward_model, base, "--dataset", PAIRS, *lora, *sizes, "--output_dir=reward")
    adapters = ("--sft_adapter=sft/model", "--reward_adapter=reward/model")
    sizes = ("--train_subset=60", "--steps=2", "--max_new_tokens=12")
    assert "/ppo/policy." in command(train_ppo, *adapters, *sizes, "--output=ppo")


# --- what is downloaded


def test_a_download_holds_no_code_and_the_weights_once(hub, contents, tmp_path, monkeypatch):
    hub.use(monkeypatch, tmp_path / "a")
    wanted = {name for name in contents[BAICHUAN] if not name.endswith((".py", ".md"))}
    assert {path.name for path in download(BAICHUAN, to_convert=True).iterdir()} == wanted
    both = {"config.json": GPT2_CONFIG, "vocab.txt": "a", "modeling.py": "1", "tf_model.h5": b"1"}
    weights = ("model.safetensors", "pytorch_model.bin", "onnx/model.safetensors")
    with serve({"me/both": both | dict.fromkeys(weights, b"1")}) as other:
        other.use(monkeypatch, tmp_path / "b")
        kept = {path.name for path in download("me/both").iterdir()}
    assert kept == {"config.json", "vocab.txt", "model.safetensors"}
    (tmp_path / "config.json").write_text(GPT2_CONFIG)
    assert download(tmp_path) == tmp_path
    with pytest.raises(FileNotFoundError, match="No model folder at ./nowhere. Give an existing"):
        download("./nowhere")


def test_a_model_that_needs_code_is_refused_before_its_weights_are_downloaded(
    hub, tmp_path, monkeypatch, capsys
):
    hub.use(monkeypatch, tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    for script in (train_sft, train_reward_model):
        assert script.main(["--preset=full", "--model_name_or_path", BAICHUAN]) == 1
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert f"{BAICHUAN} is a model that needs its own code, which" in last
    assert not [path for _, path in hub.asked if path.endswith((".bin", ".py"))]


# --- a hub with something wrong


@pytest.fixture
def impatient(monkeypatch):
    """The libraries try again at once, and give up soon."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))


def gate(hub):
    hub.gated |= {GPT2, f"datasets/{PAIRS}", BAICHUAN}


def take_away(hub):
    hub.files.clear()


def cut(hub):
    names = {name for files in hub.files.values() for name in files}
    hub.cut |= {name: 10 for name in names if name.endswith((".bin", ".parquet"))}


def unplug(hub):
    hub.unplug()


FAULTS = {
    gate: (PermissionError, "{id} is gated. Accept its terms at {hub}/{page}, and " + LOGIN),
    take_away: (FileNotFoundError, "There is no {kind} {id} at {hub}, or it is private. Check"),
    cut: (ConnectionError, "The download of {id} from {hub} " + BROKEN),
    unplug: (ConnectionError, "{hub} cannot be reached, and {id} is not in the cache. Check"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_the_hub_is_one_sentence(fault, hub, tmp_path, monkeypatch, impatient):
    hub.use(monkeypatch, tmp_path / "home")
    fault(hub)
    error, sentence = FAULTS[fault]
    for load, name, kind, page in (
        (download, GPT2, "model", GPT2),
        (load_pairs, PAIRS, "dataset", f"datasets/{PAIRS}"),
    ):
        with pytest.raises(error) as raised:
            load(name)
        wanted = sentence.format(id=name, page=page, kind=kind, hub=hub.endpoint)
        assert str(raised.value).startswith(wanted)


def test_a_download_that_broke_off_leaves_nothing_that_the_next_run_takes_for_whole(
    hub, contents, tmp_path, monkeypatch, impatient
):
    hub.use(monkeypatch, tmp_path)
    whole = contents[GPT2]["pytorch_model.bin"]
    hub.cut = {"pytorch_model.bin": len(whole) // 2}
    with pytest.raises(ConnectionError, match="was interrupted"):
        download(GPT2)
    hub.cut = {}
    assert (download(GPT2) / "pytorch_model.bin").read_bytes() == whole


def test_an_offline_run_says_what_is_not_in_the_cache(hub, tmp_path, monkeypatch):
    hub.use(monkeypatch, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for load, source in ((download, GPT2), (load_pairs, PAIRS)):
        with pytest.raises(
            ConnectionError, match=f"reached, and {source} is not in the cache. .* HF_HUB_OFFLINE"
        ):
            load(source)
    assert not hub.asked


def test_what_is_in_the_cache_needs_no_hub(hub, tmp_path, monkeypatch, impatient):
    hub.use(monkeypatch, tmp_path)
    folder, pairs = download(GPT2), load_pairs(PAIRS)
    answers = load_answers(HC3, data_files="all.jsonl")
    hub.unplug()
    assert download(GPT2) == folder and load_pairs(PAIRS)[0][:] == pairs[0][:]
    assert load_answers(HC3, data_files="all.jsonl")[0][:] == answers[0][:]
