"""During slow imports the garbage collector rests, where it would find nothing, and Ctrl-C is kept."""

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
CODE = """
import atexit, gc
atexit.register(lambda: print(len(gc.get_objects())))  # runs last: what the end of the process looks through
from system.deferred_imports import deferred_imports

collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
with {around}:
    made = [[] for _ in range(200_000)]
print(len(collections), gc.isenabled())
later = [[] for _ in range(200_000)]
print(len(collections) > 0)
"""


def numbers(around: str) -> list[str]:
    code = CODE.format(around=around)
    return subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True).stdout.split()


def test_imports_collect_nothing_and_the_end_of_the_process_looks_at_nothing():
    during, enabled, works_later, at_the_end = numbers("deferred_imports()")
    assert (during, enabled, works_later) == ("0", "True", "True")
    assert int(at_the_end) < 1000


def test_without_it_both_would():
    during, _, _, at_the_end = numbers("__import__('contextlib').nullcontext()")
    assert int(during) > 0
    assert int(at_the_end) > 200_000


def test_a_failed_import_leaves_the_collector_on():
    code = """
import gc
from system.deferred_imports import deferred_imports
try:
    with deferred_imports():
        raise ImportError
except ImportError:
    print(gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr


def test_ctrl_c_that_a_library_swallows_comes_after_the_imports():
    code = """
import os, signal
from system.deferred_imports import deferred_imports
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with deferred_imports():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            print("goes on")
        except BaseException:
            pass
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["goes on", "interrupted True"], done.stderr


def test_where_ctrl_c_is_ignored_it_stays_ignored():
    code = """
import os, signal
from system.deferred_imports import deferred_imports
signal.signal(signal.SIGINT, signal.SIG_IGN)
with deferred_imports():
    os.kill(os.getpid(), signal.SIGINT)
print("goes on", signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout == "goes on True\n", done.stderr
