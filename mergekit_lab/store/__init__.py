"""Content-addressed artefacts: what is made once is found again."""

from mergekit_lab.store.store import SCHEMA, Artefact, Store, content_key

__all__ = ["SCHEMA", "Artefact", "Store", "content_key"]
