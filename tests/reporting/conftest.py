"""Synthetic results: a small study whose every number follows from a formula."""

import gc
import socket
from collections.abc import Callable
from typing import Any

import pytest
from reporting.pages import report

from mergekit_lab.reporting import Record

EXAMPLE: dict[str, Any] = {
    "backbone": "ViT-B-32",
    "suite": "two",
    "finetuning": "full",
    "optimizer": "adamw",
    "kind": "merged",
    "merger": "ties",
    "coefficient": 0.3,
    "task": "dtd",
    "part": "test",
    "metric": "accuracy",
    "value": 0.6,
    "expert_value": 0.8,
    "zero_shot_value": 0.4,
    "seed": 0,
    "wall_seconds": 1.5,
    "peak_memory_bytes": 2**30,
    "model_key": "m0",
    "evaluation_key": "e0",
    "reused": False,
}


def make_record(**changes: Any) -> Record:
    """A record that differs from `EXAMPLE` in `changes`; its keys follow from its coordinates."""
    entry = {**EXAMPLE, **changes}
    if entry["kind"] != "merged":
        entry |= {"merger": None, "coefficient": None}
    where = [entry[name] for name in ("optimizer", "kind", "merger", "coefficient", "seed")]
    where += [entry["task"]] if entry["kind"] == "expert" else []
    keys = {"model_key": f"m{where}", "evaluation_key": f"e{where}{entry['task']}{entry['part']}"}
    return Record(
        **{**entry, **keys, **changes, "merger": entry["merger"], "coefficient": entry["coefficient"]}
    )


def make_study(tasks: int, mergers: int, optimizers: int = 1, seeds: int = 1) -> list[Record]:
    """Every model on every task; values in 0.1..0.99, different for every cell."""
    records = []
    for optimizer in range(optimizers):
        for seed in range(seeds):
            for task in range(tasks):
                expert = 0.99 - 0.012 * ((7 * task + optimizer) % 10) - 0.002 * seed
                zero_shot = 0.3 + 0.04 * ((3 * task) % 11)
                common = {
                    "optimizer": f"optimizer{optimizer}",
                    "task": f"task{task}",
                    "seed": seed,
                    "expert_value": expert,
                    "zero_shot_value": zero_shot,
                }
                records.append(make_record(kind="zero_shot", value=zero_shot, **common))
                records.append(make_record(kind="expert", value=expert, **common))
                for merger in range(mergers):
                    share = 0.35 + 0.5 * merger / max(mergers, 2) + 0.03 * optimizer + 0.01 * (seed % 3)
                    value = zero_shot + (expert - zero_shot) * share
                    records.append(
                        make_record(
                            merger=f"merger{merger}", coefficient=0.1 * (1 + merger % 5), value=value, **common
                        )
                    )
                records.append(make_record(kind="joint", value=expert - 0.02, **common))
    return records


@pytest.fixture(scope="session")
def record() -> Callable[..., Record]:
    return make_record


@pytest.fixture(scope="session")
def study() -> Callable[..., list[Record]]:
    return make_study


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A listening socket in place of the W&B server; home, netrc and settings are empty."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for name in (
            "WANDB_API_KEY",
            "WANDB_MODE",
            "WANDB_IDENTITY_TOKEN_FILE",
            "WANDB_ERROR_REPORTING",
            "NETRC",
        ):
            monkeypatch.setenv(name, "")  # recorded, so that what the tracker sets is undone
            monkeypatch.delenv(name)
        for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            monkeypatch.setenv(name, str(tmp_path / "home"))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("WANDB_SILENT", "true")
        monkeypatch.chdir(tmp_path)
        import wandb

        wandb.teardown()
        yield listener
        wandb.teardown()
        gc.collect()


@pytest.fixture(scope="module")
def written(tmp_path_factory, study):
    """What a report of two tasks and two merges wrote; only read."""
    return report(tmp_path_factory.mktemp("run"), study(tasks=2, mergers=2))
