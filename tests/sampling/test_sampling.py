"""Sampling says what it loaded and writes on from any prompt; what it draws from is what others draw from."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint.checkpoint import NETWORK_PREFIX, checkpoint_metadata, find_checkpoint, load_checkpoint
from configs.compose import compose
from data.config import TokenizerConfig
from data.tokenizer import build_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from sample import pick_device
from sampling.config import SamplingConfig
from sampling.sampler import generate, probabilities
from sampling.text import generate_text, score_text
from system.errors import UserError
from tests.conftest import PROJECT


@pytest.fixture
def best(tiny_run):
    return tiny_run.path / "checkpoints/best.ckpt"


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory) -> Path:
    """A checkpoint of an untrained model that reads bytes."""
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), None, Path())
    config = GPTConfig(vocab_size=256, context_length=16, num_layers=1, num_heads=2, d_model=32)
    weights = {NETWORK_PREFIX + name: weight for name, weight in GPT(config).state_dict().items()}
    entry = checkpoint_metadata(config, tokenizer, 0, {"nats_per_token": 5.5, "bits_per_byte": 8.0})
    path = tmp_path_factory.mktemp("byte_model") / "best.ckpt"
    torch.save({"gpt": entry, "state_dict": weights}, path)
    return path


@pytest.fixture
def written(sample_here, tiny_run):
    """written(*arguments) is what the tiny run's best checkpoint prints."""

    def called(*arguments: str) -> str:
        finished = sample_here(f"checkpoint={tiny_run.path}", "max_new_tokens=40", *arguments)
        assert finished.returncode == 0, finished
        return finished.stdout

    return called


# In a process of its own


def test_fresh_process_writes_from_a_run_that_was_moved(call, tiny_run, tmp_path):
    shutil.copytree(tiny_run.path, tmp_path / "copy")
    shutil.move(tmp_path / "copy", tmp_path / "far" / "away=1")
    finished = call("sample.py", "runs_dir=far", "prompt=The king, l'été", "max_new_tokens=20", cwd=tmp_path)
    assert finished.returncode == 0, finished
    assert finished.stdout.startswith("The king, l'été") and len(finished.stdout) > 25
    loaded = finished.stderr
    assert loaded.count("\n") == 1 and "away=1" in loaded
    assert f"step {tiny_run.summary['best_step']}," in loaded
    assert f"validation {tiny_run.summary['val_nats_per_token']:.3f} nats per token" in loaded
    assert f"{tiny_run.summary['val_bits_per_byte']:.3f} bits per byte" in loaded
    assert "tokenizer bpe (300 tokens)" in loaded and "context 16" in loaded


def test_prompt_from_standard_input_whatever_the_locale(call, tiny_run, tmp_path):
    env = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    arguments = (f"checkpoint={tiny_run.path}", "prompt_file=-", "max_new_tokens=5")
    finished = call("sample.py", *arguments, stdin="été 漢\nnext line", env=env)
    assert finished.returncode == 0 and finished.stdout.startswith("été 漢\nnext line"), finished


def test_no_run_yet_is_answered_with_how_to_train_from_this_directory(call, tmp_path):
    script = shlex.split(call("sample.py", "prompt=x", cwd=tmp_path).error)[-1]
    assert (tmp_path / script).resolve() == PROJECT / "train.py"


TEXTS = {
    "emoji": "👑👩‍👧🇺🇿",
    "uzbek": "gʻazal, oʻzbek, ғазал",
    "russian": "Быть или не быть",
    "chinese": "生存還是毀滅",
}


