"""Content-addressed artifacts: what is made once is found again."""

from mergekit_lab.store.store import SCHEMA, Artifact, Store, make_key

__all__ = ["SCHEMA", "Artifact", "Store", "make_key"]
