"""inspect_attention prints the measures of the network, and one line for what cannot be measured."""

import math
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis import inspect_attention as see
from analysis.ablation import ablate, ablation_costs
from analysis.activation_patching import patching_effects
from analysis.head_detector import head_scores, repeated_sequences
from analysis.logit_attribution import logit_attribution
from analysis.logit_lens import lens_losses, logit_lens
from analysis.text_table import BAR_WIDTH, signed_bar, text_table, two_decimals
from analysis.value_weighted_attention import value_weighted_maps
from checkpoint.checkpoint import Checkpoint, load_checkpoint
from configs.compose import compose
from configs.error_lines import exit_on_user_error
from data.tokenizer import encode, token_labels

TEXT = "The king and queen"
CORRUPTED = "The queen and king"


@pytest.fixture(scope="module")
def trained(tiny_run) -> Checkpoint:
    return load_checkpoint(tiny_run.path / "checkpoints" / "best.ckpt")


@pytest.fixture(scope="module")
def ids(trained) -> Tensor:
    """Of TEXT, (1, T)."""
    return torch.from_numpy(encode(trained.tokenizer, TEXT))[None]


@pytest.fixture
def inspect(tiny_run, capsys):
    """inspect(*arguments) is what follows the table of weights: standard output after the first empty line."""

    def called(*arguments: str) -> str:
        capsys.readouterr()
        see.main(compose("see", [f"checkpoint={tiny_run.dir}", f"prompt={TEXT}", *arguments]))
        return capsys.readouterr().out.partition("\n\n")[2]

    return called


@pytest.fixture
def rejected(tiny_run, capsys):
    """rejected(*arguments) is the one line with which they are rejected."""

    def called(*arguments: str) -> str:
        capsys.readouterr()
        prompt = [] if any(argument.startswith("prompt=") for argument in arguments) else [f"prompt={TEXT}"]
        with pytest.raises(SystemExit) as end, exit_on_user_error("see"):
            see.main(compose("see", [f"checkpoint={tiny_run.dir}", *prompt, *arguments]))
        output, messages = capsys.readouterr()
        line = messages.split("\n")[-2]
        assert end.value.code == 2 and output == "" and line.startswith("error: ")
        return line

    return called


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?<![\w.])[-+]?\d+\.\d+", line)]


@torch.no_grad()
@pytest.mark.parametrize(
    ("choice", "part", "where"),
    [
        ("1.0", "layer 1, head 0", {"layer": 1, "head": 0}),
        ("0.mlp", "MLP of layer 0", {"layer": 0, "mlp": True}),
    ],
)
def test_ablate_prints_the_loss_with_and_without_the_part(inspect, trained, ids, choice, part, where):
    def loss() -> float:
        return F.cross_entropy(trained.network(ids[:, :-1])[0], ids[0, 1:]).item()

    bytes_per_token = len(trained.tokenizer.decode_bytes(ids[0, 1:].tolist())) / (ids.numel() - 1)
    whole = loss()
    with ablate(trained.network, **where):
        ablated = loss()
    title, _, *rows = inspect(f"ablate={choice}").splitlines()
    assert title.startswith(f"{part}: ")
    for row, nats in zip(rows, (whole, ablated, ablated - whole), strict=True):
        assert numbers(row) == pytest.approx([nats, nats / math.log(2) / bytes_per_token], abs=1.01e-4)


@torch.no_grad()
def test_lens_prints_what_each_layer_predicts_and_its_loss(inspect, trained, ids):
    _, header, *rows, last = inspect("lens=true").splitlines()
    assert header.split() == ["#", "token", "next", "embedding", "layer", "0", "layer", "1"]
    probabilities, guesses = logit_lens(trained.network, ids)[:, 0].softmax(-1).max(-1)  # (L + 1, T)
    for index, row in enumerate(rows):
        assert numbers(row) == pytest.approx(probabilities[:, index].tolist(), abs=0.00501)
        labels = token_labels(trained.tokenizer, guesses[:, index].tolist())
        assert [label in row for label in labels] == [True] * 3
    assert len(rows) == ids.numel()
    assert numbers(last) == pytest.approx(lens_losses(trained.network, ids).tolist(), abs=0.000501)