@pytest.mark.parametrize("model", ["byte", "bpe"])
def test_any_script_goes_through_a_pipe_into_another_program(start, tiny_run, byte_model, model, tmp_path):
    text = "\n".join(TEXTS.values())
    (tmp_path / "prompt.txt").write_text(text, encoding="utf-8")
    checkpoint = byte_model if model == "byte" else tiny_run.path
    arguments = (f"checkpoint={checkpoint}", f"prompt_file={tmp_path / 'prompt.txt'}", "max_new_tokens=20")
    writer = start("sample.py", *arguments, "temperature=2", "num_samples=2")
    program = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"
    reader = subprocess.run([sys.executable, "-c", program], stdin=writer.stdout, stdout=subprocess.PIPE, timeout=60)
    assert writer.wait(60) == reader.returncode == 0
    received = reader.stdout[::-1].decode()  # which is UTF-8 from end to end
    assert received.count(text) == 2
    assert "Traceback" not in writer.stderr.read().decode()


def test_pipe_closed_early_ends_it_silently(start, tiny_run):
    process = start("sample.py", f"checkpoint={tiny_run.path}", "max_new_tokens=1000000", "prompt=The king")
    assert process.stdout.read(8) == b"The king"
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read().count(b"\n") == 1  # what was loaded, and no more


def test_ctrl_c_ends_it_cleanly(start, tiny_run):
    process = start("sample.py", f"checkpoint={tiny_run.path}", "max_new_tokens=1000000", "prompt=The king")
    process.stdout.read(12)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.endswith(b"\n") and err.count(b"\n") == 1


def test_no_trainer_is_imported(clean_environment, tiny_run):
    program = (
        "import sys, runpy; sys.argv = ['sample.py', *sys.argv[1:]]; runpy.run_path('sample.py', run_name='__main__');"
        "sys.exit(str([m for m in ('lightning', 'torch._dynamo', 'tensorboard', 'sympy') if m in sys.modules]))"
    )
    command = [sys.executable, "-c", program, f"checkpoint={tiny_run.path}", "max_new_tokens=3"]
    here = Path(__file__).parents[2]
    finished = subprocess.run(command, env=clean_environment, cwd=here, capture_output=True, text=True, timeout=60)
    assert finished.stderr.splitlines()[-1] == "[]"


def test_interactive_continues_one_line_after_the_other(call, tiny_run):
    arguments = (f"checkpoint={tiny_run.path}", "mode=interactive", "max_new_tokens=5", "temperature=0")
    finished = call("sample.py", *arguments, stdin="The king\nМой лорд\nThe king\n")
    assert finished.returncode == 0 and "Traceback" not in finished.stderr
    first, second, third = re.fullmatch(r"(The king.*)(Мой лорд.*)(The king.*)", finished.stdout, re.DOTALL).groups()
    assert first == third and len(first) > 9


# Prompts


@pytest.mark.parametrize("prompt", ["漢👑 ß", "Zq#~\t", "<|endoftext|>", "\\ ${x} = 'a', \"b\"!"])
def test_prompt_characters_that_never_occurred_in_training_work(written, prompt):
    assert written(f"prompt={prompt}").startswith(prompt)


def test_prompt_from_a_file_is_that_text(written, tmp_path):
    (tmp_path / "a=1, b.txt").write_text("The queen's\n\n  night,", encoding="utf-8")
    assert written(f"prompt_file={tmp_path / 'a=1, b.txt'}") == written("prompt=The queen's\n\n  night,")


def test_prompt_file_that_is_not_utf8_is_refused_with_the_byte_offset(refuse, tmp_path):
    (tmp_path / "latin").write_bytes("caf\xe9".encode("latin-1"))
    assert "not UTF-8 at byte 3" in refuse("sample", f"prompt_file={tmp_path / 'latin'}")


def test_two_prompts_are_refused(refuse):
    assert "Leave one out" in refuse("sample", "prompt=a", "prompt_file=b")


def test_prompt_longer_than_the_context_goes_on_and_says_what_is_seen(sample_here, tiny_run):
    finished = sample_here(f"checkpoint={tiny_run.path}", "prompt=" + "the king " * 50, "max_new_tokens=30")
    assert re.search(r"the prompt has \d+ tokens; the model sees the last 16\n", finished.stderr)
    assert finished.stdout.startswith("the king " * 50) and len(finished.stdout) > 460


