"""The ceiling that a training step is held against is made of all of the step's products, and of nothing else."""

import sys

import pytest
import torch

from benchmarks import sampling, training_speed
from benchmarks.training_speed import Case, hugging_face_step, our_step, step_products
from configs.compose import compose
from model.config import GPTConfig
from model.flops import attention_flops, non_attention_flops
from system.errors import UserError
from training.config import OptimizerConfig

SHAPES = {
    "gpt2": GPTConfig(vocab_size=50, context_length=300, num_layers=2, num_heads=2, d_model=32),
    "grouped swiglu": GPTConfig(
        50, 12, num_layers=1, d_model=32, num_kv_heads=2, mlp="swiglu", logit_soft_cap=9.0, tied_embeddings=False
    ),
}


def case(config):
    return Case("", config, OptimizerConfig(name="adamw"), batch_size=3)


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_products_have_the_operations_of_a_step_on_paper(config):
    linear, attention = step_products(case(config))
    assert sum(p.flops for p in linear) == 3 * 3 * non_attention_flops(config, config.context_length)
    assert sum(p.flops for p in attention) == 3 * 3 * attention_flops(config, config.context_length, "eager")


def test_a_product_makes_the_operations_it_says():
    for product in [each for some in step_products(case(SHAPES["gpt2"])) for each in some]:
        result = product.run()
        summed_over = product.flops / (2 * result.numel())
        # widths; a head's and its context; the tokens of a batch, and of the two chunks of the output layer
        assert summed_over in {32, 96, 128, 50} | {16, 300} | {900, 512, 388}


@pytest.mark.parametrize(
    "main",
    [lambda: training_speed.main(compose("training_speed", [])), lambda: sampling.main([])],
    ids=["training", "sampling"],
)
def test_without_transformers_nothing_is_measured_and_one_line_says_how_to_get_it(main, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(UserError, match="pip install -r requirements-dev.txt"):
        main()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("make", [our_step, hugging_face_step])
def test_a_step_trains(make, monkeypatch):
    losses, backward = [], torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: (losses.append(loss.item()), backward(loss)))
    torch.manual_seed(0)
    step = make(case(SHAPES["gpt2"]))
    for _ in range(4):
        step()
    assert losses[-1] < losses[0] - 0.01
