"""A tracker that a test can ask what it was told."""

from mergekit_lab.reporting import Tracker


class RecordingTracker(Tracker):
    """`calls` are the calls of all of them, in order: name and arguments."""

    calls: list[tuple[str, dict]] = []  # noqa: RUF012

    def start(self, start):
        self.calls.append(("start", vars(start)))

    def log_product(self, product):
        self.calls.append(
            ("product", {"name": product.reference, "kind": product.kind, "inputs": product.inputs})
        )

    def finish(self):
        self.calls.append(("finish", {}))
