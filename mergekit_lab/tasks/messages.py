"""Messages to a shop from a seeded generator: two tasks with fixed answers that a small model learns fast.

`topic` asks which department a message is for, `tone` how its writer feels. Both use the same kind of message.
An expert in one knows little about the other, so a merge has something to lose.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from mergekit_lab.ranges import require_choice

from .drawn_text import DrawnText

_TOPICS = {
    "billing": (
        "the invoice of {day} lists the {thing} twice", "my card was charged again for the {thing}",
        "the amount for the {thing} differs from the price I saw on {day}", "I need a receipt for the {thing}",
    ),
    "delivery": (
        "the parcel with the {thing} has not come since {day}", "the courier left the {thing} with a neighbor",
        "tracking of the {thing} has stood still since {day}", "the {thing} went to my old address",
    ),
    "returns": (
        "I want to send the {thing} back", "the {thing} came in the wrong size on {day}",
        "the {thing} does not fit, I would like another one", "which label goes on the box with the {thing}",
    ),
    "account": (
        "I cannot sign in to see the {thing}", "my password was changed on {day}",
        "please put my new email beside the order of the {thing}", "the page asks me for a code since {day}",
    ),
}  # fmt: skip
_TONES = {
    "angry": ("This is the third time I write.", "I have had enough.", "Nobody answers, it is a disgrace."),
    "calm": ("I am writing about order {number}.", "This is about order {number}.", "My order is {number}."),
    "happy": ("I love your shop.", "Thank you so much for the kind help.", "You made my week."),
}
_THINGS = ("boots", "lamp", "kettle", "jacket", "chair", "camera", "blanket", "clock", "guitar", "tent")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_QUESTIONS = {
    "topic": f"Which department is this for: {', '.join(_TOPICS)}?",
    "tone": f"How does the writer feel: {', '.join(_TONES)}?",
}
_CHOICES = {"topic": tuple(_TOPICS), "tone": tuple(_TONES)}


@dataclass(frozen=True)
class Messages(DrawnText):
    """What a message to a shop is about, or how its writer feels; see `DrawnText`.

    Args:
        kind: topic or tone. Its answers become the task's `choices`, if these are null.
    """

    name: str = "topic"
    kind: str = "topic"
    max_new_tokens: int = 4
    train_size: int = 400
    validation_size: int = 60
    test_size: int = 120

    stream = "messages/"

    def __post_init__(self) -> None:
        require_choice(f"task {self.name!r}: kind", self.kind, _CHOICES)
        if self.choices is None:
            object.__setattr__(self, "choices", _CHOICES[self.kind])
        super().__post_init__()

    def draw_sample(self, draw: Random) -> tuple[str, str]:
        topic, tone = draw.choice(list(_TOPICS)), draw.choice(list(_TONES))
        statement = draw.choice(_TOPICS[topic]).format(thing=draw.choice(_THINGS), day=draw.choice(_DAYS))
        felt = draw.choice(_TONES[tone]).format(number=draw.randint(100, 999))
        sentences = [f"{statement[0].upper()}{statement[1:]}.", felt]
        draw.shuffle(sentences)
        return f"{' '.join(sentences)}\n{_QUESTIONS[self.kind]}\n", {"topic": topic, "tone": tone}[self.kind]
