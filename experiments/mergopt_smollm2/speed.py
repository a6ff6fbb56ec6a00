"""How fast a language model answers short prompts, and what a step of each optimizer costs.

    python experiments/mergopt_smollm2/speed.py --out experiments/mergopt_smollm2/speed.json

Prompts are generated, so no data is needed. Tokenizing is timed apart. A sample of the decoded answers is
compared with what the same model says to one prompt at a time, without padding; bfloat16 may let a few differ.
"""

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from arms import ARMS, BATCH, SOURCE

from mergekit_lab.backbones import LanguageModel, Objective
from mergekit_lab.batches import to_device
from mergekit_lab.evaluation import score
from mergekit_lab.tasks import Part, TextSamples, TextTask, WordProblems

OPTIMIZERS = ("adamw", "mergopt", "asam", "sam", "sgd")


@dataclass(frozen=True)
class Comparisons(TextTask):
    """Which of two numbers is larger, answered by a word: short prompts with choices."""

    name: str = "comparisons"
    choices: tuple[str, ...] | None = ("the first", "the second", "neither")
    size: int = 5000

    def make(self, part: Part) -> TextSamples:
        draw = Random(part)
        pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(self.size)]
        assert self.choices is not None
        answers = tuple(self.choices[0 if a > b else 1 if a < b else 2] for a, b in pairs)
        return TextSamples(tuple(f"Which is larger, {a} or {b}?" for a, b in pairs), answers)


def measure_seconds(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """Of something done once, and what it gave."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    answer = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, answer


def measure_answering(
    backbone: LanguageModel, model: torch.nn.Module, task: TextTask, options: Any
) -> dict[str, Any]:
    device = options.device
    objective = backbone.make_objective(task).to(device)
    tokenizing, encoded = measure_seconds(device, lambda: objective.encode("test"))  # type: ignore[attr-defined]
    few = torch.arange(min(64, options.prompts))
    score(model, objective, "test", index=few, batch_size=options.batch)
    spent, score_alone = measure_seconds(
        device, lambda: score(model, objective, "test", batch_size=options.batch)
    )
    report = {
        "prompts": options.prompts,
        "tokens_a_prompt": round(sum(map(len, encoded.prompts)) / options.prompts, 1),
        "tokenizing_seconds": round(tokenizing, 2),
        "seconds": round(spent, 2),
        "prompts_a_second": round(options.prompts / spent, 1),
        "accuracy": score_alone.value,
    }
    if task.choices is None:
        few = few[: options.alone]
        alone = score(model, objective, "test", index=few, batch_size=1).predictions
        report["same_without_padding"] = [
            sum(a == b for a, b in zip(alone, score_alone.predictions, strict=False)),
            len(few),
        ]
        report["first_answers"] = alone[:8]
    return report


def measure_steps(backbone: LanguageModel, objective: Objective, arm: str, options: Any) -> float:
    """Seconds a step of 16 samples, alone on the device; the first ones are left out."""
    device = options.device
    model = backbone.make_model().to(device).train()
    optimizer = ARMS[arm][0]([(n, p) for n, p in model.named_parameters()] if arm not in ("adamw", "sgd")
                             else model.parameters())  # fmt: skip
    batch = to_device(objective.make_batch("train", torch.arange(BATCH)), device)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = objective.compute_loss(model, batch) / objective.count_items(batch)
        loss.backward()
        return loss.detach()

    def run(count: int) -> None:
        for _ in range(count):
            optimizer.step(closure)

    run(options.warmup)
    spent, _ = measure_seconds(device, lambda: run(options.steps))
    return round(spent / options.steps, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", default=SOURCE, help="a folder, a .gguf file, a hub id")
    parser.add_argument("--prompts", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--alone", type=int, default=32, help="prompts that are also asked one at a time")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute = "bfloat16" if options.device.type == "cuda" else "float32"
    backbone = LanguageModel(source=options.source, max_length=192, precision=compute)
    loading, model = measure_seconds(options.device, lambda: backbone.make_model().to(options.device))
    size = options.prompts
    tasks: dict[str, TextTask] = {
        "label_scoring": Comparisons(size=size),
        "generation": WordProblems(train_size=BATCH, validation_size=1, test_size=size),
    }
    result: dict[str, Any] = {
        "model": backbone.identify()["weights"],
        "card": torch.cuda.get_device_name() if options.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "compute": compute,
        "batch": options.batch,
        "loading_seconds": round(loading, 1),
    }
    for name, task in tasks.items():
        result[name] = measure_answering(backbone, model, task, options)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    objective = backbone.make_objective(tasks["generation"]).to(options.device)
    del model
    result["seconds_a_step"] = {
        arm: measure_steps(backbone, objective, arm, options) for arm in options.optimizers
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
