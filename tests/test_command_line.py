"""What Hydra complains of becomes one line with the nearest name."""

import pytest
from composing import composed
from hydra.errors import HydraException

from mergekit_lab.command_line import explain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["+experiment=quikstart"], "there is no experiment 'quikstart'; did you mean 'quickstart'?"),
        (["+experiment=merge_checkpoint"], "did you mean 'merge_checkpoints'?"),
        (["merger=tiess"], "there is no merger 'tiess'; did you mean 'ties'?"),
        (["optimizer=adamww"], "there is no optimizer 'adamww'; did you mean 'adamw'?"),
        (["+experiment=merge_checkpoints", "merger=tiess"], "did you mean 'ties'?"),
        (["training.step=20"], "unknown key 'training.step'; did you mean 'steps'?"),
        (
            ["optimizer=sam", "optimizer.base.learning=1"],
            "unknown key 'optimizer.base.learning'; known: lr, betas",
        ),
        (["optimzer=sam"], "unknown key 'optimzer'; did you mean 'optimizer'?"),
        (["sede=1"], "unknown key 'sede'; did you mean 'seed'?"),
        (["+experiment=merge_checkpoints", "joint=false"], "unknown key 'joint'"),
    ],
)
def test_a_mistyped_name_is_one_line_with_the_nearest_one(arguments: list[str], message: str) -> None:
    with pytest.raises(HydraException) as caught:
        composed(arguments)
    said = explain(caught.value)
    assert message in said
    assert "\n" not in said
