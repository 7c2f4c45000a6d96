# SPDX-License-Identifier: Apache-2.0
"""Where a model's `config.json` is, and whether it contradicts itself. Nothing is downloaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """What the command was given cannot be examined; one sentence says why."""


_COUNTS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)

_LAYERS, _MOST = 10_000, 2**31
"""With so many layers vLLM takes minutes to say no, with more bytes than there are it fails."""

_BY_LAYER = (
    *("layer_types", "layers_block_type", "mlp_layer_types", "hybrid_layer_pattern"),
    *("no_rope_layers", "moe_layer_freq"),
)
"""Keys whose value may be a list with an entry of each layer, or none."""

_TEXT_PARTS = ("text_config", "llm_config", "language_config")


def find_model(model: str, revision: str | None = None) -> Path:
    """The folder with the model's `config.json`.

    Args:
        model: a folder, or the name of a model in the local cache of the Hugging Face hub.
        revision: branch, tag or commit of a model in that cache; None: `main`.

    Raises:
        InputError: it is neither.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(model)
    try:
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise InputError(f"the folder {model} has no config.json")
            return folder
        if folder.exists():
            raise InputError(f"{model} is a file: name the folder that holds config.json")
    except OSError as error:  # it may not be looked at
        raise InputError(f"cannot read {model}: {error.strerror}") from None
    try:
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        at = "" if revision is None else f" (revision {revision})"
        raise InputError(
            f"{model}{at} is neither a folder nor a model in the local Hugging Face cache; nothing "
            "is downloaded: fetch its config.json, and name the folder"
        )
    return Path(cached).parent


def read_config(folder: Path, overrides: object = None) -> dict[str, Any]:
    """The content of `config.json`, once it contradicts itself nowhere.

    Args:
        folder: of the model.
        overrides: what vLLM is to read in place of it (`--hf-overrides`), if it is a dict.

    Raises:
        InputError: it is no JSON object, names no architecture, or contradicts itself.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{file} holds a {type(config).__name__}, not an object")
    if isinstance(overrides, dict):
        config = _overridden(config, overrides)
    named = config.get("architectures")
    if (
        not isinstance(named, list)
        or not named
        or not all(isinstance(it, str) and it for it in named)
    ):
        raise InputError(f"{file} names no architecture: `architectures` is {named!r}")
    for part in (config, *(it for it in config.values() if isinstance(it, Mapping))):
        of_text = part is config or part is text_part(config)
        for contradiction in _contradictions(part, of_text):
            raise InputError(f"{file} contradicts itself: {contradiction}")
    return config


def _overridden(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """As vLLM does it: an object changes the part of this name, anything else replaces it."""
    changed = dict(config)
    for key, value in overrides.items():
        part: Any = config.get(key)
        both = isinstance(value, dict) and isinstance(part, dict)
        changed[key] = _overridden(part, value) if both else value
    return changed


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """What a configuration says of the layers for text: a part of it, or all of it."""
    parts = (config.get(key) for key in _TEXT_PARTS)
    return next((it for it in parts if isinstance(it, dict)), config)


def _contradictions(config: Mapping[str, Any], of_text: bool) -> Iterator[str]:
    """What cannot be true of one (text, vision or audio) part of a configuration; each family has
    names of its own for the sizes of parts that are not of text."""
    for name in _COUNTS:
        value = config.get(name)
        if name == "head_dim" and value == 0 and config.get("kv_lora_rank"):
            continue  # some classes write this of latent attention
        # Some families have a list: one value by layer.
        if not isinstance(value, list | None) and (type(value) is not int or value < 1):
            yield f"{name} is {value!r}, not a positive number"
            return
        if isinstance(value, int) and value > (_LAYERS if name == "num_hidden_layers" else _MOST):
            yield f"{name} is {value}, more than any model has"
            return
    theta = config.get("rope_theta")  # some families have one of each layer
    if isinstance(theta, int | float) and not 0 <= theta < math.inf:
        yield f"rope_theta is {theta}, not a number that angles can be made of"
    layers = config.get("num_hidden_layers")
    drafts = config.get("num_nextn_predict_layers") or 0
    if isinstance(layers, int):
        for name in _BY_LAYER:
            each = config.get(name)
            if isinstance(each, list) and each and len(each) not in (layers, layers + drafts):
                yield f"{name} has {len(each)} entries, num_hidden_layers is {layers}"
    if not of_text:
        return
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        yield f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
    hidden, latent = config.get("hidden_size"), config.get("kv_lora_rank")
    sized = config.get("head_dim") or latent
    divided = not isinstance(hidden, int) or not isinstance(heads, int) or not hidden % heads
    if not (sized or divided or _has_own_head_dim(config.get("model_type"))):
        yield (
            f"hidden_size={hidden} is no multiple of num_attention_heads={heads}, and there is no "
            "head_dim"
        )


def _has_own_head_dim(model_type: object) -> bool:
    """Whether the size of a head has a default in this family, whatever `hidden_size` is."""
    from transformers import CONFIG_MAPPING

    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    return known and getattr(CONFIG_MAPPING[model_type], "head_dim", None) is not None
