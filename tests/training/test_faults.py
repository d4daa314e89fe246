"""What laptops and clusters do to a run, done to one: signals, kills, full disks, damage, too little memory.

Each fault happens to a real process, or in this one where the fault is in the numbers; afterwards the run goes on.
"""

import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch

import train
from checkpoint.checkpoint import load_checkpoint
from checkpoint.io import FOOTER_BYTES, read_checkpoint, write_checkpoint
from system.errors import UserError
from system.process import script_command
from tests.conftest import FOREGROUND, PROJECT
from training.callbacks.checkpoints import LastCheckpoint
from training.callbacks.graceful_stop import GracefulStop
from training.error_context import cannot_write
from training.lightning_module import GPTLightning


def wait_for(process, pattern):
    """Reads the process's lines up to the one that begins so."""
    for line in process.stdout:
        if re.match(pattern, line):
            return
    raise AssertionError((process.wait(), process.stderr.read()))


def run_in(runs):
    (run_dir,) = (path for path in runs.iterdir() if path.is_dir())
    return run_dir


def assert_goes_on(train_here, run_dir, *overrides):
    """The run is resumed to its end."""
    resumed = train_here(f"resume={run_dir}", *overrides, settings=())
    assert resumed.returncode == 0 and resumed.stderr == "", resumed
    assert not list(run_dir.rglob("*.tmp")) and (run_dir / "summary.json").is_file()
    return resumed


def assert_curves_grow(events, run_dir):
    log = events(run_dir)
    for kind, read in (("scalars", log.Scalars), ("images", log.Images), ("tensors", log.Tensors)):
        for tag in log.Tags()[kind]:
            steps = [event.step for event in read(tag)]
            assert steps == sorted(set(steps)), tag


# Signals


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.soak] * (n == signal.SIGHUP)) for n in GracefulStop.SIGNALS]
)
def test_signal_saves_the_last_step_and_says_how_to_go_on(start, train_here, tiny, tmp_path, number, events):
    settings = ("trainer.max_steps=100000", "trainer.val_check_interval=25", f"runs_dir={tmp_path}")
    process = start("train.py", *tiny, *settings)
    try:
        wait_for(process, b"step 50:")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number and err == b"", err
    run_dir = run_in(tmp_path)
    step = load_checkpoint(run_dir / "checkpoints/last.ckpt").step
    (line,) = out.decode().strip().splitlines()[-1:]
    assert step >= 50 and f"stopped at step {step:,}; saved; resume with: " in line
    assert line.endswith(f" train.py resume={run_dir}")
    finished = assert_goes_on(train_here, run_dir, f"trainer.max_steps={step + 10}")
    assert f"at step {step:,}; changed: trainer.max_steps 100000 -> {step + 10}" in finished.stdout
    assert_curves_grow(events, run_dir)


def test_second_ctrl_c_stops_at_once(start, train_here, tiny, tmp_path):
    # A step of all 5,600 batches of the text: the first signal would wait for its end.
    text = tmp_path / "text.txt"
    text.write_bytes((PROJECT / "data/shakespeare.txt").read_bytes()[:400_000])
    settings = (
        "trainer.accumulate_grad_batches=20000",
        "trainer.max_steps=9",
        "tokenizer=byte",
        "tokenizer.vocab_size=null",
        f"data.corpus={text}",
    )
    process = start("train.py", *tiny, *settings, f"runs_dir={tmp_path}")
    try:
        wait_for(process, b"a uniform guess")
        time.sleep(3)  # the first step has begun
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=15)
    finally:
        process.kill()
    assert process.returncode == 130 and err == b"", err
    assert "stopped at step 0; nothing was saved yet; resume with:" in out.decode()
    assert_goes_on(train_here, run_in(tmp_path), "trainer.accumulate_grad_batches=1", "trainer.max_steps=3")