def test_no_prompt_starts_a_line(written):
    assert written().strip()


# What is written


def test_streamed_text_is_the_text_decoded_at_once(written, best):
    checkpoint = load_checkpoint(best)
    prompt = checkpoint.tokenizer.encode_ordinary("é")
    config = SamplingConfig(max_new_tokens=200, temperature=5.0)  # nearly random bytes: many broken characters
    ids = list(generate(checkpoint.network, prompt, config))
    whole = "é" + checkpoint.tokenizer.decode(ids)
    assert "�" in whole
    assert written("prompt=é", "max_new_tokens=200", "temperature=5.0") == whole + "\n"


def test_nth_sample_depends_on_the_seed_and_n_alone(written):
    def samples(*arguments):
        return re.split(r"\n--- sample \d+ ---\n", written("prompt=the", *arguments))[1:]

    three, five = samples("num_samples=3"), samples("num_samples=5")
    assert len(five) == 5 and len({text.strip() for text in five}) == 5
    assert [text.strip() for text in five[:3]] == [text.strip() for text in three]
    assert [text.strip() for text in samples("num_samples=3", "seed=1")] != [text.strip() for text in three]


def test_greedy_is_always_the_likeliest_token(written, best):
    checkpoint = load_checkpoint(best)
    ids = checkpoint.tokenizer.encode_ordinary("The king")
    start = len(ids)
    with torch.no_grad():
        for _ in range(40):
            ids.append(int(checkpoint.network(torch.tensor([ids[-16:]]))[0, -1].argmax()))
    expected = "The king" + checkpoint.tokenizer.decode(ids[start:]) + "\n"
    assert (
        written("prompt=The king", "temperature=0") == written("prompt=The king", "temperature=0", "seed=7") == expected
    )
    assert written("prompt=The king", "top_k=1") == written("prompt=The king", "top_p=1e-6") == expected


@pytest.mark.parametrize("off", ["top_k=0", "top_k=100000", "top_k=300", "top_k=null", "top_p=1", "top_p=null"])
def test_filters_that_filter_nothing_change_nothing(written, off):
    assert written("prompt=my lord", off) == written("prompt=my lord")


