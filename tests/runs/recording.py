"""A tracker that a test can ask what it was told."""

from mergekit_lab.reporting import Tracker


class Recorder(Tracker):
    """`told` are the calls of all of them, in order: name and arguments."""

    told: list[tuple[str, dict]] = []  # noqa: RUF012

    def start(self, start):
        self.told.append(("start", vars(start)))

    def log_product(self, product):
        self.told.append(
            ("product", {"name": product.reference, "kind": product.kind, "inputs": product.inputs})
        )

    def finish(self):
        self.told.append(("finish", {}))