def test_ctrl_c_before_training_is_130_and_no_traceback(start, tiny, tmp_path):
    process = start("train.py", *tiny, "trainer.max_steps=5", f"runs_dir={tmp_path}", fresh=True)
    try:
        time.sleep(1.0)  # it imports
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and b"Traceback" not in err, err


def programs():
    """What starts each program of the project, in Python's arguments."""
    modules = [
        f"benchmarks.{path.stem}" for path in PROJECT.glob("benchmarks/*.py") if "__main__" in path.read_text("utf-8")
    ]
    return [
        ["train.py"],
        ["sample.py"],
        *(["-m", name] for name in ("analysis.inspect_attention", "analysis.lessons", *modules)),
    ]


@pytest.mark.parametrize("program", programs(), ids=lambda program: program[-1])
def test_ctrl_c_from_the_first_import_on_is_130_and_no_traceback(clean_environment, tmp_path, program):
    for module in ("json", "statistics", "unicodedata", "torch"):  # each program imports one of them, most at once
        (tmp_path / f"{module}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nprint('goes on')")
    env = clean_environment | {"PYTHONPATH": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, *program], cwd=PROJECT, env=env, capture_output=True, timeout=60, **FOREGROUND
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (130, b"\n", b"")


def test_ctrl_c_in_a_benchmark_is_130_and_no_traceback(clean_environment):
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "benchmarks.startup"],
        cwd=PROJECT,
        env=clean_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **FOREGROUND,
    )
    try:
        wait_for(process, b"round")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, b"\n", b"")


def test_reader_that_goes_away_does_not_end_the_run(start, tiny, tmp_path):
    process = start("train.py", *tiny, "trainer.max_steps=30", f"runs_dir={tmp_path}")
    wait_for(process, b"a uniform guess")
    process.stdout.close()
    assert process.wait(timeout=60) == 0 and b"Traceback" not in process.stderr.read()
    run_dir = run_in(tmp_path)
    assert (run_dir / "summary.json").is_file() and "best checkpoint" in (run_dir / "train.log").read_text()


# Kills

KILLED_AT = """
import hashlib, os, signal
met = []
def killing(module, name, concerns):
    function = getattr(module, name)
    def killed(*args):
        meant = concerns(*args)
        met.append(1) if meant else None
        if meant and len(met) == {number} and not {after}:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args)
        if meant and len(met) == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(module, name, killed)
killing({where})
"""
BODY_WRITTEN = "hashlib, 'sha256', lambda *data: bool(data) and len(data[0]) > 4_000_000"  # last.ckpt has 6.7 MB
SEALED = "os, 'fsync', lambda file: os.readlink(f'/proc/self/fd/{file}').endswith('last.tmp')"
OUT_OF_THE_WAY = "os, 'replace', lambda old, new: str(new).endswith('previous.ckpt')"
IN_PLACE = "os, 'replace', lambda old, new: str(new).endswith('last.ckpt')"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("where", "number", "after", "left"),
    [
        pytest.param(BODY_WRITTEN, 1, False, {"last.tmp"}, marks=pytest.mark.soak),
        (BODY_WRITTEN, 2, False, {"last.tmp", "last.ckpt"}),
        pytest.param(SEALED, 2, False, {"last.tmp", "last.ckpt"}, marks=pytest.mark.soak),
        (OUT_OF_THE_WAY, 1, True, {"last.tmp", "previous.ckpt"}),
        pytest.param(IN_PLACE, 2, True, {"last.ckpt", "previous.ckpt"}, marks=pytest.mark.soak),
    ],
    ids=["first, half written", "half written", "not on the disk yet", "between two names", "just in place"],
)
def test_kill_while_a_checkpoint_is_written_leaves_one_that_is_whole(
    call, train_here, tiny, tmp_path, events, where, number, after, left
):
    (tmp_path / "sitecustomize.py").write_text(KILLED_AT.format(number=number, after=after, where=where))
    settings = ("trainer.max_steps=12", "num_validations=4")
    runs = tmp_path / "killed"
    killed = call("train.py", *tiny, *settings, f"runs_dir={runs}", env={"PYTHONPATH": str(tmp_path)})
    assert killed.returncode == -signal.SIGKILL, killed
    run_dir = run_in(runs)
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == left | {"best.ckpt"}
    assert train_here(f"resume={run_dir}", settings=()).returncode == 0
    whole = train_here(*settings)
    a, b = (read_checkpoint(path / "checkpoints/last.ckpt") for path in (run_dir, whole.path))
    assert all(torch.equal(a["state_dict"][weight], b["state_dict"][weight]) for weight in b["state_dict"])
    assert not list(run_dir.rglob("*.tmp"))
    assert_curves_grow(events, run_dir)
    for tag in ("Loss/train", "Loss/validation"):  # none missing either
        curves = [[(event.step, event.value) for event in events(path).Scalars(tag)] for path in (run_dir, whole.path)]
        assert curves[0] == curves[1], tag
    writing = [[event.step for event in events(path).Tensors("sample/text_summary")] for path in (run_dir, whole.path)]
    assert writing == [[3, 6, 9, 12]] * 2  # the last event before a checkpoint


