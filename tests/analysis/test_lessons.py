"""The lessons' figures, row by row, from the output of the command that shows them."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from analysis import lessons
from analysis.lessons import Timing
from configs.compose import compose
from model.flops import score_matrix_bytes
from model.gpt import GPT, GPTConfig
from system.errors import UserError
from system.machine import machine

PROJECT = Path(__file__).resolve().parents[2]
WITHOUT_MASK = """
    0.25 0.12 0.23 0.18 0.22
    0.17 0.20 0.15 0.20 0.28
    0.18 0.20 0.20 0.19 0.23
    0.18 0.25 0.17 0.21 0.19
    0.14 0.16 0.17 0.16 0.36
"""
WITH_MASK = """
    1.00 0.00 0.00 0.00 0.00
    0.45 0.55 0.00 0.00 0.00
    0.32 0.34 0.34 0.00 0.00
    0.22 0.31 0.21 0.26 0.00
    0.14 0.16 0.17 0.16 0.36
"""
LENGTHS = [10, 100, 512, 2048, 8192]


@pytest.fixture(scope="module")
def output():
    """What the lessons print with lengths=[10,100,512,2048,8192]; time is not measured: it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lessons, "time_one_head", lambda length: (Timing(2e-6 * length**2), Timing(1e-6 * length**2)))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            lessons.main(compose("lessons", [f"lengths={LENGTHS}"]))
    return printed.getvalue()


def rows(output: str) -> dict[int, list[float]]:
    """Context length -> pairs, MB of one head, MB of the model."""
    found = re.findall(r"^ +([\d,]+) +([\d,]+) +([\d,]+\.\d) +([\d,]+\.\d) ", output, re.M)
    return {int(length): values for length, *values in ([float(x.replace(",", "")) for x in row] for row in found)}


@pytest.mark.parametrize(("number", "expected"), [(0, WITHOUT_MASK), (1, WITH_MASK)], ids=["unmasked", "causal"])
def test_both_known_tables_of_weights_are_shown(output, number, expected):
    cells = re.findall(r"^    token \d ((?: +\d\.\d\d){5})$", output, re.M)
    assert [line.split() for line in cells[5 * number : 5 * number + 5]] == [
        line.split() for line in expected.strip().splitlines()
    ]


def test_first_token_upper_triangle_and_last_row_are_stated(output):
    assert re.search(r"first token attends only to itself: +a weight of 1\.00", output)
    assert re.search(r"of later tokens: +they sum to 0\.00", output)
    assert re.search(r"in both tables: +its rows differ by 0\.00", output)
    attention, x = lessons.five_tokens()
    free, masked = (attention(x, causal=causal, need_weights=True)[1][0, 0] for causal in (False, True))
    assert masked[0, 0] == 1 and (masked.triu(1) == 0).all()
    torch.testing.assert_close(free[-1], masked[-1])


def test_minus_infinity_hides_and_zero_does_not(output):
    assert "softmax of [2, 1, 0]    = [0.665, 0.245, 0.090]" in output
    assert "softmax of [2, 1, -inf] = [0.731, 0.269, 0.000]" in output


