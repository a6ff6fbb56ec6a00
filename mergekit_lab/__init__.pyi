from mergekit_lab.checkpoints import open_checkpoint as open_checkpoint
from mergekit_lab.commands.expand import expand as expand
from mergekit_lab.commands.extract import extract as extract
from mergekit_lab.commands.merge_checkpoints import merge as merge
from mergekit_lab.errors import InputError as InputError
from mergekit_lab.from_python import run as run
from mergekit_lab.merging import merge_state_dicts as merge_state_dicts

__version__: str
__all__ = [
    "InputError",
    "__version__",
    "expand",
    "extract",
    "merge",
    "merge_state_dicts",
    "open_checkpoint",
    "run",
]