def kill_at_random(start, run_dir_of, settings, seconds):
    """Starts, lets it train for so long, and kills it."""
    process = start("train.py", *settings)
    try:
        wait_for(process, b"a uniform guess")
        time.sleep(seconds)
    finally:
        process.kill()
        process.communicate()
    return run_dir_of()


def killed_again_and_again(start, train_here, tiny, tmp_path, events, times):
    settings = (*tiny, "trainer.max_steps=100000", "trainer.val_check_interval=8", f"runs_dir={tmp_path}")
    draw = random.Random(times)
    steps = []
    for number in range(times):
        place = (f"resume={run_in(tmp_path)}",) if number else settings
        run_dir = kill_at_random(start, lambda: run_in(tmp_path), place, draw.uniform(0.0, 1.5))
        last = [run_dir / "checkpoints" / name for name in ("last.ckpt", "previous.ckpt")]
        steps.append(max([read_checkpoint(path)["global_step"] for path in last if path.exists()], default=0))
    assert steps == sorted(steps) and steps[-1] > 0, steps  # nothing that was saved is lost
    assert_goes_on(train_here, run_dir, f"trainer.max_steps={steps[-1] + 5}")
    assert_curves_grow(events, run_dir)


def test_kill_at_random_moments_loses_nothing_that_was_saved(start, train_here, tiny, tmp_path, events):
    killed_again_and_again(start, train_here, tiny, tmp_path, events, times=2)


@pytest.mark.soak
def test_twenty_kills_lose_nothing_that_was_saved(start, train_here, tiny, tmp_path, events):
    killed_again_and_again(start, train_here, tiny, tmp_path, events, times=20)


# Disks


def may_mount():
    try:
        return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


needs_mount = pytest.mark.skipif(not may_mount(), reason="no right to mount here")


def on_small_disk(size, mounted, kept):
    """A prefix: the command runs with a disk of that size at `mounted`, whose content is `kept` afterwards."""
    script = (
        'mount -t tmpfs -o size=$0 none "$1" || exit 99; m=$1; k=$2; shift 2; "$@"; c=$?; cp -r "$m"/. "$k"; exit $c'
    )
    mounted.mkdir(), kept.mkdir()
    return ("unshare", "-rm", "sh", "-c", script, size, str(mounted), str(kept))


@needs_mount
@pytest.mark.parametrize(("size", "named"), [("12m", "last.ckpt"), ("90k", "")], ids=["checkpoint", "log"])
def test_full_disk_is_named_and_the_checkpoint_before_stays_whole(call, train_here, tiny, tmp_path, size, named):
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    settings = ("trainer.max_steps=40", "trainer.val_check_interval=4", f"runs_dir={disk}")
    finished = call("train.py", *tiny, *settings, prefix=on_small_disk(size, disk, kept))
    assert "No space left on device" in finished.error and str(disk) in finished.error and named in finished.error
    assert "Make room" in finished.error and f"train.py resume={disk}" in finished.error
    run_dir = run_in(kept)
    if named:
        assert load_checkpoint(run_dir / "checkpoints/last.ckpt").step == 4
    assert_goes_on(train_here, run_dir, "trainer.max_steps=9")


