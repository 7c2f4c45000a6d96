# SPDX-License-Identifier: Apache-2.0
"""Loading vLLM into a command: its log, the time that it takes, the code of a model,
and what it refuses."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from segreuse_tools.model_folder import InputError

_LINE_CHARACTERS = 400


def is_installed() -> bool:
    """Whether vLLM is; it is not loaded."""
    try:
        return importlib.util.find_spec("vllm") is not None
    except ValueError:  # a module without a specification stands in its place
        return False


def quiet() -> None:
    """Call before vLLM is imported, which reads these variables once: it logs errors only, to
    standard error, and looks no name up elsewhere."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    os.environ["HF_HUB_OFFLINE"] = "1"
    # It logs each time that it tries to read a file, and raises the same in the end.
    logging.getLogger("vllm.transformers_utils.repo_utils").setLevel(logging.CRITICAL)


@contextmanager
def not_searched_for_garbage() -> Iterator[None]:
    """What is made meanwhile stays to the end, and is so much that each search takes long."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load_code(architectures: Sequence[str]) -> None:
    """Load the code of a model in this process.

    vLLM looks at it before it makes a configuration. It would do so in another process, which loads
    all of vLLM anew, to keep CUDA out of a process that forks workers; commands start no workers.

    Raises:
        ImportError: it needs a library that is not here. Names that library: transformers names
            what it could not import itself instead.
    """
    from vllm import ModelRegistry

    for name in architectures:
        if name in ModelRegistry.models:
            try:
                loaded = ModelRegistry.models[name].load_model_cls()
            except ImportError as error:
                raise _first_cause(error) from error
            ModelRegistry.register_model(name, loaded)


def _first_cause(error: ImportError) -> ImportError:
    cause = error.__cause__ or error.__context__
    return _first_cause(cause) if isinstance(cause, ImportError) else error


def refused_by_vllm(model: str, error: Exception) -> InputError:
    """Its errors over a model and the options, before an engine begins, are sentences."""
    return InputError(f"vLLM refuses {model}: {one_line(error)}")


def one_line(error: Exception) -> str:
    """vLLM's error in one line: pydantic puts lines around it, vLLM long lists behind it."""
    errors: Any = getattr(error, "errors", None)
    text = errors()[0]["msg"] if callable(errors) else str(error) or type(error).__name__
    text = text.removeprefix("Value error, ").partition(" Supported architectures:")[0]
    return textwrap.shorten(text.rstrip(".: \n"), _LINE_CHARACTERS, placeholder=" ...")
