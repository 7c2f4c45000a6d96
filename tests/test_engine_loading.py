# SPDX-License-Identifier: Apache-2.0
"""How a command loads vLLM: quietly, and without a search for garbage that lasts."""

import gc
import os
from contextlib import ExitStack

import pytest

from segreuse_tools.engine_loading import load_code, not_searched_for_garbage, quiet


def test_garbage_is_searched_for_again_whatever_became_of_loading() -> None:
    frozen = gc.get_freeze_count()
    loading = ExitStack()
    loading.enter_context(not_searched_for_garbage())
    assert not gc.isenabled()
    loading.__exit__(ImportError, ImportError(), None)
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen, "what was loaded is not looked at again"
    gc.unfreeze()


@pytest.mark.parametrize("level", [None, "DEBUG"])
def test_vllm_says_errors_only_unless_asked_for_more(
    level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "before")  # so that it is put back
        monkeypatch.delenv(name)
    if level:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    quiet()
    assert os.environ["VLLM_LOGGING_LEVEL"] == (level or "ERROR")
    assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_the_library_is_named_that_something_else_could_not_be_imported_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(self: object) -> None:
        try:
            raise ModuleNotFoundError("No module named 'torchvision'")
        except ModuleNotFoundError as error:
            raise ImportError("Could not import module 'Gemma4Processor'") from error

    from vllm import ModelRegistry

    monkeypatch.setattr(type(ModelRegistry.models["LlamaForCausalLM"]), "load_model_cls", load)
    with pytest.raises(ImportError, match=r"^No module named 'torchvision'$"):
        load_code(["LlamaForCausalLM"])