def limited(kind, amount):
    """A prefix: the command runs with that limit of the system's."""
    script = f"import os, resource, sys; resource.setrlimit(resource.{kind}, ({amount}, {amount})); "
    return (sys.executable, "-c", script + "os.execv(sys.argv[1], sys.argv[1:])")


@pytest.mark.skipif(os.name != "posix", reason="limits are POSIX's")
def test_file_larger_than_allowed_is_named(call, train_here, tiny, tmp_path):
    settings = ("trainer.max_steps=8", "num_validations=2", f"runs_dir={tmp_path}")
    finished = call("train.py", *tiny, *settings, prefix=limited("RLIMIT_FSIZE", 4 << 20))
    assert "last.ckpt: File too large" in finished.error
    assert_goes_on(train_here, run_in(tmp_path))


MADE_READ_ONLY = """
"$@" & child=$!
while ! ls "$0"/*/checkpoints/last.ckpt 2>/dev/null; do sleep 0.05; kill -0 $child || exit 98; done >&2
for d in "$0"/*/checkpoints; do mount --bind "$d" "$d" && mount -o remount,ro,bind "$d"; done
wait $child
"""


@needs_mount
def test_directory_that_becomes_read_only_is_named_and_what_was_saved_stays(call, train_here, tiny, tmp_path):
    settings = ("trainer.max_steps=100000", "trainer.val_check_interval=20", f"runs_dir={tmp_path}")
    prefix = ("unshare", "-rm", "sh", "-c", MADE_READ_ONLY, str(tmp_path))
    finished = call("train.py", *tiny, *settings, prefix=prefix)
    line = finished.stderr.strip().splitlines()[-1]
    assert finished.returncode == 2 and "Read-only file system" in line and "checkpoints/" in line, finished
    assert "Make it writable" in line and "Traceback" not in finished.stderr
    run_dir = run_in(tmp_path)
    step = load_checkpoint(run_dir / "checkpoints/last.ckpt").step
    assert_goes_on(train_here, run_dir, f"trainer.max_steps={step + 5}")


@needs_mount
def test_read_only_runs_dir_is_refused(call, tiny, tmp_path):
    script = 'mount -t tmpfs none "$0" && mount -o remount,ro "$0" && exec "$@"'
    prefix = ("unshare", "-rm", "sh", "-c", script, str(tmp_path))
    finished = call("train.py", *tiny, "trainer.max_steps=2", f"runs_dir={tmp_path}", prefix=prefix)
    assert str(tmp_path) in finished.error and "Read-only" in finished.error and "runs_dir" in finished.error


def test_unusable_runs_dir_of_a_sweep_is_named_in_one_sentence(refuse, tiny, tmp_path):
    file = tmp_path / "file"
    file.touch()
    error = refuse("train", "-m", *tiny, "seed=1,2", "trainer.max_steps=2", f"runs_dir={file}")
    assert error == f"error: cannot create a directory in {file}: Not a directory. Choose another runs_dir.\n"


def test_disk_full_before_training_advises_no_resume_of_what_is_gone(refuse, tiny, monkeypatch):
    def full(config, run_dir):
        raise OSError(28, "No space left on device", str(run_dir / "config.yaml"))

    monkeypatch.setattr(train, "save_config", full)
    error = refuse("train", *tiny, "trainer.max_steps=2")
    assert "config.yaml: No space left on device" in error and "Nothing was trained yet. Make room" in error
    assert "resume" not in error


def test_run_directory_deleted_in_training_is_said_to_be_gone(train_here, tiny, tmp_path, monkeypatch):
    save = LastCheckpoint.save

    def delete_then_save(self, trainer):
        shutil.rmtree(self.path.parents[1])
        save(self, trainer)

    monkeypatch.setattr(LastCheckpoint, "save", delete_then_save)
    error = train_here("trainer.max_steps=4", "num_validations=1").error
    assert "was deleted or moved during training" in error
    assert "resume" not in error and "b'" not in error


