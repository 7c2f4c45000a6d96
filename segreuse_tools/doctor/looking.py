# SPDX-License-Identifier: Apache-2.0
"""One look at a model: what segment reuse says of it, and what vLLM says."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from segreuse_tools.doctor.composed import ComposedStates, composed_states
from segreuse_tools.doctor.examination import Examined, UnexaminedError, examine
from segreuse_tools.doctor.memory_use import Memory, memory_of
from segreuse_tools.doctor.rest import has_class, plain_class, rest_of, text_of_class
from segreuse_tools.doctor.trained_documents import TrainedDocuments, documents_of
from segreuse_tools.engine_loading import load_code, one_line
from segreuse_tools.model_folder import read_config, text_part
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.config.launch import kv_transfer_config
from vllm_segreuse.engine.supported import (
    BY_TRANSFORMERS,
    WITHOUT,
    RefusedError,
    composes_states,
    model_reasons,
    text_reasons,
)
from vllm_segreuse.engine.version import UnsupportedVersionError
from vllm_segreuse.options.server import ConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

_LAYERS_WORK = "segment reuse works with the model's layers"


@dataclass
class Look:
    """What has been found out.

    Attributes:
        reasons: why segment reuse refuses the model.
        by_vllm: why vLLM itself does.
        notes: what could not be checked.
        vllm_config, documents, examined, memory: None: vLLM did not get as far.
        states: None: none are composed.
    """

    reasons: tuple[str, ...] = ()
    by_vllm: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    vllm_config: VllmConfig | None = None
    documents: TrainedDocuments | None = None
    examined: Examined | None = None
    memory: Memory | None = None
    states: ComposedStates | None = None


def look(args: EngineArgs, folder: Path, options: SegReuseConfig) -> Look:
    """Examine a model as far as vLLM gets here.

    Args:
        args: of the engine.
        folder: of the model.
        options: of segment reuse.
    """
    found = Look()
    config = read_config(folder, args.hf_overrides)
    args = _prepared(args, str(folder), options)
    try:
        _check_code(config, args.trust_remote_code)
        found.vllm_config = args.create_engine_config()
        _refuse_headless(found.vllm_config.model_config)
        found.documents = documents_of(found.vllm_config.model_config, folder, options)
        alone = of_one_rank(args, found.vllm_config)
        if composes_states(alone):
            found.states = composed_states(alone, options)
        found.examined = examine(alone)
        found.memory = memory_of(found.vllm_config, found.examined)
        if found.examined.lacks is not None:
            found.by_vllm = (found.examined.lacks,)
            found.notes = (_LAYERS_WORK,)
    except RefusedError as error:
        found.reasons = error.reasons
    except UnexaminedError as error:
        found.notes = (f"the layers are checked at start-up only: {error}",)
    except (UnsupportedVersionError, ConfigError) as error:
        found.reasons = (str(error),)
    except Exception as error:
        found.by_vllm = (_of_vllm(error, config),)
        if found.vllm_config is None:  # else segment reuse has seen it, and has not refused it
            has_code = not isinstance(error, ImportError)
            found.reasons = _known_reasons(args, has_code, config, folder)
    return found


def look_at_rest(found: Look, args: EngineArgs, folder: Path, options: SegReuseConfig) -> Look:
    """What segment reuse says of the layers for text of a model that vLLM cannot serve here, or not
    build without weights.

    Args:
        found: neither reasons of ours nor what the layers are like.
        args: of the engine.
        folder: of the model.
        options: of segment reuse.
    """
    rest = rest_of(read_config(folder, args.hf_overrides), folder)
    if rest is None:
        return found
    args = replace(args, revision=None, hf_overrides={})
    with tempfile.TemporaryDirectory() as own, plain_class(rest.config):
        (Path(own) / "config.json").write_text(json.dumps(rest.config))
        of_rest = look(args, Path(own), options)
    if of_rest.memory is None and not of_rest.reasons:
        return found
    lacks = of_rest.by_vllm if of_rest.memory is not None else ()  # else of what the rest alone is
    if of_rest.memory is not None:
        of_rest.notes = (f"{_LAYERS_WORK}, examined {rest.without}",)
    of_rest.by_vllm = tuple(dict.fromkeys((*found.by_vllm, *lacks)))
    return of_rest


def _check_code(config: dict[str, Any], trusted: bool) -> None:
    """What vLLM itself would not say, or say late: what a model's code lacks, that vLLM has given
    the model up, or that it brings code of its own.

    Raises:
        ImportError: the code needs a library that is not here.
        ValueError: vLLM does not load it.
    """
    import transformers
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _PREVIOUSLY_SUPPORTED_MODELS

    for name in config["architectures"]:
        last = _PREVIOUSLY_SUPPORTED_MODELS.get(name)
        if last and name not in ModelRegistry.models and not hasattr(transformers, name):
            raise ValueError(f"it had {name} until version {last}, and has it no more")
    load_code(config["architectures"])
    if "auto_map" in config and not trusted and not has_class(config):
        raise ValueError("it needs trust_remote_code")


def _known_reasons(
    args: EngineArgs, has_code: bool, config: dict[str, Any], folder: Path
) -> tuple[str, ...]:
    """Why segment reuse refuses a model of which vLLM makes no engine's configuration here.

    Args:
        args: of the engine.
        has_code: whether vLLM can load the model's code.
        config: what is left if it cannot, with what a class of configurations makes of it.
        folder: of the model.
    """
    asked = args.disable_hybrid_kv_cache_manager is False
    name = ", ".join(config["architectures"])
    if has_code:
        with suppress(Exception):  # of vLLM, whose refusal is known
            return model_reasons(args.create_model_config(), asked)
    texts = (text_of_class(folder), SimpleNamespace(**text_part(config)))
    of_texts = filter(None, (text_reasons(name, text, asked) for text in texts))
    images = (f"vLLM runs {name} {BY_TRANSFORMERS}{WITHOUT}",)
    return next(of_texts, images if _takes_images_by_transformers(config) else ())


def _takes_images_by_transformers(config: dict[str, Any]) -> bool:
    """Whether a model has a part for text beside others, and vLLM no code for it. vLLM asks for
    files of its images before it says so."""
    import transformers
    from vllm import ModelRegistry

    named = config["architectures"]
    by_vllm = any(name in ModelRegistry.models for name in named)
    return text_part(config) is not config and not by_vllm and hasattr(transformers, named[0])


def _refuse_headless(model_config: ModelConfig) -> None:
    """Models of embeddings that vLLM takes for models of text, whose code is that of one.

    Raises:
        RefusedError: they have no weights by which to choose a token.
    """
    from vllm.model_executor.models import registry

    heads = registry._TEXT_GENERATION_MODELS | registry._MULTIMODAL_MODELS
    for name in model_config.architectures:
        if name in registry._EMBEDDING_MODELS and name not in heads:
            raise RefusedError(f"{name} is a pooling model, without a head for text{WITHOUT}")


def _prepared(args: EngineArgs, folder: str, options: SegReuseConfig) -> EngineArgs:
    return replace(
        args,
        model=folder,
        tokenizer=None,
        skip_tokenizer_init=True,
        kv_transfer_config=kv_transfer_config(options.model_dump(exclude_unset=True)),
    )


def of_one_rank(args: EngineArgs, vllm_config: VllmConfig) -> VllmConfig:
    """The same engine on one device: what layers are like does not depend on the others."""
    if vllm_config.parallel_config.world_size_across_dp == 1:
        return vllm_config
    alone = replace(
        args,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
    )
    return alone.create_engine_config()


def _of_vllm(error: Exception, config: dict[str, Any]) -> str:
    """What vLLM lacks or refuses, as a reason."""
    named = ", ".join(config["architectures"])
    if isinstance(error, ImportError):
        return f"vLLM cannot load {named} here: {one_line(error)}; install it"
    if "auto_map" in config and "trust_remote_code" in str(error):
        return (
            f"{named} comes with code of its own (auto_map), which vLLM does not run unasked; read "
            "that code, and add --trust-remote-code"
        )
    return f"vLLM itself refuses: {one_line(error)}"
