from __future__ import annotations

from pathlib import Path

import pytest
import torch

from simulations import models
from simulations.compare import PLANS, QUICK_PLANS, TOLERANCE
from simulations.data import Dataset, load_digits, load_sentiment
from simulations.models import (
    BLOCKS,
    Batch,
    Classifier,
    ParameterMatchError,
    Shape,
    Size,
    block_factory,
    count_parameters,
    match_size,
    patches,
    recipe,
)

SHAPE = Shape(d_model=16, nhead=2, reference=Size(width=32, layers=2), dropout=0.2)


@pytest.fixture(scope="module")
def sentiment(files: dict[str, Path]) -> Dataset:
    return load_sentiment(files["reviews"], files["vectors"], max_length=12)


@pytest.fixture(scope="module")
def digits(files: dict[str, Path]) -> Dataset:
    return load_digits(files["digits"])


def build(
    block: str, dataset: Dataset, shape: Shape = SHAPE, size: Size | None = None
) -> Classifier:
    generator = torch.Generator().manual_seed(3)
    return Classifier.build(block, shape, size or shape.reference, dataset, generator)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("task", ["sentiment", "digits"])
def test_all_blocks_match_the_plain_model_as_compared(
    block: str, task: str, request: pytest.FixtureRequest
) -> None:
    dataset: Dataset = request.getfixturevalue(task)
    for plans in (PLANS, QUICK_PLANS):
        shape = plans[task].shape

        def count(name: str, size: Size, shape: Shape = shape) -> int:
            return count_parameters(build(name, dataset, shape, size))

        target = count("plain", shape.reference)
        size = match_size(block, shape, count, TOLERANCE)
        assert abs(count(block, size) - target) <= TOLERANCE * target


def test_width_is_the_closest() -> None:
    def count(block: str, size: Size) -> int:
        return 1000 if block == "plain" else 100 + 7 * size.width

    # (1000 - 100) / 7 = 128.6
    assert match_size("mean_field", SHAPE, count) == Size(129, 2)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(lambda block, size: 1000 if block == "plain" else 400, id="no width"),
        pytest.param(
            lambda block, size: 1000 if block == "plain" else 2000 + size.width, id="too large"
        ),
        pytest.param(
            lambda block, size: 1000 if block == "plain" else 600 * size.width, id="too coarse"
        ),
    ],
)
def test_no_match_is_an_error(count: models.Callable[[str, Size], int]) -> None:
    with pytest.raises(ParameterMatchError, match=r"'mean_field'.*plain model has 1000.*5%"):
        match_size("mean_field", SHAPE, count)


def test_unknown_block_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="nearest is 'mean_field'"):
        block_factory("mean_feild")


def test_recipe_is_the_factory() -> None:
    assert "TransformerBlock(" in recipe("plain")


def test_initial_parameters_depend_on_the_generator_only(digits: Dataset) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build("plain", digits)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = build("plain", digits)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_vectors_are_frozen_and_not_saved(sentiment: Dataset) -> None:
    model = build("plain", sentiment)
    assert "vectors" not in model.state_dict()
    assert not any(p.shape == model.vectors.shape for p in model.parameters())


def test_patches() -> None:
    images = torch.arange(2 * 28 * 28).reshape(2, 28, 28)
    cut = patches(images)
    assert cut.shape == (2, 16, 49)
    # Patch 6 is the second row of patches, third column.
    assert torch.equal(cut[1, 6].reshape(7, 7), images[1, 7:14, 14:21])


@pytest.mark.parametrize("block", BLOCKS)
def test_trace_is_the_forward_pass_seen_from_inside(block: str, sentiment: Dataset) -> None:
    model = build(block, sentiment)
    tokens = torch.tensor([[2, 3, 4, 5, 6], [3, 2, 0, 0, 0], [7, 0, 0, 0, 0]])
    batch = Batch(tokens, tokens == 0, torch.zeros(3, dtype=torch.long))
    with torch.no_grad():
        logits, trace = model(batch), model.trace(batch)
    # The same operations in the same order.
    torch.testing.assert_close(trace.logits, logits, rtol=1e-5, atol=1e-6)
    assert trace.rank.shape == (len(trace.reports) + 1, 3)
    assert trace.tokens == 5


@pytest.mark.parametrize("block", BLOCKS)
def test_padding_changes_no_prediction(block: str, sentiment: Dataset) -> None:
    model = build(block, sentiment)
    tokens = torch.tensor([[2, 3, 4]])
    label = torch.zeros(1, dtype=torch.long)
    padded = torch.cat([tokens, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    with torch.no_grad():
        alone = model(Batch(tokens, None, label))
        among = model(Batch(padded, padded == 0, label))
    # Sums of other lengths round otherwise; a fixed point stops within its tolerance.
    torch.testing.assert_close(among, alone, rtol=1e-3, atol=1e-3)


def test_dropout_is_drawn_from_its_generator(digits: Dataset) -> None:
    model = build("plain", digits)
    images = torch.rand(4, 28, 28)
    batch = Batch(images, None, torch.zeros(4, dtype=torch.long))
    x = model.tokens(batch)
    dropped = model.tokens(batch, torch.Generator().manual_seed(5))
    again = model.tokens(batch, torch.Generator().manual_seed(5))
    assert torch.equal(dropped, again)
    zero = dropped == 0
    torch.testing.assert_close(dropped[~zero], (x / 0.8)[~zero])
    # 1024 entries: the share .2 has the standard deviation .0125; four of them.
    assert abs(float(zero.float().mean()) - 0.2) < 0.05