def test_file_named_in_bytes_is_shown_as_text(tmp_path):
    error = OSError(28, "No space left on device", str(tmp_path / "events").encode())  # TensorBoard's writer does so
    assert f"cannot write {tmp_path / 'events'}: No space" in cannot_write(error, tmp_path, None)


# Damage


@pytest.fixture
def small_checkpoint(tmp_path, tiny_run):
    path = tmp_path / "small.ckpt"
    content = read_checkpoint(tiny_run.path / "checkpoints/best.ckpt")
    weights = {name: tensor[:2].clone() for name, tensor in list(content["state_dict"].items())[:3]}
    write_checkpoint({"gpt": content["gpt"] | {"tokenizer": None}, "state_dict": weights}, path)
    return path


def test_no_flipped_bit_gets_through(small_checkpoint):
    data, whole = small_checkpoint.read_bytes(), read_checkpoint(small_checkpoint)
    draw = random.Random(0)
    seal = range(len(data) - FOOTER_BYTES, len(data))
    refused = 0
    for position in {*draw.sample(range(len(data)), 600), *seal}:
        damaged = bytearray(data)
        damaged[position] ^= 1 << draw.randrange(8)
        small_checkpoint.write_bytes(damaged)
        try:
            content = read_checkpoint(small_checkpoint)
        except UserError:
            refused += 1
        else:  # the seal's mark, not the content
            assert position in seal and content["gpt"] == whole["gpt"]
            assert all(
                torch.equal(content["state_dict"][name], whole["state_dict"][name]) for name in whole["state_dict"]
            )
    assert refused >= 600


def test_no_cut_gets_through(small_checkpoint):
    data, whole = small_checkpoint.read_bytes(), read_checkpoint(small_checkpoint)
    for length in [*range(0, len(data) - FOOTER_BYTES, 97), *range(len(data) - FOOTER_BYTES - 70, len(data))]:
        small_checkpoint.write_bytes(data[:length])
        if length == len(data) - FOOTER_BYTES:  # the seal gone as a whole: a file as torch.save writes it
            assert read_checkpoint(small_checkpoint)["gpt"] == whole["gpt"]
        else:
            with pytest.raises(UserError, match="damaged"):
                read_checkpoint(small_checkpoint)


@pytest.fixture
def stopped_run(start, tiny, tmp_path):
    """The directory of a run that was killed after its second last.ckpt."""
    process = start("train.py", *tiny, "trainer.max_steps=200", "num_validations=50", f"runs_dir={tmp_path / 'runs'}")
    try:
        wait_for(process, b"step 12:")
    finally:
        process.kill()
        process.communicate()
    return run_in(tmp_path / "runs")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def test_damaged_checkpoint_is_named_and_the_older_one_offered(train_here, stopped_run):
    last, previous = (stopped_run / "checkpoints" / name for name in ("last.ckpt", "previous.ckpt"))
    step = read_checkpoint(previous)["global_step"]
    flip(last)
    error = train_here(f"resume={stopped_run}", settings=()).error
    assert f"{last} is damaged" in error
    command = f"{script_command('train.py')} resume={previous}"
    assert f"previous.ckpt in the same directory, of step {step}, is not damaged: {command}" in error
    resumed = train_here(f"resume={previous}", "trainer.max_steps=20", settings=())
    assert resumed.returncode == 0 and f"at step {step}" in resumed.stdout, resumed
    assert load_checkpoint(last).step == 20


