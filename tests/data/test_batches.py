"""Batches follow from seed, step and rank; an epoch has each window once, validation each target once."""

import warnings

import lightning
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches import BatchLimits, TrainBatches, ValBatches
from data.tokenizer import TokenizerConfig
from system.errors import UserError
from training.datamodule import DataConfig, TextDataModule


def ids(n, dtype=np.uint16):
    return np.arange(n, dtype=dtype)  # an id is its own position, so a batch shows where it was cut


sizes = st.tuples(
    st.integers(1, 12),  # T
    st.integers(0, 150),  # tokens beyond the T + 1 that are needed
    st.integers(1, 9),  # B
    st.integers(1, 3),  # ranks
    st.integers(0, 2**40),  # seed
)


@settings(max_examples=150, deadline=None)
@given(sizes)
def test_every_epoch_covers_each_of_its_windows_once(size):
    context, more, batch_size, world_size, seed = size
    n = context + 1 + more
    ranks = [TrainBatches(ids(n), context, batch_size, seed, rank, world_size) for rank in range(world_size)]
    num_windows = ranks[0].windows_per_epoch
    steps = 3 * len(ranks[0]) + 1
    rows = torch.cat([loader.batch(step) for step in range(steps) for loader in ranks])  # in the order of training
    assert rows.dtype == torch.int64 and rows.shape == (steps * world_size * batch_size, context + 1)
    assert (rows - rows[:, :1] == torch.arange(context + 1)).all() and rows.max() < n
    for epoch in range(len(rows) // num_windows):
        starts = rows[epoch * num_windows : (epoch + 1) * num_windows, 0].sort().values
        assert (starts.diff() == context).all()  # side by side: none twice, none left out
        assert starts[0] < context and n - 1 - (starts[-1] + context) < 2 * context


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(0, 1000))
def test_a_batch_depends_on_its_step_and_not_on_those_before(size, step):
    context, more, batch_size, world_size, seed = size
    arguments = ids(context + 1 + more), context, batch_size, seed, world_size - 1, world_size
    used = TrainBatches(*arguments)
    for other in (step + 5, 0, step + 1):
        used.batch(other)
    assert torch.equal(used.batch(step), TrainBatches(*arguments).batch(step))


def test_seed_and_epoch_change_order_and_phase():
    loader = TrainBatches(ids(2000), 10, loader_size := 199, seed=1)
    assert len(loader) == 1 and loader.windows_per_epoch == loader_size
    epochs = [loader.batch(step)[:, 0] for step in range(20)] + [TrainBatches(ids(2000), 10, 199, 2).batch(0)[:, 0]]
    assert len({tuple(starts.tolist()) for starts in epochs}) == 21
    assert len({int(starts.min()) for starts in epochs}) > 5


def test_32_bit_ids_arrive_whole():
    assert TrainBatches(ids(100, np.uint32) + np.uint32(70_000), 8, 4, 0).batch(0).min() >= 70_000


def test_iterating_goes_on_from_the_steps_done_to_the_end_of_that_epoch():
    done = 0
    loader = TrainBatches(ids(1000), 10, 9, 0, steps_done=lambda: done)
    assert len(loader) == 11  # 99 windows
    for done, expected in ((0, 11), (1, 10), (10, 1), (11, 11), (27, 6)):
        batches = list(loader)
        assert len(batches) == expected and torch.equal(batches[0], loader.batch(done))


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ({}, 11),
        ({"limit_train_batches": 5}, 5),
        ({"limit_train_batches": 50}, 11),
        ({"limit_train_batches": 0.5}, 5),
        ({"accumulate_grad_batches": 4}, 12),  # whole steps
        ({"accumulate_grad_batches": 4, "limit_train_batches": 5}, 8),
        ({"overfit_batches": 3}, 3),
        ({"overfit_batches": 3, "accumulate_grad_batches": 2}, 4),
    ],
)
def test_an_epoch_has_so_many_batches(limits, batches):
    done = 0
    loader = TrainBatches(ids(1000), 10, 9, 0, steps_done=lambda: done, limits=BatchLimits(**limits))  # 99 windows
    assert len(loader) == batches
    for done in (0, 1, batches, 2 * batches + 3):  # 3 or less of the third
        assert len(list(loader)) == batches - done % batches


def test_overfitting_repeats_the_same_batches():
    loader = TrainBatches(ids(1000), 10, 9, 0, limits=BatchLimits(overfit_batches=3))
    batches, first = [loader.batch(step) for step in range(7)], TrainBatches(ids(1000), 10, 9, 0)
    assert all(torch.equal(batch, first.batch(step % 3)) for step, batch in enumerate(batches))


@pytest.mark.parametrize("limit, batches", [(1, 1), (3, 3), (0.5, 5), (99, 10)])
def test_limit_of_validation_batches_keeps_windows_from_all_over_the_split(limit, batches):
    ranks = [
        ValBatches(ids(1001), 10, 5, None, rank, 2, limits=BatchLimits(limit_val_batches=limit)) for rank in (0, 1)
    ]
    assert all(len(loader) == batches for loader in ranks)
    targets = torch.cat([targets.flatten() for loader in ranks for _, targets in loader])
    assert len(targets) == ranks[0].num_predicted == min(1000, batches * 2 * 5 * 10)
    assert targets.min() == 1 and targets.max() > 1000 - 1000 / batches


