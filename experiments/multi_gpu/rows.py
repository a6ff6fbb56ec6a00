"""PartRows of measurements in a JSON file, each measured once."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch


class PartRows:
    """The rows of one part on one number of cards; each is measured once."""

    def __init__(self, options: argparse.Namespace) -> None:
        label = options.label or f"{len(options.devices)}gpu"
        self.file = options.out / f"{options.part}_{label}.json"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            self.content = json.loads(self.file.read_text())
            return
        card = "cpu" if options.dry else torch.cuda.get_device_name(0)
        self.content = {
            "part": options.part,
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "date": datetime.now().isoformat(timespec="seconds"),
            "card": card,
            "cards": len(options.devices),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "rows": [],
        }

    def add(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        if any(row["name"] == name for row in self.content["rows"]):
            return
        begun = time.perf_counter()
        try:
            values = measure()
        except Exception as error:
            values = {"error": f"{type(error).__name__}: {error}"[:500]}
        row = {"name": name, **values, "whole_seconds": round(time.perf_counter() - begun, 2)}
        print(json.dumps(row), flush=True)
        self.content["rows"].append(row)
        self.file.write_text(json.dumps(self.content, indent=1))
