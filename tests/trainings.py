"""Trainings of the tiny model, by every optimizer, that several test files share."""

from functools import partial

import torch
from tiny import TinyEncoder, make_tiny_objective

from mergekit_lab.optim import ASAM, PGN, RWP, SAGM, SAM, SSAMD, SSAMF, SWA, WASAM, FriendlySAM, MergOPT
from mergekit_lab.training import TrainingSettings, finetune

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
OPTIMIZERS = {
    "adamw": ADAMW,
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "sam": partial(SAM, base=ADAMW, rho=0.05),
    "asam": partial(ASAM, base=ADAMW, rho=0.5, scaling="saft"),
    "mergopt": partial(MergOPT, base=ADAMW, scale=1e-3),
    "mergopt_worst": partial(MergOPT, base=ADAMW, scale=1e-3, worst_of=2),
    "sam_quarter": partial(SAM, base=ADAMW, rho=0.05, ascent_fraction=0.25),
    "friendly_sam": partial(FriendlySAM, base=ADAMW),
    "pgn": partial(PGN, base=ADAMW),
    "sagm": partial(SAGM, base=ADAMW),
    "ssamf": partial(SSAMF, base=ADAMW),
    "ssamd": partial(SSAMD, base=ADAMW, steps=12),
    "swa": partial(SWA, base=ADAMW, steps=12),
    "wasam": partial(WASAM, base=ADAMW, steps=12),
    "rwp": partial(RWP, base=ADAMW),
}
SETTINGS = TrainingSettings(steps=12, batch_size=8, lr=1e-2, weight_decay=0.1, warmup_steps=2, validations=4)


def run(folder, head, make_optimizer=ADAMW, settings=SETTINGS, on_metrics=None, tasks=("a",), trainer=()):
    return finetune(
        TinyEncoder(),
        {task: make_tiny_objective(head) for task in tasks},
        make_optimizer,
        settings,
        seed=0,
        resume=folder,
        trainer={"accelerator": "cpu", "enable_progress_bar": False, **dict(trainer)},
        on_metrics=on_metrics,
    )


class Cut(Exception):
    pass


def cut_at(last: int):
    """What ends a training at a step, given as `on_metrics`."""

    def cut(metrics, step: int) -> None:
        if step == last:
            raise Cut

    return cut