@pytest.mark.parametrize("position", [3, None])
def test_attribution_explains_the_logit_of_the_token_that_follows(inspect, trained, ids, position):
    at = ids.numel() - 1 if position is None else position
    logits = logit_lens(trained.network, ids)[-1, 0, at]
    token = logits.argmax() if position is None else ids[0, position + 1]
    title, total, *rows = inspect("attribution=true", *([] if position is None else [f"token={position}"])).splitlines()
    label = token_labels(trained.tokenizer, [int(token)])[0]
    assert title.startswith(f'logit of "{label}" after token {at}, "')
    assert numbers(total) == pytest.approx([logits[token].item()], abs=0.00051)
    parts = logit_attribution(trained.network, ids[0], int(token), position=at)
    assert [row.split(maxsplit=1)[1] for row in rows] == list(parts)
    for row, value in zip(rows, parts.values(), strict=True):
        assert numbers(row) == pytest.approx([value], abs=0.000501)


def test_attribution_to_the_difference_of_two_answers(inspect, trained, ids):
    title, total, *_ = inspect("attribution=true", "answers=e|a").splitlines()
    logits = trained.network(ids)[0, -1]
    pair = encode(trained.tokenizer, "e")[0], encode(trained.tokenizer, "a")[0]
    assert title.startswith('logit of "e" minus that of "a" after token')
    assert numbers(total) == pytest.approx([(logits[pair[0]] - logits[pair[1]]).item()], abs=0.00051)


def test_attribution_has_bars_in_a_terminal(inspect, monkeypatch):
    monkeypatch.setattr(sys.stdout.__class__, "isatty", lambda self: True)
    assert "█" in inspect("attribution=true")
    assert signed_bar(-0.5) == " " * 5 + "█" * 5 + "│" + " " * 10 and signed_bar(1) == " " * 10 + "│" + "█" * 10
    assert len(signed_bar(0.3)) == BAR_WIDTH + 1


def test_effects_prints_the_costs_and_scores_of_every_head_over_all_of_the_text(inspect, trained):
    words = "the king and queen of night day love death sweet thou art no more " * 9
    everything = torch.from_numpy(encode(trained.tokenizer, words))
    windows = everything[-(16 * 16 + 1) :].unfold(0, 17, 16)  # contexts of 16 tokens, and their targets
    assert 4 < len(windows) < 16 and everything.numel() > 17
    costs = ablation_costs(trained.network, windows)
    scores = head_scores(
        torch.stack(trained.network.attention_maps(windows[:, :-1])),
        torch.stack(trained.network.attention_maps(repeated_sequences(everything, 16))),
    )
    title, header, *rows = inspect("effects=true", f"prompt={words}").splitlines()
    assert f"{costs.loss:.4f} nats per token over {windows[:, 1:].numel()} tokens" in title
    assert header.split() == ["part", "increase", *scores]
    shown = {re.match(r"layer \d (head \d|MLP)", row)[0]: numbers(row) for row in rows}
    assert len(shown) == 6
    for layer in range(2):
        assert shown[f"layer {layer} MLP"] == pytest.approx([costs.mlps[layer].item()], abs=0.000101)
        for head in range(2):
            cost, *values = shown[f"layer {layer} head {head}"]
            assert cost == pytest.approx(costs.heads[layer, head].item(), abs=0.000101)
            assert values == pytest.approx([score[layer, head].item() for score in scores.values()], abs=0.00501)


def test_corrupted_prints_what_each_activation_restores(inspect, trained, ids):
    corrupted = torch.from_numpy(encode(trained.tokenizer, CORRUPTED))
    pair = int(encode(trained.tokenizer, "e")[0]), int(encode(trained.tokenizer, "a")[0])
    effects = patching_effects(trained.network, ids[0], corrupted, pair)
    stream, heads = inspect(f"corrupted={CORRUPTED}", "answers=e|a").split("\n\n")
    title, _, _, *rows = stream.splitlines()
    assert numbers(title) == pytest.approx([effects.clean, effects.corrupted], abs=0.000501)
    for row, shares in zip(rows, effects.stream.T, strict=True):
        assert numbers(row) == pytest.approx(shares.tolist(), abs=0.00501)
    for row, shares in zip(heads.splitlines()[2:], effects.heads, strict=True):
        assert numbers(row) == pytest.approx(shares.tolist(), abs=0.00501)


