# SPDX-License-Identifier: Apache-2.0
"""Models some of whose layers attend to a window, or cap their logits, are proven at start-up, and
a mistake in either is found."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.prefill.loaded import GEMMA2, LAYERS, WINDOW, Loaded, loaded, prove, refusal
from vllm_segreuse.kernels import cpu
from vllm_segreuse.kernels.pages import flat_pages
from vllm_segreuse.plan import ModelLayers
from vllm_segreuse.prefill import checks

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def gemma(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    with loaded(tmp_path_factory.mktemp("gemma"), request.param, **GEMMA2) as made:
        yield made


def test_a_model_with_windows_on_some_layers_is_proven(gemma: Loaded) -> None:
    runtime = prove(gemma)
    assert runtime.max_deviation < torch.finfo(gemma.first.kv_cache.dtype).eps * 8
    assert runtime.prefill.layers == ModelLayers(LAYERS, scored=(1,))


@pytest.fixture
def only_by_layer(monkeypatch: Patch) -> None:
    """Rounding may hide a mistake among random tokens: those that are made for it must find it."""
    monkeypatch.setattr(checks, "prove_passes", lambda *_: 0.0)


@pytest.mark.usefixtures("only_by_layer")
@pytest.mark.parametrize("error", [1, -1])
@pytest.mark.parametrize("window", [WINDOW, 300])
def test_a_window_that_is_off_by_one_is_found(
    error: int, window: int, gemma: Loaded, monkeypatch: Patch
) -> None:
    """Also where the scratch tokens end long before it does."""
    for layer in gemma.attention.values():
        if layer.sliding_window:
            set_window(layer, window, monkeypatch)
    prove(gemma)
    _attending(
        monkeypatch,
        lambda more: more | {"window": more["window"] + error} if "window" in more else more,
    )
    assert f"the pass does not attend to the last {window} tokens" in refusal(gemma)


@pytest.mark.usefixtures("only_by_layer")
@pytest.mark.parametrize("gemma", ["float32"], indirect=True)
@pytest.mark.parametrize(("times", "passes"), [(0.9, True), (1.1, False)])
def test_behind_a_window_attention_may_be_off_by_a_share_of_one_key_of_it(
    times: float, passes: bool, gemma: Loaded, monkeypatch: Patch
) -> None:
    """There no key with a value is seen: the output is zero, and a window's keys weigh alike."""
    attend = cpu.sparse_attention

    def inexact(out: torch.Tensor, *given: Any, **more: Any) -> None:
        attend(out, *given, **more)
        positions = given[6]
        if more.get("window") and len(positions) < 10:
            out[positions == WINDOW + 1] += times * 1e-4 / WINDOW

    monkeypatch.setattr(cpu, "sparse_attention", inexact)
    if passes:
        prove(gemma)
    else:
        assert "the pass does not attend to the last 40 tokens" in refusal(gemma)


def set_window(layer: Any, window: int, patch: Patch) -> None:
    patch.setattr(layer, "sliding_window", window)
    patch.setattr(layer.impl, "sliding_window", window)


@pytest.mark.usefixtures("only_by_layer")
def test_a_cap_that_is_forgotten_is_found(gemma: Loaded, monkeypatch: Patch) -> None:
    _attending(monkeypatch, lambda more: more | {"soft_cap": 0.0})
    assert "does not attend to the last 40 tokens, with logits capped at 5" in refusal(gemma)


def _attending(patch: Patch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    attend = cpu.sparse_attention
    patch.setattr(cpu, "sparse_attention", lambda *given, **more: attend(*given, **change(more)))


def test_a_backend_with_another_window_than_its_layer_is_found(
    gemma: Loaded, monkeypatch: Patch
) -> None:
    """Whichever of the two has one."""
    first, second, _ = gemma.attention.values()
    prove(gemma)
    monkeypatch.setattr(first.impl, "sliding_window", -1)
    assert "has a sliding window of 40, its backend of None" in refusal(gemma)
    monkeypatch.setattr(first, "sliding_window", None)
    monkeypatch.setattr(second.impl, "sliding_window", WINDOW)
    assert "has a sliding window of None, its backend of 40" in refusal(gemma)


def test_no_scores_are_computed_at_a_layer_with_a_window(gemma: Loaded, monkeypatch: Patch) -> None:
    """Neither by a program nor by a proof."""
    scored = set()
    scores = cpu.token_scores

    def noting(query: Any, positions: Any, pages: torch.Tensor, *given: Any, **more: Any) -> Any:
        scored.add(pages.data_ptr())
        return scores(query, positions, pages, *given, **more)

    monkeypatch.setattr(cpu, "token_scores", noting)
    prove(gemma)
    pages = {
        flat_pages(layer.kv_cache).data_ptr(): layer.sliding_window
        for layer in gemma.attention.values()
    }
    assert scored & pages.keys() == {at for at, window in pages.items() if not window}


def test_scores_without_the_cap_are_found(gemma: Loaded, monkeypatch: Patch) -> None:
    scores = cpu.token_scores
    monkeypatch.setattr(
        cpu, "token_scores", lambda *given, soft_cap, last: scores(*given, last=last)
    )
    assert "the scores of tokens are not the attention" in refusal(gemma)


def test_a_model_whose_last_layer_alone_sees_everything_is_refused(
    gemma: Loaded, monkeypatch: Patch
) -> None:
    *others, _ = gemma.attention.values()
    for layer in others:
        set_window(layer, WINDOW, monkeypatch)
    last = list(gemma.attention.values())[-1]
    monkeypatch.setattr(last, "sliding_window", None)
    monkeypatch.setattr(last.impl, "sliding_window", -1)
    assert "no layer before the last one attends to the whole prompt" in refusal(gemma)
