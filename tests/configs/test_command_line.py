"""Any text arrives as it was typed, and any mistake is answered by one line that says how to mend it."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import configs.compose
import configs.defaults
import configs.error_lines
from benchmarks import quality
from configs.arguments import PATH_KEYS, quote_literal
from configs.cli import run
from configs.compose import compose, resolve_path
from configs.defaults import known_keys
from configs.error_lines import format_hydra_error
from configs.schema import GROUPS, ROOTS, register
from configs.unknown_keys import SYNONYMS
from model.config import GPTConfig
from system.errors import UserError
from tests.conftest import write_text
from training.run_dir import make_new_dir, new_sweep_dir
from training.trainer_options import SUPPORTED_OPTIONS

PROJECT = Path(__file__).resolve().parents[2]

# Text as it is

anything = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))  # all that a shell can pass
nasty = st.text("a ,'\"!#$\\{}[]()=:~@%&*+-é漢👑\n\t?|/.")


@settings(max_examples=80, deadline=None)
@given(anything | nasty)
@example('To be, or not to be: that\'s the "question"!')
@example("a=b, c=${oc.env:HOME} # {x: [1, 2]}")
@example("\\${x} \\\\${y} ${")
@example("ends in a backslash\\")
@example("ends in two\\\\")
@example("\\'")
@example("l'été à Besançon\nsecond line\n")
@example("")
@example("  spaces kept  ")
@example("true")
@example("1e3")
@example("???")
@example("~prompt")
def test_any_text_is_a_prompt_bit_for_bit(prompt):
    assert compose("sample", [f"prompt={prompt}"]).prompt == prompt


@settings(max_examples=50, deadline=None)
@given(anything | nasty)
@example("runs/a=b,c/epoch=3-step=40.ckpt")
@example("C:\\runs\\${x}")
def test_checkpoint_path_with_an_equals_sign_needs_no_quotes(path):
    assume(path and path[0] != "~" and len(path.encode()) < 200)  # expanded; too long for a name
    assert compose("sample", [f"checkpoint={path}"]).checkpoint == (path if path != "null" else None)


@pytest.mark.parametrize("key", ["data.corpus", "data.cache_dir", "runs_dir"])
def test_other_paths_arrive_as_they_are(key):
    path = "texts/a=1, b's [x] ${y}*.txt"
    assert compose("train", [f"{key}={path}"]).get(key) == path


def test_prompt_through_a_real_shell_becomes_no_sweep(call, tmp_path):
    error = call("sample.py", 'prompt=a, b, "c" = ${d} !', f"runs_dir={tmp_path / 'none'}").error
    assert "no trained run" in error  # all that is missing


@pytest.mark.parametrize("plus", ["+", "++"])
def test_leading_plus_changes_nothing_about_text(plus):
    config = compose("sample", [f"{plus}prompt=To be, or not", f"{plus}runs_dir=a=b"])
    assert (config.prompt, config.runs_dir) == ("To be, or not", "a=b")


# Paths


@pytest.mark.parametrize(
    ("program", "key"),
    [(program, key) for program in ROOTS for key in PATH_KEYS if key in known_keys(program)],
)
def test_home_directory_is_meant_by_a_leading_tilde_in_every_path(monkeypatch, program, key):
    monkeypatch.setenv("HOME", "/home/${us}")
    if key == "resume":  # there is no such run
        with pytest.raises(UserError, match=r"^resume=/home/\$\{us\}/a,b/x.png: "):
            compose(program, [f"{key}=~/a,b/x.png"])
    else:
        assert attrgetter(key)(compose(program, [f"{key}=~/a,b/x.png"])) == "/home/${us}/a,b/x.png"


def test_sweep_goes_below_the_home_directory_too(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Path(new_sweep_dir("~/runs")).parent == tmp_path / "runs"


def test_home_of_nobody_is_refused_and_a_file_of_that_name_taken(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="'~nobody_here' is not a home directory"):
        compose("train", ["runs_dir=~nobody_here/runs"])
    Path("~nobody_here").write_text("text")
    assert compose("train", ["data.corpus=~nobody_here"]).data.corpus == "~nobody_here"


@pytest.mark.parametrize("program", ROOTS)
def test_text_in_the_place_of_a_path_is_refused_in_one_short_line(program):
    text = "To be, or not to be:\nthat is the question.\n" * 100
    for key in PATH_KEYS:
        if key in known_keys(program):
            with pytest.raises(UserError, match=f"^{key} is a text of 4,300 characters .*, but must be ") as refusal:
                compose(program, [f"{key}={text}"])
            assert len(str(refusal.value)) < 200


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="another user must be given up to")
def test_path_below_a_directory_that_is_not_permitted_is_refused(tmp_path):
    tmp_path.chmod(0)
    os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="checkpoint is .*: Permission denied"):
            compose("sample", [f"checkpoint={tmp_path}/x/best.ckpt"])
    finally:
        os.seteuid(0)
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("words", "meant"), [("true TRUE True yes on 1", "true"), ("false FALSE False no off 0", None)]
)
def test_resume_takes_yes_and_no_in_any_words(words, meant):
    for word in words.split():
        assert resolve_path("resume", word) == meant
    assert resolve_path("resume", "./1") == "./1"


# Sweeps over texts


@pytest.mark.parametrize(
    ("value", "files"),
    [
        ("a.txt,b.txt", "'a.txt','b.txt'"),
        ("a.txt, b.txt", "'a.txt','b.txt'"),
        ('"a,b.txt",c.txt', "'a,b.txt','c.txt'"),
        ("null,a.txt", "null,'a.txt'"),
        ("here,too.txt", "'here,too.txt'"),
        ("one.txt", "'one.txt'"),
    ],
)
def test_commas_separate_texts_in_a_sweep_alone(monkeypatch, tmp_path, value, files):
    monkeypatch.chdir(tmp_path)
    Path("here,too.txt").write_text("text")
    for key in ("data.corpus", "++data.corpus", "init_from"):
        assert quote_literal(f"{key}={value}", "train", is_sweep=True) == f"{key.lstrip('+')}={files}"
    assert compose("train", [f"data.corpus={value}"]).data.corpus == value


def test_sweep_over_two_texts_is_two_runs(train_here, tmp_path):
    for name in "ab":
        write_text(tmp_path / f"{name}.txt", 60 + ord(name))
    texts = f"data.corpus={tmp_path}/a.txt,{tmp_path}/b.txt"
    finished = train_here("-m", texts, "trainer.max_steps=1", "num_validations=1")
    assert finished.returncode == 0, finished
    configs = [OmegaConf.load(path) for path in sorted((tmp_path / "runs").glob("*/*/config.yaml"))]
    assert [config.data.corpus for config in configs] == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]


# What Hydra shows


@pytest.mark.parametrize(
    "flags", ["--cfg all --resolve", "--cfg job --resolve", "--cfg hydra", "-c all --resolve -p model"]
)
def test_config_that_is_only_shown_makes_no_directory(monkeypatch, tmp_path, capfd, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    with suppress(SystemExit):
        run(lambda config: pytest.fail("it ran"), "train")
    GlobalHydra.instance().clear()
    out, err = capfd.readouterr()
    assert err == "" and out and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", GROUPS)
def test_choices_of_a_group_are_its_files(group):
    register()
    with initialize_config_dir(str(PROJECT / "configs"), version_base="1.3"):
        options = GlobalHydra.instance().config_loader().get_group_options(group)
    assert options == sorted(path.stem for path in (PROJECT / "configs" / group).glob("*.yaml"))


# Misspelt keys


@pytest.mark.parametrize(
    ("script", "argument", "nearest"),
    [
        ("train", "sede=1", "seed"),
        ("train", "num_validation=3", "num_validations"),
        ("train", "+sead=1", "seed"),
        ("train", "modle=llama", "model"),
        ("train", "model.num_hedas=2", "model.num_heads"),
        ("train", "+model.num_hedas=2", "num_heads"),
        ("train", "data.batchsize=8", "data.batch_size"),
        ("train", "tokenizer.vocabsize=400", "tokenizer.vocab_size"),
        ("train", "optimizer.learning_rate=1", "optimizer.lr"),
        ("train", "~model.num_hedas", "model.num_heads"),
        ("train", "trainer.max_step=5", "trainer.max_steps"),
        ("train", "+trainer.max_step=5", "trainer.max_steps"),
        ("train", "trainer.acumulate_grad_batches=2", "trainer.accumulate_grad_batches"),
        ("sample", "promt=x", "prompt"),
        ("sample", "temprature=0", "temperature"),
        ("sample", "topk=5", "top_k"),
    ],
)
def test_misspelt_key_is_named_with_the_nearest_right_one(refuse, script, argument, nearest):
    error = refuse(script, argument)
    key = argument.lstrip("+~").partition("=")[0]
    assert key.rpartition(".")[2] in error
    assert nearest in error


@pytest.mark.parametrize(
    ("program", "meant"),
    [
        (
            "train",
            {
                "optimizer.lr": "lr learning_rate max_lr model.lr",
                "optimizer.warmup_fraction": "warmup_iters warmup_steps",
                "trainer.max_steps": "max_steps max_iters steps",
                "trainer.max_epochs": "max_epochs epochs",
                "trainer.gradient_clip_val": "grad_clip gradient_clip_val",
                "trainer.accumulate_grad_batches": "gradient_accumulation_steps",
                "trainer.precision": "precision dtype",
                "model.num_heads": "n_head num_heads heads model.n_head num_attention_heads",
                "model.num_layers": "n_layer num_layers depth",
                "model.d_model": "n_embd hidden_size d_model",
                "model.context_length": "block_size seq_len context_length model.block_size",
                "model.dropout": "dropout",
                "data.batch_size": "batch_size device_batch_size trainer.batch_size",
                "data.corpus": "corpus dataset",
                "tokenizer.vocab_size": "vocab_size",
                "runs_dir": "out_dir",
            },
        ),
        ("sample", {"prompt": "start", "max_new_tokens": "max_tokens", "checkpoint": "ckpt", "top_k": "top_K"}),
    ],
)
def test_name_from_another_project_or_without_its_group_is_answered_with_our_key(program, meant):
    for key, names in meant.items():
        for name in names.split():
            with pytest.raises(UserError, match=rf"^{name} is an unknown key\. Did you mean {key}\?$"):
                compose(program, [f"{name}=1"])


def test_every_synonym_leads_to_a_key():
    keys = {key for program in ROOTS for key in known_keys(program)} | {f"trainer.{name}" for name in SUPPORTED_OPTIONS}
    assert set(SYNONYMS.values()) <= keys
    assert not set(SYNONYMS) & {key.rpartition(".")[2] for key in known_keys("train")}  # these would never be reached


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Callable[[str], list[str]]:
    """recipe(text) is the setting that chooses a recipe with this text."""
    copy = tmp_path / "configs"
    shutil.copytree(PROJECT / "configs", copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for module in (configs.compose, configs.defaults, configs.error_lines):
        monkeypatch.setattr(module, "CONFIG_DIR", copy)

    def written(text: str) -> list[str]:
        (copy / "experiment" / "mine.yaml").write_text(text, encoding="utf-8")
        return ["experiment=mine"]

    return written


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {num_layers: 3}", "mine.yaml is not a recipe yet. Make this its first line: # @package _global_"),
        ("", "mine.yaml is not a recipe yet. Make this its first line: # @package _global_"),
        ("# @package _global_\nlr: 1e-3", "mine.yaml: lr is an unknown key. Did you mean optimizer.lr?"),
        ("# @package _global_\nmodel: {n_layer: 3}", "model.n_layer is an unknown key. Did you mean model.num_layers?"),
        ("# @package _global_\nmodel: {num_layers: many}", "mine.yaml: model.num_layers: Value 'many' of type 'str' "),
        ("# @package _global_\ndefaults: [model: llama]", "must say override /model: llama"),
    ],
)
def test_mistake_in_a_recipe_is_named_with_its_file_and_what_to_write(recipe, text, said):
    chosen = recipe(text)
    with pytest.raises(UserError) as refusal:
        compose("train", chosen)
    assert str(refusal.value).startswith("configs/experiment/mine.yaml") and said in str(refusal.value)


def test_recipe_with_its_first_line_works(recipe):
    assert compose("train", recipe("# @package _global_\nmodel: {num_layers: 3}")).model.num_layers == 3


@pytest.mark.parametrize("argument", ["zzzzqqq=1", "model.zzzzqqq=1"])
def test_key_near_to_nothing_is_answered_with_where_to_look(refuse, argument):
    error = refuse("train", argument)
    assert "zzzzqqq is an unknown key" in error and "train.yaml" in error


def test_key_of_a_sweeper_that_is_not_chosen_is_answered_with_the_choice(refuse):
    error = refuse("train", "-m", "model.num_heads=1,2", "hydra.sweeper.n_trials=3")
    assert "hydra.sweeper.n_trials" in error and "add hydra/sweeper=optuna" in error


# Values that cannot work

NOWHERE = "data.corpus=there/is/no/such/text.txt"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model.num_heads=3"], ["d_model 128", "num_heads 3", "1, 2, 4, 8, 16, 32, 64, or another"]),
        (["model.d_model=96", "model.num_heads=5"], ["d_model 96", "num_heads 5", "1, 2, 3, 4, 6, 8, 12, 16"]),
        (["model.num_kv_heads=3"], ["num_heads 4", "num_kv_heads 3", "1, 2, 4"]),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_any_text_is_read(refuse, arguments, said):
    error = refuse("train", NOWHERE, *arguments)
    assert [part for part in said if part not in error] == []
    assert "there/is/no" not in error


@pytest.mark.parametrize(
    ("choice", "own"),
    [
        (["tokenizer=byte"], "tokenizer=byte has 256 tokens"),
        (["tokenizer=tiktoken"], "tokenizer=tiktoken has a vocabulary of its own"),
        (["-m", "seed=0,1", "tokenizer=byte"], "tokenizer=byte has 256 tokens"),
    ],
)
def test_size_of_a_vocabulary_that_has_its_own_is_refused_also_in_a_sweep(refuse, choice, own):
    error = refuse("train", *choice, "tokenizer.vocab_size=512")
    assert f"tokenizer.vocab_size is 512, but {own}. Leave it out, or use tokenizer=bpe alone." in error


@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize(("d_model", "heads"), [(128, 3), (96, 5), (10, 4), (18, 4)])
def test_heads_that_are_offered_work(positions, d_model, heads):
    with pytest.raises(UserError, match="Use model.num_heads from") as refusal:
        GPTConfig(vocab_size=1, d_model=d_model, num_heads=heads, positions=positions)
    offered = re.search(r"from ([\d, ]+), or", str(refusal.value))[1].split(", ")
    for each in offered:
        GPTConfig(vocab_size=1, d_model=d_model, num_heads=int(each), positions=positions)


def test_odd_width_that_cannot_be_rotated_is_said_to_be_odd(refuse):
    assert "even model.d_model, but it is 9" in refuse("train", "model.d_model=9")


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("tokenizer.vocab_size=300", ["tokenizer.vocab_size is 300", "tokenizer=byte has 256"]),
        ("model.num_heads=many", ["model.num_heads=many", "Integer"]),
        ("model.bias=perhaps", ["model.bias=perhaps", "bool"]),
        ("model.dropout=[1]", ["model.dropout"]),
        ("model.positions=up", ["'up'", "learned, rope"]),
        ("model.context_length=0", ["model.context_length is 0", "at least 1"]),
        ("model.bigram_table_size=0", ["model.bigram_table_size is 0", "at least 1"]),
        ("model.bigram_table_size=some", ["model.bigram_table_size=some", "Integer"]),
        ("optimizer.embedding_lr=0", ["optimizer.embedding_lr is 0", "above 0"]),
        ("optimizer.embedding_lr=fast", ["optimizer.embedding_lr=fast", "Float"]),
        ("optimizer.lr=fast", ["optimizer.lr=fast", "Float"]),
        ("optimizer.lr=-1", ["optimizer.lr is -1", "above 0"]),
        ("optimizer.name=nonsense", ["nonsense", "adamw, muon"]),
        ("data.val_fraction=1", ["data.val_fraction is 1", "between 0 and 1"]),
        ("data.batch_size=0", ["data.batch_size is 0", "at least 1"]),
        ("tokenizer.kind=nonsense", ["nonsense", "bpe, byte, tiktoken"]),
        ("seed=lucky", ["seed=lucky", "Integer"]),
        ("compile=often", ["'often'", "auto, true or false"]),
        ("num_validations=0", ["num_validations is 0", "at least 1"]),
        ("trainer.max_time=soon", ["'soon'", "5m"]),
        ("trainer.max_time=1.2.3s", ["'1.2.3s'", "5m"]),
        ("trainer.max_steps=0", ["trainer.max_steps is 0", "at least 1"]),
        ("trainer.max_steps=ten", ["'ten'", "at least 1"]),
        ("trainer.log_every_n_steps=0", ["trainer.log_every_n_steps is 0"]),
        ("trainer.precision=17", ["17"]),
        ("trainer.accelerator=abacus", ["abacus"]),
        ("trainer.devices=none", ["devices"]),
        ("trainer.limit_val_batches=0", ["trainer.limit_val_batches is 0"]),
        ("trainer.check_val_every_n_epoch=2", ["trainer.check_val_every_n_epoch", "num_validations=5"]),
        ("trainer.fast_dev_run=true", ["trainer.fast_dev_run", "trainer.max_steps=1"]),
        ("trainer.logger=false", ["trainer.logger"]),
        ("seed=-1", ["seed is -1", "from 0 to"]),
        ("seed=4294967296", ["seed is 4294967296", "from 0 to"]),
        ("model=null", ["model=null", "gpt2, llama, nanochat, tiny"]),
        ("trainer=null", ["trainer=null", "default"]),
    ],
)
def test_wrong_value_is_refused_with_what_would_work(refuse, text_file, argument, said):
    error = refuse("train", f"data.corpus={text_file}", "tokenizer=byte", "trainer.max_steps=1", argument)
    assert [part for part in said if part not in error] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tokenizer.vocab_size=100"], ["tokenizer.vocab_size is 100", "257"]),
        (["trainer.max_time=null"], ["nothing ends this run", "trainer.max_steps"]),
        (["-m", "model.num_heads=3", "seed=0,1"], ["d_model 128", "num_heads 3"]),
    ],
)
def test_wrong_value_among_defaults_is_refused_with_what_would_work(refuse, arguments, said):
    error = refuse("train", *arguments)
    assert [part for part in said if part not in error] == []


@pytest.mark.parametrize("value", ["0", "-2", "0.5", "false", "many"])
def test_accumulation_that_would_train_nothing_is_refused(refuse, text_file, value):
    error = refuse("train", f"data.corpus={text_file}", f"trainer.accumulate_grad_batches={value}")
    assert "trainer.accumulate_grad_batches is" in error and "at least 1" in error


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("num_samples=0", ["num_samples is 0", "at least 1"]),
        ("temperature=-1", ["temperature is -1", "0 (greedy)"]),
        ("temperature=nan", ["temperature is nan"]),
        ("top_k=-1", ["top_k is -1", "0 (off)"]),
        ("top_p=0", ["top_p is 0", "at most 1"]),
        ("top_p=2", ["top_p is 2", "at most 1"]),
        ("max_new_tokens=0", ["max_new_tokens is 0"]),
        ("max_new_tokens=some", ["max_new_tokens=some", "Integer"]),
        ("device=quantum", ["'quantum'", "cpu"]),
        ("checkpoint=there/is/none.ckpt", ["there/is/none.ckpt", "train.py"]),
        ("prompt_file=there/is/none.txt", ["there/is/none.txt", "No such file"]),
    ],
)
def test_wrong_value_of_a_sample_is_refused_with_what_would_work(refuse, argument, said):
    error = refuse("sample", argument)
    assert [part for part in said if part not in error] == []


@pytest.mark.parametrize(
    ("argument", "choices"),
    [
        ("model=gpt5", ["gpt2", "llama", "nanochat", "tiny"]),
        ("optimizer=nonsense", ["adamw", "muon"]),
        ("tokenizer=nonsense", ["byte", "bpe", "tiktoken"]),
        ("data=wikipedia", ["shakespeare"]),
        ("experiment=nothing", ["context_sweep", "heads_sweep", "nanogpt_cpu"]),
        ("+experiment=nothing", ["context_sweep", "heads_sweep", "nanogpt_cpu"]),
    ],
)
def test_unknown_choice_of_a_group_lists_the_choices(refuse, argument, choices):
    error = refuse("train", argument)
    assert argument.lstrip("+") in error and "schema" not in error
    assert [choice for choice in choices if choice not in error] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fast"], ["'fast'", "key=value"]),
        (["--steps", "5"], ["--steps", "key=value"]),
        (["--model.num_heads=8"], ["--model.num_heads=8", "key=value"]),
        (["model.num_heads=2,4"], ["model.num_heads", "-m"]),
        (["model.num_heads=[2"], ["model.num_heads"]),
        ([NOWHERE], ["there/is/no/such/text.txt", "does not exist"]),
    ],
)
def test_what_is_no_setting_at_all_is_refused_too(refuse, arguments, said):
    error = refuse("train", *arguments)
    assert [part for part in said if part not in error] == []


@pytest.mark.parametrize("program", ROOTS)
@pytest.mark.parametrize("argument", ["hello", "--help", "--prompt=hello", "=5"])
def test_what_is_no_setting_is_answered_with_one_that_the_program_has(program, argument):
    with pytest.raises(UserError) as refusal:
        compose(program, [argument])
    example, file = re.search(r"for example (\S+); (\S+) lists the keys", str(refusal.value)).groups()
    compose(program, [example])
    assert re.search(rf"\b{example.partition('=')[0]}\b", (PROJECT / file).read_text())


@pytest.mark.parametrize(
    ("program", "argument"),
    [
        ("lessons", "lengths=512"),
        ("lessons", "lengths=512,1024"),
        ("context_cost", "lengths=512"),
        ("attention_speed", "++lengths=512"),
        ("quality", "budgets=30s"),
    ],
)
def test_value_of_a_list_key_is_answered_with_the_list(program, argument):
    key, _, value = argument.lstrip("+").partition("=")
    with pytest.raises(UserError) as refusal:
        compose(program, [argument])
    assert str(refusal.value) == f"{key} is {value}, but must be a list: {key}=[{value}]"
    assert [str(each) for each in getattr(compose(program, [f"{key}=[{value}]"]), key)] == value.split(",")


@pytest.mark.parametrize(
    ("argument", "said"),
    [("seeds=0", "at least 1"), ("seeds=x", "seeds=x"), ("seed=3", "seeds"), ("corpas=x", "corpus")],
)
def test_bad_setting_of_the_quality_benchmark_is_refused_before_it_trains(argument, said):
    with pytest.raises(UserError, match=said):
        quality.main(compose("quality", [argument]))


@pytest.mark.parametrize("script", ["train.py", "sample.py"])
def test_refusal_of_a_real_process_is_one_line_and_exit_code_2(call, tmp_path, script):
    finished = call(script, "modle=1", cwd=tmp_path)
    assert "modle is an unknown key" in finished.error and finished.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_that_a_library_turned_into_another_error_is_still_ctrl_c():
    try:
        try:
            raise KeyboardInterrupt
        finally:  # what OmegaConf comes to, one time in thirty that Ctrl-C meets it
            None._invalidate_flags_cache()
    except AttributeError as error:
        with pytest.raises(KeyboardInterrupt):
            format_hydra_error(error, "train")


def test_ctrl_c_while_a_library_answers_an_error_of_its_own_is_still_ctrl_c():
    try:
        try:
            raise ValueError
        except ValueError:
            try:
                raise KeyboardInterrupt
            finally:
                None._invalidate_flags_cache()
    except AttributeError as error:
        with pytest.raises(KeyboardInterrupt):
            format_hydra_error(error, "train")


def test_refusal_comes_before_the_slow_imports(call, tmp_path):
    env = {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "lightning.py").write_text("raise ImportError('too early')")
    error = call("train.py", "model.num_heads=3", env=env, cwd=tmp_path).error
    assert "num_heads 3" in error


def test_runs_dir_that_is_a_file_is_refused(refuse, text_file):
    error = refuse("train", f"runs_dir={text_file}", f"data.corpus={text_file}", "tokenizer=byte")
    assert str(text_file) in error and "runs_dir" in error


# Run directories


def test_runs_started_in_the_same_second_get_directories_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: make_new_dir(tmp_path / "runs", "now"), range(50)))
    assert len(set(paths)) == 50 and all(path.is_dir() for path in paths)


MAKE_ONE = """
import sys, time
from operator import attrgetter
from pathlib import Path
from configs.cli import run
from training.run_dir import new_run_dir
go = Path(sys.argv.pop(1))
def task(config):
    go.with_name(f"ready{time.monotonic_ns()}").touch()
    while not go.exists():
        time.sleep(0.001)
    print(new_run_dir(config))