def test_value_weighted_maps_are_shares_of_the_largest_in_table_and_picture(
    tiny_run, trained, ids, monkeypatch, capsys
):
    maps = value_weighted_maps(trained.network, ids)[:, 0]
    drawn = []
    monkeypatch.setattr("analysis.attention_plot.draw_attention", lambda *args, **options: drawn.append(args))
    monkeypatch.setattr("analysis.attention_plot.save", lambda picture, path: None)
    see.main(
        compose(
            "see",
            [
                f"checkpoint={tiny_run.dir}",
                f"prompt={TEXT}",
                "value_weighted=true",
                "layer=1",
                "head=1",
                "png=maps.png",
            ],
        )
    )
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("layer 1, head 1: what token") and title.endswith(f"largest of all heads, {maps.max():.3g}")
    torch.testing.assert_close(torch.from_numpy(drawn[0][0]), maps / maps.max())
    weights = [numbers(row)[0] for row in rows]
    assert weights == pytest.approx((maps / maps.max())[1, 1, -1].tolist(), abs=0.000501)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["ablate=1"],
            "ablate is '1', but must be LAYER.HEAD or LAYER.mlp, with a layer from 0 to 1 and a head from 0",
        ),
        (["ablate=2.0"], "ablate is '2.0', but must be"),
        (["ablate=0.2"], "ablate is '0.2', but must be"),
        (["ablate=0.10"], "ablate is '0.10', but must be"),
        (["ablate=-1.0"], "ablate is '-1.0', but must be"),
        (["ablate=0.MLP"], "ablate is '0.MLP', but must be"),
        (["ablate="], "ablate is '', but must be"),
        (["ablate=0.0.0"], "ablate is '0.0.0', but must be"),
        (["ablate=0.0", "prompt=a"], "The text has 1 token, but ablate needs at least 2"),
        (["effects=true", "prompt=a"], "The text has 1 token, but effects needs at least 2"),
        (["lens=maybe"], "lens"),
        (["corrupted=The king"], 'corrupted needs two answers to compare. Give them: answers=" Mary| John"'),
        (["answers=e|a"], "answers has no effect without corrupted or attribution=true"),
        (["corrupted=The king", "answers=e|a"], "tokens and the corrupted one"),
        (["corrupted=", "answers=e|a"], "tokens and the corrupted one 0, but they must have equally many"),
        ([f"corrupted={CORRUPTED}", "answers=e"], "answers is 'e', but must be two different ones"),
        ([f"corrupted={CORRUPTED}", "answers=e|zz"], 'The answer \'zz\' has 2 tokens ("z", "z"), but must have one'),
        ([f"corrupted={TEXT}", "answers=e|a"], "for both prompts, so there is nothing to restore"),
        (["attribution=true", "answers=e|zz"], "The answer 'zz' has 2 tokens"),
        (["prompt=" + "love death " * 9, "corrupted=" + "death love " * 9, "answers=e|a"], "but the model sees 16"),
    ],
)
def test_what_cannot_be_measured_is_rejected_in_one_line(rejected, arguments, message):
    assert message in rejected(*arguments)


def test_a_hugging_face_directory_has_the_same_measures(inspect, trained, tmp_path, capsys):
    trained.export_directory(tmp_path / "model", {}, {})
    arguments = ("ablate=0.1", "effects=true", "lens=true", "attribution=true", f"corrupted={CORRUPTED}", "answers=e|a")
    see.main(compose("see", [f"checkpoint={tmp_path / 'model'}", f"prompt={TEXT}", *arguments]))
    measures = capsys.readouterr().out.partition("\n\n")[2]
    assert measures.count("\n\n") == 5 and measures == inspect(*arguments)


def test_one_token_has_what_can_be_measured_of_it(inspect):
    rows = inspect("prompt=a", "lens=true").splitlines()
    assert len(rows) == 3  # no loss
    assert "all" in inspect("prompt=a", "attribution=true")
    assert inspect("prompt=aaaa", "effects=true").splitlines()[1].split() == [
        "part",
        "increase",
    ]  # one token: no scores


def test_columns_of_a_table_line_up_in_a_terminal():
    table = text_table(("#", "token", "x"), [("1", "漢字", "0.5"), ("10", "a", "-0.25")], left=[1])
    assert [two_decimals(value) for value in (-0.001, -0.006, 1)] == ["0.00", "-0.01", "1.00"]
    assert table.splitlines() == [" #  token      x", " 1  漢字     0.5", "10  a      -0.25"]
