from runs.conftest import _no_hydra_left_behind, _small_backbone, small_backbone  # noqa: F401
