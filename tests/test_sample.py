"""Sampling says what it loaded and writes on from any prompt; what it draws from is what others draw from."""

import re
import shutil

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from configs import schema
from configs.command_line import compose
from configs.errors import UserError
from data.config import TokenizerConfig
from data.tokenizer import build_tokenizer
from model.checkpoint import find_checkpoint, gpt_entry, load_checkpoint
from model.config import GPTConfig, SamplingConfig
from model.generation import generate, probabilities
from model.gpt import GPT


@pytest.fixture
def best(tiny_run):
    return tiny_run.path / "checkpoints/best.ckpt"


@pytest.fixture
def write(sample_here, tiny_run):
    """write(*arguments) is what the tiny run's best checkpoint prints."""

    def written(*arguments: str) -> str:
        finished = sample_here(f"checkpoint={tiny_run.path}", "max_new_tokens=40", *arguments)
        assert finished.returncode == 0, finished
        return finished.stdout

    return written


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


def test_no_run_yet_is_answered_with_how_to_train(call, tmp_path):
    assert "python train.py" in call("sample.py", "prompt=x", cwd=tmp_path).error


# Prompts


@pytest.mark.parametrize("prompt", ["漢👑 ß", "Zq#~\t", "<|endoftext|>", "\\ ${x} = 'a', \"b\"!"])
def test_prompt_characters_that_never_occurred_in_training_work(write, prompt):
    assert write(f"prompt={prompt}").startswith(prompt)


def test_prompt_from_a_file_is_that_text(write, tmp_path):
    (tmp_path / "a=1, b.txt").write_text("The queen's\n\n  night,", encoding="utf-8")
    assert write(f"prompt_file={tmp_path / 'a=1, b.txt'}") == write("prompt=The queen's\n\n  night,")


def test_prompt_file_that_is_not_utf8_is_refused_with_the_byte_offset(refuse, tmp_path):
    (tmp_path / "latin").write_bytes("caf\xe9".encode("latin-1"))
    assert "not UTF-8 at byte 3" in refuse("sample", f"prompt_file={tmp_path / 'latin'}")


def test_two_prompts_are_refused(refuse):
    assert "Leave one out" in refuse("sample", "prompt=a", "prompt_file=b")


def test_prompt_longer_than_the_context_goes_on_and_says_what_is_seen(sample_here, tiny_run):
    finished = sample_here(f"checkpoint={tiny_run.path}", "prompt=" + "the king " * 50, "max_new_tokens=30")
    assert re.search(r"the prompt has \d+ tokens; the model sees the last 16\n", finished.stderr)
    assert finished.stdout.startswith("the king " * 50) and len(finished.stdout) > 460


def test_no_prompt_starts_a_line(write):
    assert write().strip()


# What is written


def test_streamed_text_is_the_text_decoded_at_once(write, best):
    checkpoint = load_checkpoint(best)
    prompt = checkpoint.tokenizer.encode_ordinary("é")
    config = SamplingConfig(max_new_tokens=200, temperature=5.0)  # nearly random bytes: many broken characters
    ids = list(generate(checkpoint.network, prompt, config))
    whole = "é" + checkpoint.tokenizer.decode(ids)
    assert "�" in whole
    assert write("prompt=é", "max_new_tokens=200", "temperature=5.0") == whole + "\n"


def test_nth_sample_depends_on_the_seed_and_n_alone(write):
    def samples(*arguments):
        return re.split(r"\n--- sample \d+ ---\n", write("prompt=the", *arguments))[1:]

    three, five = samples("num_samples=3"), samples("num_samples=5")
    assert len(five) == 5 and len({text.strip() for text in five}) == 5
    assert [text.strip() for text in five[:3]] == [text.strip() for text in three]
    assert [text.strip() for text in samples("num_samples=3", "seed=1")] != [text.strip() for text in three]


def test_greedy_is_always_the_likeliest_token(write, best):
    checkpoint = load_checkpoint(best)
    ids = checkpoint.tokenizer.encode_ordinary("The king")
    start = len(ids)
    with torch.no_grad():
        for _ in range(40):
            ids.append(int(checkpoint.network(torch.tensor([ids[-16:]]))[0, -1].argmax()))
    expected = "The king" + checkpoint.tokenizer.decode(ids[start:]) + "\n"
    assert write("prompt=The king", "temperature=0") == write("prompt=The king", "temperature=0", "seed=7") == expected
    assert write("prompt=The king", "top_k=1") == write("prompt=The king", "top_p=1e-6") == expected


@pytest.mark.parametrize("off", ["top_k=0", "top_k=100000", "top_k=300", "top_k=null", "top_p=1", "top_p=null"])
def test_filters_that_filter_nothing_change_nothing(write, off):
    assert write("prompt=my lord", off) == write("prompt=my lord")


def test_newest_runs_best_is_the_default(tmp_path, best):
    for name in ("a", "c", "b"):
        folder = tmp_path / "sweep" / name / "checkpoints"
        folder.mkdir(parents=True)
        shutil.copyfile(best, folder / "best.ckpt")
        shutil.copyfile(best, folder / "last.ckpt")
    assert find_checkpoint(None, str(tmp_path)) == tmp_path / "sweep/b/checkpoints/best.ckpt"


# Against transformers


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 0, 1, 7, 50, 80])
@pytest.mark.parametrize("top_p", [None, 0.1, 0.7, 0.95, 1.0])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)).double() * 2
    expected = TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None:
        expected = TopPLogitsWarper(top_p)(None, expected)
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    torch.testing.assert_close(probabilities(logits.clone(), config), expected.softmax(-1)[0])


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
    assert set(content["gpt"]) == {"model", "tokenizer", "step", "validation"}


@pytest.mark.parametrize("name", ["gpt2", "llama", "nanochat", "tiny"])
def test_every_family_writes_the_same_from_its_checkpoint(name, tmp_path):
    torch.manual_seed(0)
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), None, tmp_path)
    sizes = {"vocab_size": tokenizer.n_vocab, "context_length": 16, "d_model": 32}
    network = GPT(schema.build(GPTConfig, compose("train", [f"model={name}"]).model, **sizes))
    for parameter in network.parameters():  # some start at zero
        torch.nn.init.normal_(parameter, std=0.3)
    entry = gpt_entry(network.config, tokenizer, 0, {"nats_per_token": 1.0, "bits_per_byte": 1.0})
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
