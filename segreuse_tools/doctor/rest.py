# SPDX-License-Identifier: Apache-2.0
"""What is left of a model without what vLLM lacks here: libraries for images, kernels of quantised
weights, code of the model's own. None changes what segment reuse has to know of the layers for
text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from segreuse_tools.model_folder import text_part

_LAYERS = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), "Qwen2ForCausalLM"),
    **dict.fromkeys(("qwen3_vl_moe_text", "qwen3_omni_moe_text"), "Qwen3MoeForCausalLM"),
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
}
"""By which model's code vLLM computes layers for text that transformers has inside a model that
takes images only."""

_ROPE = ("rope_parameters", "rope_scaling")

_READ_EARLY = ("max_position_embeddings", "head_dim", "hidden_size", "num_attention_heads")
_OTHER_NAMES = {
    **dict.fromkeys(("num_layers", "n_layer"), "num_hidden_layers"),
    **dict.fromkeys(("n_head", "n_heads"), "num_attention_heads"),
    **dict.fromkeys(("n_embd", "d_model"), "hidden_size"),
}
"""Keys that classes know by another name, too."""

_QUANTISED = "hf_quant_config.json"
"""Where ModelOpt writes of quantisation, also where `config.json` says nothing of it."""


class Rest(NamedTuple):
    """A configuration without some of its parts.

    Attributes:
        config: as `config.json` would have it.
        without: what was left out, for a note.
    """

    config: dict[str, Any]
    without: str


def rest_of(config: dict[str, Any], folder: Path) -> Rest | None:
    """The layers for text of a model, in unquantised weights; None: there is nothing to leave out,
    or no architecture has these layers alone.

    Args:
        config: of the model.
        folder: that it is of.
    """
    text = _text(config, folder)
    is_all = text is config
    left = [] if is_all else ["as a model of text alone"]
    if "quantization_config" in {**config, **text} or (folder / _QUANTISED).is_file():
        left.append("without quantisation (weights are counted so)")
    if not has_class(text):
        left.append("without the model's own code")
        if text.get("use_sliding_window") is False:  # which classes go by
            text = {**text, "sliding_window": None}
    named = config["architectures"] if is_all else _architectures(text)
    if not left or not named:
        return None
    dtype = text.get("dtype") or config.get("dtype") or config.get("torch_dtype")
    rest = {k: v for k, v in text.items() if k not in ("quantization_config", "auto_map")}
    rest |= {key: _of_text(rest[key]) for key in _ROPE if isinstance(rest.get(key), dict)}
    rest |= {"architectures": named} | ({} if dtype is None else {"dtype": dtype})
    rest.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", True))
    return Rest(rest, " and ".join(left))


def _of_text(rope: dict[str, Any]) -> dict[str, Any]:
    """M-RoPE without what it has for images: of text all three positions are the same."""
    kept = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}


def _text(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the file says of the layers for text. Older files of models that take images say it
    beside what they say of images: the class of the configuration knows which is which."""
    part = text_part(config)
    if part is not config:
        return part
    of_class = text_of_class(folder)
    if of_class is None or of_class.model_type == config.get("model_type"):
        return config
    return dict(of_class.to_dict())


def text_of_class(folder: Path) -> Any:
    """The layers for text as the class of a configuration has them, with what it sets by default;
    None: vLLM knows no class of it."""
    from vllm.transformers_utils.config import get_config_parser, get_hf_text_config

    try:  # without vLLM's `get_config`, which tries again and logs each time
        _, config = get_config_parser("hf").parse(folder, trust_remote_code=False)
        return get_hf_text_config(config)
    except Exception:  # of the class, or by what it makes of the file
        return None


def has_class(text: dict[str, Any]) -> bool:
    """Whether vLLM has a class for this part of a configuration."""
    from transformers import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    kind = text.get("model_type")
    return isinstance(kind, str) and (kind in CONFIG_MAPPING or kind in _CONFIG_REGISTRY)


@contextmanager
def plain_class(config: dict[str, Any]) -> Iterator[None]:
    """Have vLLM read a configuration whose class is the model's own as the file has it."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    kind = config.get("model_type")
    if has_class(config) or not isinstance(kind, str):
        yield
        return
    # With the first of these transformers puts older keys there, and reads the others for it.
    known: dict[str, Any] = {"rope_parameters": None, "model_type": kind}
    known |= {key: config[key] for key in _READ_EARLY if key in config}
    names = {name: key for key, name in _OTHER_NAMES.items() if key in config}
    known["attribute_map"] = {name: key for name, key in names.items() if name not in config}
    AutoConfig.register(kind, type("OwnConfig", (PretrainedConfig,), known))
    try:
        yield
    finally:
        CONFIG_MAPPING._extra_content.pop(kind)


def _architectures(text: dict[str, Any]) -> list[str]:
    """Those that compute the part alone: by its type, or as it names them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry

    kind = str(text.get("model_type"))
    if kind in _LAYERS:
        return [_LAYERS[kind]]
    named = text.get("architectures") or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)]
    return [name for name in named if isinstance(name, str) and name in ModelRegistry.models]
