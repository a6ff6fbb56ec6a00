"""Output that may have no reader any more: a pager was quit, or a disk is full. The computation continues."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from typing import Any


class PlainFormatter(logging.Formatter):
    """Prints the message alone, with "warning: " before a warning."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        marked = record.levelno == logging.WARNING and not text.lower().startswith("warning")
        return f"warning: {text}" if marked else text


class _Console(io.FileIO):
    """Drops what cannot be written. The first time, it says so on stderr."""

    lost = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not self.lost and self.fileno() != 2:
                with suppress(OSError):
                    os.write(
                        2, f"the output cannot be written ({error.strerror}), and the work goes on\n".encode()
                    )
            self.lost = True
            return memoryview(data).nbytes


def outlive_console() -> None:
    """From here on, writing to stdout or stderr never raises.

    Characters that they cannot encode are escaped. If one was closed before this process began, it becomes
    `/dev/null`, so that no file opened later gets its descriptor.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
        if number:
            setattr(sys, ("stdout", "stderr")[number - 1], open(number, "w", closefd=False))  # noqa: SIM115
    os.close(number)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):  # another program's own
            continue
        with suppress(OSError):
            stream.flush()
        raw = _Console(stream.fileno(), "w", closefd=False)
        wrapper = io.TextIOWrapper(
            raw if stream.write_through else io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, wrapper)


def is_watched() -> bool:
    """Whether a person looks at what is printed: in a terminal, or in a notebook."""
    from rich.console import Console

    console = Console()
    return console.is_terminal or console.is_jupyter