@pytest.mark.parametrize("model", ["byte", "bpe"])
@pytest.mark.parametrize("script", TEXTS)
def test_json_lines_hold_text_tokens_and_log_probabilities(sample_here, tiny_run, byte_model, model, script):
    path = byte_model if model == "byte" else tiny_run.path / "checkpoints/best.ckpt"
    arguments = (f"prompt={TEXTS[script]}", "format=jsonl", "num_samples=3", "max_new_tokens=30", "temperature=1.5")
    lines = [json.loads(line) for line in sample_here(f"checkpoint={path}", *arguments).stdout.splitlines()]
    checkpoint = load_checkpoint(path)
    assert [line["index"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["prompt"] == TEXTS[script] and line["finish_reason"] == "length" and len(line["tokens"]) == 30
        assert line["text"] == checkpoint.tokenizer.decode(line["tokens"])
    view = checkpoint.tokenizer.encode_ordinary(TEXTS[script])[-16:]
    with torch.no_grad():
        expected = checkpoint.network(torch.tensor([view]))[0, -1].log_softmax(-1)
    assert lines[2]["logprobs"][0] == pytest.approx(float(expected[lines[2]["tokens"][0]]), abs=1e-4)


def test_stop_text_ends_a_sample_before_it(best, written):
    whole = written("prompt=The king", "temperature=0")[: len("The king") + 30]
    stop = whole[-5:]
    assert written("prompt=The king", "temperature=0", f"stop={stop}") == whole[: whole.index(stop, 8)] + "\n"
    assert written("prompt=The king", "temperature=0", f"stop={json.dumps(['never', stop])}").endswith("\n")
    sample = json.loads(written("prompt=The king", "temperature=0", f"stop={stop}", "format=jsonl"))
    assert sample["finish_reason"] == "stop" and len(sample["tokens"]) < 40


def test_samples_that_stop_early_leave_the_others_alone(best):
    checkpoint = load_checkpoint(best)

    def samples(**fields) -> list[str]:
        config = SamplingConfig(max_new_tokens=40, num_samples=70, **fields)
        return [sample.text for sample, _ in generate_text(checkpoint, "The", config) if sample.finish_reason]

    free, stopped = samples(), samples(stop="king")
    assert len(free) == len(set(free)) == 70
    assert stopped == [text.partition("king")[0] for text in free] != free


@pytest.mark.parametrize("text", ["The king and queen of night day.\n" * 30, "k", *TEXTS.values()])
def test_score_is_the_validation_loss_of_that_text(best, sample_here, text):
    checkpoint = load_checkpoint(best)
    finished = sample_here(f"checkpoint={best}", f"prompt={text}", "mode=score", "format=jsonl")
    found = json.loads(finished.stdout)
    assert checkpoint.tokenizer.decode(found["tokens"]) == text
    assert found["bits_per_byte"] == pytest.approx(-sum(found["logprobs"]) / 0.693147 / len(text.encode()), rel=1e-5)
    said = sample_here(f"checkpoint={best}", f"prompt={text}", "mode=score").stdout
    assert f"{found['bits_per_byte']:.3f} bits per byte" in said and "\033" not in said


def test_score_colours_whole_characters_in_a_terminal(best, monkeypatch, capsys):
    import sample

    checkpoint = load_checkpoint(best)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    scores = score_text(checkpoint, "The king 👑 漢")
    sample.show_scores(checkpoint, scores, as_json=False)
    shown = capsys.readouterr().out
    assert re.sub(r"\033\[[0-9;]*m", "", shown).startswith("The king 👑 漢\n")
    assert shown.count("\033[38;5;") == len(scores.tokens) + len(sample.COLORS)
    monkeypatch.setenv("NO_COLOR", "1")
    sample.show_scores(checkpoint, scores, as_json=False)
    assert "\033" not in capsys.readouterr().out


def test_empty_text_is_not_scored(sample_here, best):
    assert "no text to score" in sample_here(f"checkpoint={best}", "mode=score").stderr


@pytest.mark.parametrize("key", ["mode", "format"])
def test_unknown_choice_is_refused_with_those_there_are(refuse, key):
    assert refuse("sample", f"{key}=x").startswith(f"error: {key} is 'x', but must be one of ")


def test_prompt_that_is_no_text_is_refused(refuse):
    assert "not UTF-8" in refuse("sample", "prompt=a\udcffb")


@pytest.mark.parametrize("device", ["cuda:7", "cuda:x", "tpu", "cpu:1"])
def test_device_that_is_not_there_is_named_beside_those_that_are(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=f"device is '{device}', but this machine has cuda, cuda:0, cuda:1, .*cpu"):
        pick_device(device)
    assert pick_device("cuda:1") == "cuda:1" and pick_device("auto") == "cuda"


def test_newest_runs_best_is_the_default(tmp_path, best):
    for name in ("a", "c", "b"):
        folder = tmp_path / "sweep" / name / "checkpoints"
        folder.mkdir(parents=True)
        shutil.copyfile(best, folder / "best.ckpt")
        shutil.copyfile(best, folder / "last.ckpt")
    assert find_checkpoint(None, str(tmp_path)) == tmp_path / "sweep/b/checkpoints/best.ckpt"


def test_looking_at_probabilities_leaves_the_logits_alone():
    logits = torch.randn(50)
    before = logits.clone()
    probabilities(logits, SamplingConfig(temperature=1.0, top_k=3, top_p=0.5))
    assert torch.equal(logits, before)


# Checkpoints


def test_checkpoint_is_plain_values_and_loads_without_running_code(best):
    content = torch.load(best, map_location="cpu", weights_only=True)
    plain = (str, int, float, bool, type(None), torch.Tensor)

    def walk(node):
        if isinstance(node, dict):
            for key, value in node.items():
                assert type(key) in (str, int), key
                walk(value)
        elif isinstance(node, list | tuple):
            for value in node:
                walk(value)
        else:
            assert isinstance(node, plain), type(node)

    walk(content["gpt"])
    walk(dict(content["state_dict"]))
    assert set(content["gpt"]) == {"format", "model", "tokenizer", "step", "validation"}


@pytest.mark.parametrize("name", ["gpt2", "llama", "nanochat", "tiny"])
def test_every_family_writes_the_same_from_its_checkpoint(name, tmp_path):
    torch.manual_seed(0)
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), None, tmp_path)
    sizes = {"vocab_size": tokenizer.n_vocab, "context_length": 16, "d_model": 32}
    network = GPT(replace(compose("train", [f"model={name}"]).model, **sizes))
    for parameter in network.parameters():  # some start at zero
        torch.nn.init.normal_(parameter, std=0.3)
    entry = checkpoint_metadata(network.config, tokenizer, 0, {"nats_per_token": 1.0, "bits_per_byte": 1.0})
    weights = {f"network.{key}": weight for key, weight in network.state_dict().items()}
    torch.save({"gpt": entry, "state_dict": weights}, tmp_path / "family.ckpt")
    loaded = load_checkpoint(tmp_path / "family.ckpt").network
    assert loaded.config == network.config
    for temperature in (0.0, 1.0):
        config = SamplingConfig(max_new_tokens=40, temperature=temperature)  # beyond the context
        texts = [list(generate(gpt, [72, 105], config)) for gpt in (network, loaded)]
        assert texts[0] == texts[1] and len(set(texts[0])) > 1


