"""Every program behaves alike at its ends: streams that are closed, full or in another encoding, --help, --version."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs.error_lines import abbreviated_repr, error_line
from system.memory import is_out_of_memory
from system.text import escape_control_chars, escape_json, escape_line
from system.version import VERSION

PROJECT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    str(path.relative_to(PROJECT).with_suffix("")).replace(os.sep, ".")
    for folder in (".", "analysis", "benchmarks", "data")
    for path in (PROJECT / folder).glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
)

# Runs each program in a fork of one process that has imported PyTorch, as (exit code, standard output, error).
RUN_ALL = """
import contextlib, importlib, json, os, runpy, sys, tempfile, warnings
import torch

def run(program, arguments, streams):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                if streams == "full":
                    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
                elif streams == "reader gone":
                    ours, theirs = os.pipe()
                    os.close(ours)
                    os.dup2(theirs, 1)
                elif streams == "closed":
                    for number in range(3):
                        os.close(number)
                    sys.stdin = sys.stdout = sys.stderr = None
                    del sys.modules["configs.entry_point"]  # what a program imports first
                elif streams == "cp1252":
                    sys.stdout.reconfigure(encoding="cp1252", errors="strict")
                    sys.stderr.reconfigure(encoding="cp1252", errors="strict")
                sys.argv = [program, *arguments]
                warnings.simplefilter("ignore")  # runpy's, of a module that is there already
                runpy.run_module(program, run_name="__main__", alter_sys=True)
                code = 0
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError):
                        stream.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0), err.seek(0)
        return code, out.read().decode("utf-8", "replace"), err.read().decode("utf-8", "replace")

jobs = json.loads(sys.argv[1])
for program in {job[0] for job in jobs}:
    importlib.import_module(program)
