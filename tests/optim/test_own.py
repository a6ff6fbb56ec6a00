"""What a class of one's own gets from the classes that it derives from."""

import torch
from torch import optim as torch_optim

from mergekit_lab import optim
from mergekit_lab.optim import SAM, MergOPT
from mergekit_lab.optim.wrapper import WrappedOptimizer
from optim.problems import BASES, Problem, assert_equal_bits


class First(SAM):
    """Steps with the first gradient: its base optimizer, at two evaluations."""

    saved_attributes = ("mine",)

    def __init__(self, named_parameters, base) -> None:
        self.mine = 3
        super().__init__(named_parameters, base)

    def mix(self, params, first, second):
        return first


def test_mix_alone_makes_the_gradient_of_the_base() -> None:
    mixed, plain = Problem(), Problem()
    optimizer = First(mixed.model.named_parameters(), base=BASES["sgd"])
    optimizer.step(mixed.closure)
    base = BASES["sgd"](plain.model.parameters())
    plain.closure()
    base.step()
    assert len(mixed.losses) == 2
    assert_equal_bits(mixed.copy_weights(), plain.copy_weights())


def test_what_a_class_saves_joins_what_its_parents_save() -> None:
    assert First.saved_attributes == ("rho", "ascent_fraction", "sync_ascent", "mine")
    optimizer = First(Problem().model.named_parameters(), base=BASES["sgd"])
    assert optimizer.state_dict()["wrapper"] == {
        "class": "First", "rho": 0.05, "ascent_fraction": 1.0, "sync_ascent": True, "mine": 3,
    }  # fmt: skip


def test_only_classes_that_say_so_are_recorded() -> None:
    shipped = [cls for cls in vars(optim).values() if isinstance(cls, type)]
    for cls in shipped:
        if issubclass(cls, WrappedOptimizer):
            assert cls.recordable, cls
    assert MergOPT([torch.zeros(1, requires_grad=True)], base=torch_optim.SGD).replayable

    class Mine(MergOPT):
        pass

    assert not Mine([torch.zeros(1, requires_grad=True)], base=torch_optim.SGD).replayable