@pytest.mark.parametrize("option", ["limit_train_batches", "overfit_batches", "limit_val_batches"])
def test_share_that_leaves_no_batch_is_refused_with_what_works(option):
    limits = BatchLimits(**{option: 0.1})
    with pytest.raises(UserError, match=f"trainer.{option} is 0.1, which leaves none of 3 batches. Use at least 0.34"):
        TrainBatches(ids(301), 10, 10, 0, limits=limits)
        ValBatches(ids(301), 10, 10, limits=limits)


def test_text_of_one_window_trains_in_batches_of_full_size():
    assert TrainBatches(ids(5), 4, 24, 0).batch(7).tolist() == [[0, 1, 2, 3, 4]] * 24


@pytest.mark.parametrize("n, mend", [(40, "Use model.context_length ≤ 39 or a longer text"), (1, "Use a longer text")])
def test_text_shorter_than_the_context_is_refused_with_both_numbers(n, mend):
    with pytest.raises(UserError, match=f"context_length 256 needs at least 257 tokens; .* has {n}. {mend}"):
        TrainBatches(ids(n), 256, 24, 0)


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(2, 200),
    context=st.integers(1, 12),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 3),
    limit=st.none() | st.integers(1, 250),
)
def test_validation_predicts_each_target_once(n, context, batch_size, world_size, limit):
    seen = []
    for rank in range(world_size):
        loader = ValBatches(ids(n), context, batch_size, limit, rank, world_size)
        batches = list(loader)
        assert len(batches) == len(loader) >= 1  # also of a rank for which there is no window
        for inputs, targets in batches:
            assert inputs.shape == targets.shape and inputs.dtype == targets.dtype == torch.int64
            assert inputs.shape[1] == context and 1 <= len(inputs) <= batch_size
            assert (targets - inputs)[targets != -100].eq(1).all() and inputs[targets == -100].eq(0).all()
            seen += targets[targets != -100].tolist()
    assert len(seen) == len(set(seen)) and set(seen) <= set(range(1, n))
    if limit is None or limit >= n - 1:
        assert len(seen) == n - 1
    else:  # whole windows, of which the split's last may be short
        assert limit - context < len(seen) < limit + context


def test_validation_split_of_one_token_is_refused_before_training():
    with pytest.raises(UserError, match=r"at least 2 tokens.* has 1 at data.val_fraction=0.1"):
        ValBatches(ids(1), 8, 4, val_fraction=0.1)


# The data module


def text_data(folder, context_length=8, **config):
    (folder / "text.txt").write_text("Double, double toil and trouble;\nFire burn, and caldron bubble.\n" * 12)
    config = DataConfig(**{"corpus": str(folder / "text.txt"), "cache_dir": str(folder), "batch_size": 4, **config})
    return TextDataModule(config, TokenizerConfig(kind="byte"), context_length, seed=3)


def test_module_says_what_it_loaded(tmp_path):
    data = text_data(tmp_path)
    data.prepare()
    assert (data.vocab_size, len(data.train_tokens), data.bytes_per_token) == (256, 691, 1.0)
    line = data.describe()
    assert all(part in line for part in ("text.txt", "768 bytes", "byte tokenizer", "691", "encoded now"))
    again = text_data(tmp_path)
    again.prepare()
    assert "(cached)" in again.describe()
    assert bytes(data.val_passage(5).tolist()).decode() == "".join(data.corpus.val.read())[:5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"val_fraction": 0},
        {"val_fraction": 1.0},
        {"val_fraction": "a"},
        {"batch_size": 0},
        {"batch_size": 2.0},
        {"val_tokens": 0},
        {"corpus": ""},
        {"corpus": 3},
        {"cache_dir": ""},
    ],
)
def test_impossible_option_is_refused_before_any_text_is_read(wrong):
    with pytest.raises(UserError, match=f"data.{next(iter(wrong))}"):
        DataConfig(**wrong)


def test_context_longer_than_the_text_is_refused_by_prepare(tmp_path):
    with pytest.raises(UserError, match="context_length 1000 needs at least 1001 tokens"):
        text_data(tmp_path, context_length=1000).prepare()


class Recorder(lightning.LightningModule):
    """The least there is to train; it remembers its batches."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        return (self.weight - batch.float().mean()) ** 2

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(folder, steps, resume=None, accumulate=1):
    model = Recorder()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        default_root_dir=folder,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*dataloader is not resumable.*")
        trainer.fit(model, datamodule=text_data(folder), ckpt_path=resume, weights_only=True)
    return trainer, model.batches


@pytest.mark.parametrize("stop, accumulate", [(10, 1), (21, 1), (42, 1), (5, 3), (7, 3)])
def test_resumed_run_sees_the_batches_of_an_uninterrupted_one(tmp_path, stop, accumulate):
    _, whole = fit(tmp_path, 50 // accumulate, accumulate=accumulate)
    trainer, first = fit(tmp_path, stop, accumulate=accumulate)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    _, rest = fit(tmp_path, 50 // accumulate, tmp_path / "checkpoint", accumulate)
    assert len(whole) == len(first) + len(rest)
    assert all(torch.equal(a, b) for a, b in zip(whole, first + rest, strict=True))
    expected = TrainBatches(np.array(text_data_tokens(tmp_path)), 8, 4, seed=3)
    assert all(torch.equal(batch, expected.batch(step)) for step, batch in enumerate(whole))


def text_data_tokens(folder):
    data = text_data(folder)
    data.prepare()
    return data.train_tokens
