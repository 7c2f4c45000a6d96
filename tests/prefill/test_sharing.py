# SPDX-License-Identifier: Apache-2.0
"""Models of which some layers share the KV of others, and each layer has an input of its own for
each token (Gemma 4 E2B and E4B): a pass ends in front of the first that shares."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.prefill.loaded import HEAD_SIZE, WINDOW, Loaded, loaded, prove, refusal
from vllm_segreuse.model.layer_state import LayerInputs
from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.prefill import checks
from vllm_segreuse.prefill.proofs.causal import sharing_layers

WRITING, SHARING = 4, 5
GEMMA4_E: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": WINDOW,
    "num_hidden_layers": WRITING + SHARING,
    "layer_types": [*["sliding_attention", "full_attention"] * 4, "sliding_attention"],
    "global_head_dim": HEAD_SIZE,
    "num_kv_shared_layers": SHARING,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "use_double_wide_mlp": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    with loaded(tmp_path_factory.mktemp("gemma"), **GEMMA4_E) as made:
        yield made


def test_a_pass_runs_the_layers_that_write_kv_and_is_proven(gemma: Loaded) -> None:
    runtime = prove(gemma)
    assert runtime.max_deviation < 1e-5
    layers = runtime.prefill.layers
    assert (layers.count, layers.sharing, layers.in_all) == (4, 5, 9)
    assert layers.scored == (1,), "the last that writes is not asked"
    assert len(runtime.prefill.aligner.layers) == WRITING


def test_what_enters_from_boundary_states_is_proven(gemma: Loaded) -> None:
    """A dry run of the model for its inputs must not be taken for what enters these layers."""
    assert prove(gemma, cuts=tuple(range(WRITING))).max_deviation < 1e-5


def run_with(change: Callable[[int, Any], Any]) -> Callable[..., Any]:
    """`DecoderStack.run`, in which the inputs of each layer are others."""
    run = DecoderStack.run

    def changed(self: DecoderStack, first: int, last: int, inputs: LayerInputs, state: Any) -> Any:
        further = [
            {name: change(index, inputs.further) for name in each}
            for index, each in enumerate(inputs.further)
        ]
        return run(self, first, last, inputs._replace(further=further), state)

    return changed


def own(further: Any, index: int) -> torch.Tensor:
    found = further[index]["per_layer_input"]
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda index, further: own(further, index) * 0,
        lambda index, further: own(further, 0),
        lambda index, further: own(further, index).roll(1, 0),
    ],
    ids=["none", "of the first layer", "of the token beside"],
)
def test_inputs_of_another_layer_or_token_are_found(
    change: Any, gemma: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecoderStack, "run", run_with(change))
    assert "does not reproduce this model's own forward" in refusal(gemma)


def test_a_pass_that_ends_too_early_is_found(
    gemma: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecoderStack, "write_kv", lambda *_: None)
    assert "does not reproduce this model's own forward" in refusal(gemma)


def test_passes_are_not_compiled(gemma: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """That would run all layers, also those whose output is nobody's input."""
    monkeypatch.setattr(checks, "may_run_compiled", lambda _: True)
    assert not prove(gemma).prefill.runner.settings.compiled


def test_the_model_is_asked_for_inputs_where_it_is_not_compiled(
    gemma: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where tokens do not attend: their keys are only compared."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    embed, asked = DecoderStack.embed, []

    def noted(self: DecoderStack, *given: torch.Tensor) -> Any:
        asked.append(is_forward_context_available() and get_forward_context().skip_compiled)
        return embed(self, *given)

    monkeypatch.setattr(DecoderStack, "embed", noted)
    prove(gemma)
    assert asked
    assert all(asked)


def test_a_draft_beside_them_is_refused(gemma: Loaded) -> None:
    layers = gemma.attention
    assert len(sharing_layers(layers, has_draft=False)) == SHARING
    with pytest.raises(
        checks.UnsupportedModelError,
        match=r"layers\.4\..* shares the KV of another layer, which is not proven beside a draft",
    ):
        sharing_layers(layers, has_draft=True)
    writing = {n: it for n, it in layers.items() if it.kv_sharing_target_layer_name is None}
    assert sharing_layers(writing, has_draft=True) == {}