def test_damaged_checkpoint_without_an_older_one_offers_the_best_weights(train_here, stopped_run, tiny):
    last, best = (stopped_run / "checkpoints" / name for name in ("last.ckpt", "best.ckpt"))
    (stopped_run / "checkpoints/previous.ckpt").unlink()
    last.write_bytes(last.read_bytes()[:5000])
    error = train_here(f"resume={stopped_run}", settings=()).error
    assert "damaged" in error and f"{script_command('train.py')} init_from={best}" in error
    assert train_here(f"init_from={best}", "trainer.max_steps=2").returncode == 0


def test_damaged_best_is_named_and_replaced(train_here, stopped_run, sample_here):
    best = stopped_run / "checkpoints/best.ckpt"
    flip(best)
    assert f"{best} is damaged" in sample_here(f"checkpoint={best}").error
    resumed = train_here(f"resume={stopped_run}", "trainer.max_steps=20", settings=())
    assert resumed.returncode == 0 and f"{best} is damaged" in resumed.stdout
    assert load_checkpoint(best).step <= 20


def test_checkpoint_of_another_version_is_named(train_here, stopped_run, sample_here):
    last = stopped_run / "checkpoints/last.ckpt"
    content = read_checkpoint(last)
    content["gpt"]["format"] = 7
    write_checkpoint(content, last)
    for error in (train_here(f"resume={stopped_run}", settings=()).error, sample_here(f"checkpoint={last}").error):
        assert f"{last} has format 7" in error and "reads formats up to 3" in error


def test_checkpoint_of_another_network_is_named(train_here, stopped_run, tiny_run):
    other = train_here("model.num_layers=1", "trainer.max_steps=2")
    shutil.copy(other.path / "checkpoints/last.ckpt", stopped_run / "checkpoints/last.ckpt")
    error = train_here(f"resume={stopped_run}", settings=()).error
    assert "is of another network: model.num_layers is 2, in the checkpoint 1" in error
    assert (stopped_run / "checkpoints/previous.ckpt").is_file()


# Clocks


def test_clock_that_goes_backwards_changes_nothing(train_here, tiny, monkeypatch, clock, events):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - (7200 if clock.now > 8 else 0))  # two hours back, in the run
    finished = train_here("budget=16s", "num_validations=3", settings=tuple(s for s in tiny if "vocab" not in s))
    assert finished.returncode == 0, finished
    assert 15 < finished.summary["seconds"] < 17
    monkeypatch.setattr(time, "time", lambda: real() - 86400)  # a day before its beginning
    extended = train_here(f"resume={finished.dir}", "budget=18s", settings=())
    assert extended.returncode == 0 and "budget 16s -> 18s" in extended.stdout, extended
    assert_curves_grow(events, finished.path)
    files = sorted(path.name for path in finished.path.glob("events*"))
    assert len(files) == 2


# Numbers


def poisoned(monkeypatch, step, value, name):
    """From now on one number in the gradient of that weight is `value` at that step."""

    def spoilt(self, optimizer):
        if self.global_step == step:
            self.network.get_parameter(name).grad[3, 4] = value

    monkeypatch.setattr(GPTLightning, "on_before_optimizer_step", spoilt)


@pytest.mark.parametrize(
    ("value", "settings", "step"),
    [
        pytest.param(math.nan, (), 6, id="nan"),
        pytest.param(math.inf, ("optimizer=adamw",), 7, id="inf before a validation"),
        pytest.param(math.inf, ("trainer.gradient_clip_val=1.0",), 6, id="inf that is clipped"),
    ],
)
def test_non_finite_gradient_stops_the_run_and_names_step_and_weight(train_here, monkeypatch, value, settings, step):
    with monkeypatch.context() as patch:
        poisoned(patch, step, value, "blocks.0.mlp.up.weight")
        finished = train_here("trainer.max_steps=20", *settings)  # validates every 4 steps
    assert f"is not finite at step {step}," in finished.error and "gradient of blocks.0." in finished.error
    for name in ("best.ckpt", "last.ckpt"):
        checkpoint = load_checkpoint(finished.path / "checkpoints" / name)
        assert checkpoint.step == 4
        assert all(weight.isfinite().all() for weight in checkpoint.network.parameters())
    assert train_here(f"resume={finished.dir}", settings=()).returncode == 0