def test_changing_the_next_token_leaves_earlier_logits_bit_for_bit():
    torch.manual_seed(0)
    network = GPT(GPTConfig(vocab_size=50, context_length=16, num_layers=2, num_heads=2, d_model=16)).eval()
    ids = torch.randint(50, (1, 16))
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 50
    before, after = network(ids), network(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


def test_memory_table_has_the_known_pairs_and_megabytes(output):
    assert {length: row[:2] for length, row in rows(output).items()} == {
        10: [100, 0.0],
        100: [10_000, 0.0],
        512: [262_144, 1.0],
        2048: [4_194_304, 16.0],
        8192: [67_108_864, 256.0],
    }


def test_sixteen_times_the_length_costs_256_times_the_memory():
    for length in (1, 10, 512):
        assert score_matrix_bytes(16 * length) == 256 * score_matrix_bytes(length)


def test_layers_and_heads_multiply_the_memory(output):
    assert score_matrix_bytes(512, num_heads=12, num_layers=12) == 144 * score_matrix_bytes(512)
    assert "x144" in output
    for _, one, model in rows(output).values():
        assert model == pytest.approx(144 * one, rel=0.01) or one == 0.0
    assert rows(output)[8192][2] == 144 * 256


def test_a_model_of_one_layer_and_one_head_is_said_to_have_them(output, capsys, monkeypatch):
    monkeypatch.setattr(lessons, "time_one_head", lambda length: (Timing(1.0), Timing(1.0)))
    lessons.main(compose("lessons", ["lengths=[16]", "num_layers=1", "num_heads=1"]))
    assert "a model of 12 layers of 12 heads\n" in output
    assert "a model of 1 layer of 1 head\n" in capsys.readouterr().out


def test_score_matrix_has_the_bytes_of_the_formula():
    attention = lessons.MultiHeadAttention(8, 2)
    _, weights = attention(torch.randn(3, 20, 8), causal=True, need_weights=True)
    assert score_matrix_bytes(20, num_heads=2, sequences=3) == weights.nbytes


def test_time_is_measured_beside_the_memory_and_its_growth_beside_that_of_the_pairs(clean_environment):
    command = [sys.executable, "-m", "analysis.lessons", "lengths=[16,64]", "num_layers=3", "num_heads=2"]
    finished = subprocess.run(command, cwd=PROJECT, env=clean_environment, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0 and finished.stderr == "", finished
    assert "x6" in finished.stdout
    shorter, longer = (line.split() for line in finished.stdout.splitlines() if re.match(r" +(16|64) ", line))
    assert all(float(cells[n].lstrip("~")) >= 0 for cells in (shorter, longer) for n in (4, 5))  # ms, eager and SDPA
    assert shorter[6:] == ["-", "-"]
    assert longer[6] == "16.0" and (longer[7] == "-" or float(longer[7]) > 0)


def test_the_times_name_the_processor(output):
    assert f"Measured on {machine().rpartition(', ')[0]}" in output  # without the date


def test_a_matrix_larger_than_the_free_memory_is_not_tried(monkeypatch):
    monkeypatch.setattr(lessons, "score_matrix_bytes", lambda length: 10**18)
    eager, sdpa = lessons.time_one_head(16)
    assert eager is None and sdpa.ms > 0


@pytest.mark.parametrize(("slow", "spread"), [({3, 7}, 1.0), (set(range(2, 40)), 50.0)], ids=["twice", "mostly"])
def test_the_fastest_run_counts_and_a_large_spread_is_noticed(monkeypatch, slow, spread):
    now, runs = 0.0, 0

    def work():
        nonlocal now, runs
        now += 0.1 if runs in slow else 0.002
        runs += 1

    monkeypatch.setattr(lessons.time, "perf_counter", lambda: now)
    if spread > 1:
        slow.discard(4)  # one run was not disturbed
    timing = lessons.time_runs(work)
    assert timing.ms == pytest.approx(2) and timing.spread == pytest.approx(spread)
    assert timing.is_reliable is (spread == 1)


def test_unreliable_times_are_marked_and_not_compared(monkeypatch, capsys):
    monkeypatch.setattr(lessons, "time_one_head", lambda n: (Timing(1.0, 9.0 if n == 32 else 1.0), Timing(1.0)))
    lessons.main(compose("lessons", ["lengths=[16,32,64]"]))
    printed = capsys.readouterr().out
    table = [line.split() for line in printed.splitlines() if re.match(r" +(16|32|64) ", line)]
    assert [(cells[4], cells[7]) for cells in table] == [("1.00", "-"), ("~1.00", "-"), ("1.00", "-")]
    assert "Close them and repeat" in printed


@pytest.mark.parametrize(("longest_measured", "said"), [(16, True), (64, False)])
def test_what_was_not_measured_is_explained_where_there_is_such(monkeypatch, capsys, longest_measured, said):
    monkeypatch.setattr(
        lessons, "time_one_head", lambda n: (Timing(1.0) if n <= longest_measured else None, Timing(1.0))
    )
    lessons.main(compose("lessons", ["lengths=[16,32,64]"]))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("MB = 2^20 bytes, float32.") and ("was not measured" in last) is said


@pytest.mark.parametrize("setting", ["lengths=[]", "lengths=[0]", "num_layers=0", "num_heads=0"])
def test_what_cannot_work_is_refused_before_anything_is_printed(setting, capsys):
    with pytest.raises(UserError, match=setting.partition("=")[0]):
        lessons.main(compose("lessons", [setting]))
    assert capsys.readouterr().out == ""
