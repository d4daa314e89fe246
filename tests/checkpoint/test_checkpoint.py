"""Checkpoints load from files and run directories, those of earlier formats too, and with the GPT's weights only."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from checkpoint.checkpoint import FORMAT, NETWORK_PREFIX, checkpoint_metadata, load_checkpoint
from checkpoint.io import read_checkpoint, write_checkpoint
from data.config import TokenizerConfig
from data.tokenizer import build_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from system.errors import UserError

OLD_NAMES = {
    "sliding_window": "attention_window",
    "window_pattern": "attention_pattern",
    "bigram_table_size": "bigram_rows",
}
CONFIG = GPTConfig(
    **{"vocab_size": 256, "context_length": 32, "num_layers": 3, "num_heads": 2, "d_model": 32, "positions": "rope"},
    **{"sliding_window": 4, "window_pattern": "SSL", "bigram_table_size": 64},
)


def content_of(network: GPT) -> dict:
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), None, Path())
    weights = {NETWORK_PREFIX + name: weight for name, weight in network.state_dict().items()}
    entry = checkpoint_metadata(network.config, tokenizer, 0, {"nats_per_token": 5.5, "bits_per_byte": 8.0})
    return {"gpt": entry, "state_dict": weights}


@pytest.fixture
def network() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).eval()


@pytest.mark.parametrize("old_format", [1, 2])
@torch.no_grad()
def test_a_checkpoint_of_an_earlier_format_loads_with_the_same_logits(network, tmp_path, old_format):
    content = content_of(network)
    fields = {OLD_NAMES.get(name, name): value for name, value in asdict(CONFIG).items()}
    fields["attention_pattern"] = "LLF"  # local, local, full
    content["gpt"] |= {"model": fields, "format": old_format}
    if old_format == 1:
        content["state_dict"]["network.output.weight"] = content["state_dict"].pop("network.lm_head.weight")
    write_checkpoint(content, tmp_path / "old.ckpt")
    loaded = load_checkpoint(tmp_path / "old.ckpt")
    assert loaded.network.config == CONFIG
    ids = torch.randint(256, (2, 32))
    assert torch.equal(loaded.network(ids), network(ids))


@pytest.mark.parametrize("name", ["head.weight", "networks.lm_head.weight", NETWORK_PREFIX + "head.weight"])
def test_a_weight_that_is_not_the_networks_is_rejected_by_name(network, tmp_path, name):
    content = content_of(network)
    content["state_dict"][name] = torch.zeros(2)
    write_checkpoint(content, tmp_path / "odd.ckpt")
    with pytest.raises(UserError, match=r"odd\.ckpt does not fit this version .*head\.weight") as error:
        load_checkpoint(tmp_path / "odd.ckpt")
    assert "\n" not in str(error.value)


def test_load_checkpoint_takes_a_string_a_path_and_a_run_directory(network, tmp_path):
    best = tmp_path / "run" / "checkpoints" / "best.ckpt"
    best.parent.parent.mkdir()
    write_checkpoint(content_of(network), best)
    for path in (best, str(best), best.parents[1], str(best.parents[1])):
        assert load_checkpoint(path).path == best


@pytest.fixture
def unfinished(tiny_run, tmp_path) -> Path:
    """A copy of the tiny run, which can be resumed."""
    run_dir = tmp_path / "run"
    shutil.copytree(tiny_run.path, run_dir)
    (run_dir / "summary.json").unlink()
    return run_dir


def test_resuming_a_run_of_an_earlier_checkpoint_format_is_one_line_with_both_formats(refuse, unfinished):
    last = unfinished / "checkpoints" / "last.ckpt"
    content = read_checkpoint(last)
    content["gpt"]["format"] = 2
    write_checkpoint(content, last)
    error = refuse("train", f"resume={unfinished}", "trainer.max_steps=80")
    assert f"{last} has format 2" in error and f"format {FORMAT}" in error and f"init_from={last}" in error


def test_resuming_a_run_with_keys_of_an_earlier_version_is_one_line_with_both_names(refuse, unfinished):
    config = unfinished / "config.yaml"
    text = config.read_text(encoding="utf-8")
    assert "num_validations:" in text and "warmup_fraction:" in text
    config.write_text(text.replace("num_validations:", "validations:").replace("warmup_fraction:", "warmup:"))
    error = refuse("train", f"resume={unfinished}", "trainer.max_steps=80")
    assert str(config) in error and "earlier version" in error and f"init_from={unfinished}" in error
    assert "validations is now num_validations" in error
    assert "optimizer.warmup is now optimizer.warmup_fraction" in error
