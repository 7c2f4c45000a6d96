# SPDX-License-Identifier: Apache-2.0
"""A chunk of a pass has a mapping of its own; the step's is put back, whatever happens."""

from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest
from vllm.lora.layers import LoRAMapping, LoRAMappingType
from vllm.lora.model_manager import LoRAModelManager

from vllm_segreuse.compat.lora_manager import Adapters

STEP = LoRAMapping((1, 1, 2, 0), (1, 2, 0), is_prefill=True)


class Manager(LoRAModelManager):
    """vLLM's manager without a model: notes what its layers are given."""

    def __init__(self, loaded: list[int | None]) -> None:
        self.lora_index_to_id = loaded
        self.set: list[LoRAMapping] = []
        self._last_mapping = self._last_slot_layout = None

    def _set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        unknown = {*mapping.index_mapping} - {0, *self.lora_index_to_id}
        if unknown:
            raise KeyError(unknown)
        self.set.append(mapping)


def applied(manager: Manager, lora_id: int, num_tokens: int) -> AbstractContextManager[None]:
    return Adapters(SimpleNamespace(lora_manager=manager)).applied(lora_id, num_tokens)


@pytest.fixture
def manager() -> Manager:
    made = Manager([1, 2])
    made.set_adapter_mapping(STEP)
    return made


def test_the_chunk_has_its_mapping_and_the_step_gets_its_own_back(manager: Manager) -> None:
    with applied(manager, 2, 3):
        [_, chunk] = manager.set
    assert chunk.index_mapping == (2, 2, 2)
    assert chunk.prompt_mapping == (2,)
    assert chunk.is_prefill
    assert chunk.type == LoRAMappingType.LANGUAGE
    assert manager.set == [STEP, chunk, STEP]


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt, GeneratorExit])
def test_the_step_gets_its_mapping_back_after_an_error(
    error: type[BaseException], manager: Manager
) -> None:
    with pytest.raises(error), applied(manager, 2, 1):
        raise error
    assert manager.set[-1] is STEP


def test_an_adapter_that_is_not_loaded_is_an_error_and_changes_nothing(manager: Manager) -> None:
    with pytest.raises(KeyError), applied(manager, 3, 1):
        pytest.fail("it was computed without its adapter")
    assert manager.set == [STEP]


def test_a_mapping_of_an_earlier_step_whose_adapter_has_gone_is_not_put_back(
    manager: Manager,
) -> None:
    manager.lora_index_to_id[1] = None
    with applied(manager, 0, 1):
        pass
    assert len(manager.set) == 2
    manager.set_adapter_mapping(LoRAMapping((1,), (1,), is_prefill=True))
    assert len(manager.set) == 3, "the next step sets its own"


def test_before_the_first_step_nothing_is_put_back() -> None:
    manager = Manager([None])
    with applied(manager, 0, 2):
        pass
    assert len(manager.set) == 1


def test_without_lora_nothing_is_set() -> None:
    with Adapters(object()).applied(0, 3):
        pass
