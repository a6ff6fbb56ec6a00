"""Messages from a seed: chosen answers, and no message in two parts."""

import pytest

from mergekit_lab.tasks import PARTS, Messages


@pytest.mark.parametrize(("task_name", "choices"), [("topic", 4), ("tone", 3)])
def test_answers_are_chosen_and_parts_share_no_message(task_name: str, choices: int) -> None:
    task = Messages(name=task_name, kind=task_name)
    assert len(task.choices or ()) == choices
    prompts = [prompt for part in PARTS for prompt in task.load_samples(part).prompts]
    assert len(prompts) == len(set(prompts)) == 400 + 60 + 120
    answers = task.load_samples("test").answers
    assert all(answers.count(choice) > len(answers) / choices / 2 for choice in task.choices or ())
    assert Messages(name=task_name, kind=task_name).fingerprint() == task.fingerprint()
    assert Messages(name=task_name, kind=task_name, seed=1).fingerprint() != task.fingerprint()
