"""Artifacts named by a hash of what decides them, so that nothing is made twice."""

from mergekit_lab.store.store import Artifact, Store, make_key

__all__ = ["SCHEMA", "Artifact", "Store", "make_key"]
