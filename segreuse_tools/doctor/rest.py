# SPDX-License-Identifier: Apache-2.0
"""What is left of a model without what vLLM lacks here: libraries for images, kernels of quantised
weights. Neither changes what segment reuse has to know of the layers for text."""

from __future__ import annotations

from typing import Any, NamedTuple

from segreuse_tools.model_folder import text_part


class Rest(NamedTuple):
    """A configuration without some of its parts.

    Attributes:
        config: as `config.json` would have it.
        without: what was left out, for a note.
    """

    config: dict[str, Any]
    without: str


def rest_of(config: dict[str, Any]) -> Rest | None:
    """The layers for text of a model, in unquantised weights; None: there is nothing to leave out,
    or no architecture has these layers alone."""
    text = text_part(config)
    left = [] if text is config else ["as a model of text alone"]
    if "quantization_config" in {**config, **text}:
        left.append("without quantisation (weights are counted so)")
    named = config["architectures"] if text is config else _architectures(text)
    if not left or not named:
        return None
    dtype = text.get("dtype") or config.get("dtype") or config.get("torch_dtype")
    rest = {key: value for key, value in text.items() if key != "quantization_config"}
    rest |= {"architectures": named} | ({} if dtype is None else {"dtype": dtype})
    return Rest(rest, " and ".join(left))


def _architectures(text: dict[str, Any]) -> list[str]:
    """Those that the part names, or what transformers has for a model of its type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry

    of_type = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(text.get("model_type")))
    named = text.get("architectures") or [of_type]
    return [name for name in named if isinstance(name, str) and name in ModelRegistry.models]
