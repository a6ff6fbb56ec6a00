"""Make `visual.safetensors`: an image tower of 0.12 M parameters, taught to give the shipped one's features.

`PYTHONPATH=. python tests/data/glyph_clip/make.py`: a minute on one core. Pictures are of training parts.
"""

import json
from pathlib import Path

import torch
from open_clip import factory
from safetensors.torch import save_file
from torch.nn.functional import cosine_similarity

from mergekit_lab.backbones import OpenClip
from mergekit_lab.tasks import Digits, Latin, Mnist, Style

HERE = Path(__file__).parent
STEPS, BATCH = 500, 128


def make() -> None:
    shipped = OpenClip("glyph-clip", "asset:glyph_clip")
    teacher = shipped.make_model()
    factory._MODEL_CONFIGS["small"] = json.loads((HERE / "glyph_clip.json").read_text())
    student = OpenClip("small", None).make_model().train()
    tasks = [Digits(), Latin(), Mnist(), Style()]
    images = torch.cat([task.load_samples("train").images for task in tasks])
    with torch.no_grad():
        wanted = torch.cat([teacher(part) for part in images.split(500)])
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, STEPS)
    for step in range(STEPS):
        index = torch.randint(len(images), (BATCH,), generator=generator)
        loss = 1 - cosine_similarity(student(images[index]), wanted[index]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(step, f"{loss.item():.3f}", flush=True)
    state = {name: value.half().contiguous() for name, value in student.state_dict().items()}
    save_file(state, HERE / "visual.safetensors")
    for task in tasks[:2]:
        head = shipped.make_zero_shot_head(task.classes, task.templates)
        part = task.load_samples("test")
        with torch.no_grad():
            correct = (student.eval()(part.images) @ head.T).argmax(1) == part.labels
        print(task.name, f"{correct.float().mean():.3f}")


if __name__ == "__main__":
    make()
