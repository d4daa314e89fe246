"""The comparison of attentions: what is compared on which device, and what it says of what it measured."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import attention_speed
from benchmarks.workload import attention_pass
from configs.compose import compose
from system.errors import UserError

SMALL = ["lengths=[384,768]", "tokens_per_batch=768"]


@pytest.fixture
def quick(monkeypatch):
    """One round, and no child processes: what the command does with figures, not the figures."""
    monkeypatch.setattr(attention_speed, "ROUNDS", 1)
    memory = SimpleNamespace(peak=100.0)
    monkeypatch.setattr(attention_speed, "measure_memory", lambda *arguments: {"peak": memory.peak})
    return memory


def printed(capsys) -> tuple[str, dict]:
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_on_a_cpu_a_line_a_length_and_the_same_in_json(quick, capsys):
    attention_speed.main(compose("attention_speed", [*SMALL, "device=cpu"]))
    out, result = printed(capsys)
    assert set(result["ms"]) == {"384", "768"}
    for length, row in result["ms"].items():
        assert set(row) == {"eager", "sdpa", "sliding_window"} and min(row.values()) > 0
        (line,) = [line.split() for line in out.splitlines() if line.startswith(f"{length:>8} ")]
        assert [float(cell.replace(",", "")) for cell in line[1:4]] == pytest.approx(list(row.values()), abs=0.06)
        assert all(float(cell) == 98.5 for cell in line[4:])  # 100 less four tensors of 768 x 128 numbers of 4 bytes
    assert set(result["exponents"]) == {"eager", "sdpa", "sliding_window"}
    assert " 1 thread;" in out and "skipped" not in out
    assert result["device"] == "cpu" and "promised of sliding window: at most 1.1" in out


def test_what_would_take_too_much_memory_is_skipped_and_said_to_be(quick, monkeypatch, capsys):
    monkeypatch.setattr(attention_speed, "MEMORY_BUDGET_MB", 30)  # 5 x 4.5 MB at 384, 5 x 9 MB at 768
    attention_speed.main(compose("attention_speed", [*SMALL, "device=cpu"]))
    out, result = printed(capsys)
    assert "(skipped: more than 30 MB)" in out
    assert set(result["ms"]["384"]) - set(result["ms"]["768"]) == {"eager"}


@pytest.mark.parametrize("flex", [True, False])
def test_on_cuda_both_ways_of_a_window_are_compared_in_bfloat16_where_both_work(monkeypatch, flex):
    monkeypatch.setattr(attention_speed, "flex_attention_works", lambda device, dtype, head_dim: flex)
    c = attention_speed.comparison_on("cuda:0", 65_536)
    assert c.names == ("eager", "sdpa", "blocks") + flex * ("flex",)
    assert c.options("blocks", 8192)["dtype"] == torch.bfloat16 and c.options("blocks", 8192)["sequences"] == 8
    assert c.fits("blocks", 8192) and c.fits("eager", 1024) and not c.fits("eager", 8192)


def test_ratios_are_those_of_the_device_and_only_a_cpu_has_promises(capsys):
    ms = {8192: {"sdpa": 12.0, "sliding_window": 2.0, "blocks": 4.0, "flex": 1.0}, 4096: {"sdpa": 3.0, "eager": 30.0}}
    assert attention_speed.speedups(ms, on_cuda=False) == {
        "sliding_window_over_sdpa_at_8192": 6.0,
        "sdpa_over_eager_at_4096": 10.0,
    }
    assert capsys.readouterr().out.count("promised") == 2
    assert attention_speed.speedups(ms, on_cuda=True) == {
        "flex_over_blocks_at_8192": 4.0,
        "flex_over_sdpa_at_8192": 12.0,
        "sdpa_over_eager_at_4096": 10.0,
    }
    assert "promised" not in capsys.readouterr().out
    assert attention_speed.speedups({512: {"sdpa": 1.0}}, on_cuda=True) == {}


def test_blocks_and_sliding_window_are_the_same_attention():
    outputs = []
    for name in ("sliding_window", "blocks"):
        torch.manual_seed(0)
        outputs.append(attention_pass(attention_speed.SHAPE, name, 384, 2, "cpu").forward())
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "setting", ["lengths=[512]", "lengths=[256,512]", "lengths=[512,1000]", "tokens_per_batch=5000"]
)
def test_what_cannot_be_compared_is_refused(setting):
    with pytest.raises(UserError, match="must list two or more multiples of 128 above the window of 256"):
        attention_speed.main(compose("attention_speed", [setting]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_command_compares_flex_attention(capsys):
    attention_speed.main(compose("attention_speed", [*SMALL, "device=cuda"]))
    _, result = printed(capsys)
    assert set(result["ms"]["768"]) == {"eager", "sdpa", "blocks", "flex"}
