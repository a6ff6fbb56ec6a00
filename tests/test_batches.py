"""Batches of either kind are counted, cut and moved alike, whatever mapping holds them."""

from collections import UserDict

import pytest
import torch

from mergekit_lab import InputError
from mergekit_lab.batches import count_samples, cut_batch, take_samples, to_device

ROWS = torch.arange(10).view(5, 2)
LABELS = torch.arange(5)
NAMED = {"input_ids": ROWS, "labels": LABELS, "use_cache": False}


@pytest.mark.parametrize("batch", [(ROWS, LABELS), ({"a": ROWS}, LABELS), NAMED, UserDict(NAMED)])
def test_pieces_of_a_batch_hold_its_samples_in_their_order(batch) -> None:
    assert count_samples(batch) == 5
    pieces = list(cut_batch(batch, 2))
    assert [count_samples(piece) for piece in pieces] == [2, 2, 1]
    held = [piece[1] if isinstance(piece, tuple) else piece["labels"] for piece in pieces]
    assert torch.equal(torch.cat(held), LABELS)
    inputs = [piece[0] if isinstance(piece, tuple) else piece["input_ids"] for piece in pieces]
    rows = [rows["a"] if isinstance(rows, dict) else rows for rows in inputs]
    assert torch.equal(torch.cat(rows), ROWS)


def test_what_is_no_tensor_goes_with_every_piece() -> None:
    assert [piece["use_cache"] for piece in cut_batch(NAMED, 3)] == [False, False]
    assert take_samples(NAMED, 4, 9)["labels"].tolist() == [4]
    assert to_device(UserDict(NAMED), torch.device("meta"))["input_ids"].is_meta


def test_a_batch_without_labels_is_refused() -> None:
    with pytest.raises(InputError, match="it has input_ids"):
        count_samples({"input_ids": ROWS})
