"""Artifacts named by a hash of what decides them, so that nothing is made twice."""

from mergekit_lab.store.artifact import Artifact, make_key
from mergekit_lab.store.store import Store, Workspace

__all__ = ["Artifact", "Store", "Workspace", "make_key"]