def test_non_finite_gradient_of_a_token_that_does_not_come_again_is_in_no_checkpoint(train_here, monkeypatch):
    poisoned(monkeypatch, 6, math.nan, "token_embedding.weight")  # its fourth row: a byte that is not in the text
    error = (finished := train_here("trainer.max_steps=20", "optimizer=adamw")).error
    assert "gradient of token_embedding.weight is not finite at step 7 or before" in error
    for name in ("best.ckpt", "last.ckpt"):
        assert load_checkpoint(finished.path / "checkpoints" / name).step == 4


def test_signal_after_a_non_finite_gradient_saves_no_spoilt_weights(train_here, monkeypatch):
    with monkeypatch.context() as patch:
        poisoned(patch, 6, math.nan, "blocks.0.mlp.up.weight")
        step = GPTLightning.optimizer_step

        def interrupted(self, *args, **kwargs):
            if self.global_step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, *args, **kwargs)

        patch.setattr(GPTLightning, "optimizer_step", interrupted)
        finished = train_here("trainer.max_steps=20")
    assert "at step 6" in finished.error
    assert load_checkpoint(finished.path / "checkpoints/last.ckpt").step == 4


def test_non_finite_validation_loss_stops_the_run_before_its_checkpoint(train_here, monkeypatch):
    epoch_end = GPTLightning.on_validation_epoch_end

    def broken(self):
        self.val_sums[0] *= math.nan if self.global_step == 8 else 1
        epoch_end(self)

    monkeypatch.setattr(GPTLightning, "on_validation_epoch_end", broken)
    finished = train_here("trainer.max_steps=20")
    assert "The validation loss is nan at step 8," in finished.error
    for name in ("best.ckpt", "last.ckpt"):
        assert load_checkpoint(finished.path / "checkpoints" / name).step == 4


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="others do not keep to it")
def test_too_little_memory_names_batch_and_context_and_what_to_lower(call, tiny, tmp_path):
    settings = ("data.batch_size=300000", "model.context_length=32", "trainer.max_steps=2", f"runs_dir={tmp_path}/runs")
    finished = call("train.py", *tiny, *settings, prefix=limited("RLIMIT_AS", 6 << 30))
    assert "out of memory with data.batch_size=300000 and model.context_length=32" in finished.error
    assert "Lower data.batch_size" in finished.error
    assert not list(tmp_path.iterdir())  # nothing trained: nothing kept


# Long


MEMORY_OF_A_LONG_RUN = """
import gc, sys
import psutil
from lightning.pytorch import Callback, Trainer
import train
from configs.cli import run

class ProcessWatcher(Callback):
    seen = []
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step % 100 == 0:
            gc.collect()
            self.seen.append(psutil.Process().memory_info().rss)

make = Trainer.__init__
def watched(self, *args, callbacks, **kwargs):
    make(self, *args, callbacks=[ProcessWatcher(), *callbacks], **kwargs)
Trainer.__init__ = watched
watched.__signature__ = __import__("inspect").signature(make)
run(train.main, "train")
print("memory:", *ProcessWatcher.seen)
"""


@pytest.mark.soak
def test_memory_is_steady_over_five_thousand_steps(call, tiny, tmp_path):
    script = tmp_path / "long.py"
    script.write_text(MEMORY_OF_A_LONG_RUN)
    settings = ("trainer.max_steps=5000", "num_validations=20", f"runs_dir={tmp_path / 'runs'}")
    finished = call(str(script), *tiny, *settings, env={"PYTHONPATH": str(PROJECT)}, timeout=900)
    assert finished.returncode == 0, finished
    readings = [int(word) for word in finished.stdout.split("memory:")[1].split()]
    assert len(readings) == 50
    after_warm_up, at_the_end = statistics.median(readings[10:25]), statistics.median(readings[-15:])
    assert at_the_end < 1.01 * after_warm_up, [round(value / 2**20, 1) for value in readings]