run(task, "train")
"""


def test_processes_started_in_the_same_second_get_directories_of_their_own(clean_environment, tmp_path):
    go = tmp_path / "go"
    command = [sys.executable, "-c", MAKE_ONE, str(go), f"runs_dir={tmp_path / 'runs'}"]
    processes = [
        subprocess.Popen(command, cwd=PROJECT, env=clean_environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready*"))) < len(processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    go.touch()
    paths = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert Counter(paths).most_common(1)[0][1] == 1, paths
    assert sorted(paths) == sorted(str(path) for path in (tmp_path / "runs").iterdir())


def test_relative_paths_mean_the_same_in_every_job_of_a_sweep(train_here, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    os.link(text_file, "texts/words.txt")
    relative = (
        "data.corpus=texts/words.txt",
        "data.cache_dir=cache",
        "runs_dir=my_runs",
        "tokenizer=byte",
        "tokenizer.vocab_size=null",
    )
    finished = train_here("-m", *relative, "trainer.max_steps=1", "seed=1,2")
    assert finished.returncode == 0, finished
    (sweep,) = (tmp_path / "my_runs").iterdir()
    assert len(list(sweep.glob("*/summary.json"))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "my_runs", "texts"]


# Anything at all

KEYS = ("seed", "model", "model.num_heads", "data.corpus", "trainer.max_time", "budget", "experiment", "hydra.mode")
pieces = st.text("abnul=0159.,:;+-~*@$#{}[]()<>|&!?'\"\\/ \t\n\0é漢") | st.sampled_from(
    ["null", "true", "nan", "1e999", "???", "${seed}", "${oc.env:HOME}", "${div:1,0}", "${", "[1,2]", "{a: 1}", "@x"]
)
settings_like = st.one_of(
    pieces,
    st.builds("{}{}={}".format, st.sampled_from(["", "+", "++", "~"]), st.sampled_from(KEYS) | pieces, pieces),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(settings_like, min_size=1, max_size=3))
@example(["=5"])
@example(["model=5"])
@example(["seed=${div:1,0}"])
@example(["--experimental-rerun=x"])
@example(["--config-d=/"])  # argparse takes beginnings of a flag for the flag
@example(["--info=everything"])
@example(["hydra.sweeper=5"])
def test_no_settings_at_all_get_a_librarys_traceback(monkeypatch, capsys, tmp_path, arguments):
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    try:
        run(lambda config: None, "train")
    except SystemExit as end:
        assert end.code in (0, 2)
    except Exception as error:
        raise AssertionError(f"{arguments} got through to {type(error).__name__}: {error}") from error
    finally:
        GlobalHydra.instance().clear()
    errors = capsys.readouterr().err
    assert errors == "" or (errors.startswith("error: ") and errors.count("\n") == 1), errors