torch.set_num_threads(1)
print(json.dumps([run(*job) for job in jobs]))
"""


UNKNOWN_KEY = "книга\x1b[2J\n\u202e=1"
WAYS = {
    "help": (["--help"], "as they are"),
    "all keys": (["--help-all"], "as they are"),
    "version": (["--version"], "as they are"),
    "closed": (["--version"], "closed"),
    "reader gone": (["--help"], "reader gone"),
    "full": (["--version"], "full"),
    "cp1252": ([UNKNOWN_KEY], "cp1252"),
}


@pytest.fixture(scope="module")
def answers(clean_environment) -> dict[str, dict[str, tuple[int, str, str]]]:
    """What each program answers in each of these ways: answers["help"]["train"]."""
    jobs = json.dumps([[program, *way] for way in WAYS.values() for program in PROGRAMS])
    command = [sys.executable, "-c", RUN_ALL, jobs]
    finished = subprocess.run(command, cwd=PROJECT, env=clean_environment, capture_output=True, timeout=900)
    assert finished.returncode == 0, finished.stderr.decode()
    found = iter(json.loads(finished.stdout))
    return {name: {program: tuple(next(found)) for program in PROGRAMS} for name in WAYS}


def test_there_are_programs_to_look_at():
    expected = {"train", "sample", "analysis.inspect_attention", "analysis.lessons", "benchmarks.startup"}
    assert expected | {"data.prepare_shakespeare"} <= set(PROGRAMS)


def test_help_of_every_program_says_how_it_is_used_and_shows_its_common_settings(answers):
    for program, (code, out, err) in answers["help"].items():
        assert (code, err) == (0, ""), (program, err)
        assert "python " + ("-m " if "." in program else "") + program in out, (program, out)
        assert "Hydra" not in out and "schema" not in out, program
        if "Common settings" not in out:  # the program takes no settings
            assert program == "analysis.report" or program.startswith(("benchmarks.", "data.")), program
            continue
        assert f"{program}{'' if '.' in program else '.py'} --help-all" in out, program
        settings = re.findall(r"^  ([\w.]+)=\S+(.*)\n(.*)", out, re.MULTILINE)
        assert 2 <= len(settings) <= 12, program
        assert [key for key, meaning, below in settings if not (meaning or below).strip()] == [], program


def test_help_of_train_has_ten_settings_every_recipe_and_the_line_that_installs_completion(answers):
    out = answers["help"]["train"][1]
    assert (
        out.count("=", out.index("Common settings,")) > 10 and len(re.findall(r"^  [\w.]+=", out, re.MULTILINE)) == 10
    )
    assert "  seed=0 " in out and "model=tiny  " in out and "gpt2, llama, nanochat, tiny" in out
    recipes = sorted(path.stem for path in (PROJECT / "configs" / "experiment").glob("*.yaml"))
    found = re.findall(r"^  (\w+) +(\S.*)$", out[out.index("Recipes,") :], re.MULTILINE)
    assert [name for name, _ in found] == recipes and not any(text.startswith("@") for _, text in found)
    assert 'eval "$(python train.py -sc install=bash)"' in out


def test_help_all_of_every_program_has_each_of_its_keys(answers):
    for program, (code, out, err) in answers["all keys"].items():
        assert (code, err) == (0, ""), (program, err)
        if "Keys, given as key=value" not in out:  # the program takes no settings
            assert program == "analysis.report" or program.startswith(("benchmarks.", "data.")), program
        elif file := re.search(r"configs/(\w+)\.yaml", out):
            keys = re.findall(r"^(\w+):", (PROJECT / file[0]).read_text("utf-8"), re.MULTILINE)
            assert set(keys) - {"defaults", "hydra"} <= set(re.findall(r"^(\w+):", out, re.MULTILINE)), program
            assert "schema" not in out, program


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes_keys_and_choices(clean_environment):
    script = """
        eval "$(python train.py -sc install=bash)"
        for line in "python train.py model.num_h" "python train.py model=n"; do
            COMP_LINE=$line COMP_POINT=${#line} COMP_CWORD=2
            hydra_bash_completion
            echo "${COMPREPLY[@]}"
        done
    """
    environment = clean_environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    finished = subprocess.run(["bash", "-c", script], cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert finished.stdout.splitlines() == ["model.num_heads=", "model=nanochat"], finished


def test_version_is_that_of_the_project(answers):
    for program, answer in answers["version"].items():
        assert answer == (0, f"tiny-gpt-lab {VERSION}\n", ""), program


def test_closed_streams_end_no_program(answers):
    for program, answer in answers["closed"].items():
        assert answer == (0, "", ""), program


def test_reader_that_has_gone_ends_every_program_silently(answers):
    for program, answer in answers["reader gone"].items():
        assert answer == (0, "", ""), program


def test_full_output_is_one_line_in_every_program(answers):
    line = "error: the output cannot be written: No space left on device. Free some space, or write to another disk.\n"
    for program, answer in answers["full"].items():
        assert answer == (2, "", line), program


def test_every_program_writes_utf8_and_shows_control_characters(answers):
    for program, (code, out, err) in answers["cp1252"].items():
        assert (code, out) == (2, ""), (program, out, err)
        assert err.startswith("error: ") and err.count("\n") == 1 and "книга" in err, (program, err)
        assert not set("\x1b\u202e") & set(err), program


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_sample_writes_what_it_can_where_streams_are_closed(clean_environment, tiny_run, closed):
    command = f'exec "$0" sample.py "checkpoint=$1" max_new_tokens=5 {closed}'
    shell = ["sh", "-c", command, sys.executable, tiny_run.dir]
    finished = subprocess.run(shell, cwd=PROJECT, env=clean_environment, capture_output=True, timeout=120)
    assert finished.returncode == 0 and b"Traceback" not in finished.stderr, finished.stderr
    assert (finished.stdout == b"") == (">&-" in closed.split()) and (finished.stderr == b"") == ("2>&-" in closed)


def test_files_of_a_run_are_not_what_it_prints_where_streams_are_closed(clean_environment, tiny, tmp_path):
    command = 'exec "$0" train.py "$@" <&- >&- 2>&-'
    arguments = [*tiny, "trainer.max_steps=2", f"runs_dir={tmp_path}"]
    shell = ["sh", "-c", command, sys.executable, *arguments]
    assert subprocess.run(shell, cwd=PROJECT, env=clean_environment, timeout=120).returncode == 0
    (log,) = tmp_path.glob("*/train.log")
    assert "best checkpoint, step 2 of 2" in log.read_text(encoding="utf-8")
    assert json.loads((log.parent / "summary.json").read_text(encoding="utf-8"))["steps"] == 2


def test_text_that_moves_cursors_trains_and_shows_only_pictures_of_it(call, tiny, tmp_path):
    """And all of it in UTF-8 where the locale has no such letters, as on Windows with the output in a file."""
    corpus = tmp_path / "книга.txt"
    corpus.write_text("привет \x1b[2J\x07\x9b2J\u202e\n" * 200, encoding="utf-8")
    settings = (*tiny, f"data.corpus={corpus}", "trainer.max_steps=2", f"runs_dir={tmp_path / 'runs'}")
    finished = call("train.py", *settings, runs=tmp_path / "runs", env={"PYTHONIOENCODING": "cp1252"})
    assert finished.returncode == 0 and finished.stderr == "", finished.stderr
    log = (finished.path / "train.log").read_text(encoding="utf-8")
    assert "книга.txt" in finished.stdout and not set("\x1b\x07\x9b\u202e") & set(finished.stdout + log)


def test_lines_on_standard_error_go_through_the_door_that_escapes_them():
    for path in PROJECT.glob("**/*.py"):
        if "tests" not in path.parts and ".venv" not in path.parts and path.name != "streams.py":
            printed = re.findall(r"print\(.*file=sys\.stderr", path.read_text(encoding="utf-8"))
            assert [line for line in printed if '"> "' not in line] == [], path


# Lack of memory, and files that cannot be read


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("unable to mmap 128 bytes from file </x>: Cannot allocate memory (12)"),
        OSError(12, "Cannot allocate memory"),
        ImportError("libfoo.so: failed to map segment from shared object"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_lack_of_memory_is_known_however_it_is_said(error):
    assert is_out_of_memory(error)
    assert "Lower lengths, or" in error_line(error, "lessons")


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("out of memory"), OSError(28, "")])
def test_other_errors_are_no_lack_of_memory(error):
    assert not is_out_of_memory(error)


UNDER_A_LIMIT = """
import resource, runpy, sys
import torch
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (1 << 29)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("program", "arguments", "lower"),
    [
        (
            "analysis.inspect_attention",
            ["untrained=true", "model.context_length=40000", f"prompt={'a' * 40_000}"],
            "length of the text",
        ),
        ("analysis.lessons", ["lengths=[1500000]"], "lengths"),
    ],
)
def test_too_little_memory_is_one_line_that_says_what_to_lower(clean_environment, program, arguments, lower):
    command = [sys.executable, "-c", UNDER_A_LIMIT, program, *arguments]
    finished = subprocess.run(command, cwd=PROJECT, env=clean_environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 2 and "Traceback" not in finished.stderr, finished.stderr
    assert re.search(rf"^error: out of memory\. Lower .*{lower}.*\n\Z", finished.stderr, re.MULTILINE), finished.stderr


def test_file_that_cannot_be_read_is_named_in_one_line():
    error = PermissionError(13, "Permission denied", "a\x1b[2Jb" + 300 * "c")
    message = error_line(error, "sample")
    assert "cannot be read or written: Permission denied" in message and len(message) < 250 and "\x1b" not in message
    assert error_line(ZeroDivisionError(), "sample") is None


# Control characters

HOSTILE = "a\x1b[2J\x07\x00\r\x7f\x9b31m\u202eb\u2066"


def test_no_control_character_reaches_a_terminal():
    assert escape_control_chars(HOSTILE + "\n\té漢👑") == "a␛[2J␇␀␍␡�31m�b�\n\té漢👑"
    assert escape_line("a\n\tb") == "a␊␉b"


def test_json_keeps_its_meaning_without_control_characters():
    written = escape_json(json.dumps(HOSTILE, ensure_ascii=False))
    assert json.loads(written) == HOSTILE and escape_control_chars(written) == written


def test_long_value_is_named_by_its_beginning_and_end():
    assert abbreviated_repr("x") == "'x'" and len(abbreviated_repr("y" * 10_000)) < 100


# A folder that was moved


def test_every_target_works_where_the_folder_was_moved():
    """Scripts of an environment begin with the path it was made at; its Python, and ruff, a program, do not."""
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    used = set(re.findall(r"(?:\$\(BIN\)|/bin)/([\w-]+)", makefile))
    assert used == {"python", "ruff"}


def test_traceback_of_a_bug_shows_control_characters_of_its_message_as_pictures(clean_environment):
    program = "import system.interrupts; raise RuntimeError('a file said \\x1b[2J\\x07')"
    finished = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, env=clean_environment, capture_output=True)
    lines = finished.stderr.decode().splitlines()
    assert finished.returncode == 1 and lines[0].startswith("Traceback")
    assert lines[-1] == "RuntimeError: a file said ␛[2J␇"