@pytest.mark.parametrize("damage", ["missing", "extra", "renamed", "shape", "entry", "empty"])
def test_weights_that_do_not_fit_are_refused(best, tmp_path, damage):
    content = torch.load(best, map_location="cpu", weights_only=True)
    weights = content["state_dict"]
    name = next(iter(weights))
    if damage == "missing":
        del weights[name]
    elif damage == "extra":
        weights["network.more"] = torch.zeros(1)
    elif damage == "renamed":  # as torch.compile does
        content["state_dict"] = {name.replace("network.", "network._orig_mod."): w for name, w in weights.items()}
    elif damage == "shape":
        weights[name] = weights[name][:-1]
    elif damage == "entry":
        del content["gpt"]
    elif damage == "empty":
        content["state_dict"] = {}
    torch.save(content, tmp_path / "damaged.ckpt")
    with pytest.raises(UserError, match=r"damaged\.ckpt"):
        load_checkpoint(tmp_path / "damaged.ckpt")


def test_checkpoint_cut_short_is_refused(best, tmp_path):
    (tmp_path / "short.ckpt").write_bytes(best.read_bytes()[:-1000])
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(tmp_path / "short.ckpt")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_interactive_recalls_the_last_line_with_the_up_key(clean_environment, tiny_run):
    pytest.importorskip("readline")
    import pty

    ours, theirs = pty.openpty()
    arguments = (f"checkpoint={tiny_run.path}", "mode=interactive", "max_new_tokens=1", "temperature=0")
    command = [sys.executable, str(Path(__file__).resolve().parents[2] / "sample.py"), *arguments]
    environment = clean_environment | {"TERM": "xterm"}
    process = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    try:
        shown = read_until(ours, b"> ")
        os.write(ours, b"The king\r")
        shown += read_until(ours, b"> ")
        os.write(ours, b"\x1b[A\r")  # Up
        shown = read_until(ours, b"> ")
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)
    assert b"^[[A" not in shown and shown.count(b"The king") == 2  # as typed, and continued


def read_until(terminal: int, end: bytes) -> bytes:
    """What a terminal shows until it ends with this."""
    shown = b""
    while not shown.endswith(end):
        shown += os.read(terminal, 1024)
    return shown
