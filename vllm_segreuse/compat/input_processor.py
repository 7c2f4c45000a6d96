# SPDX-License-Identifier: Apache-2.0
"""`vllm.v1.engine.input_processor.InputProcessor`: a request's own options, checked by its caller.

Every request passes `_validate_params` in the process that submits it: offline callers, and the
endpoints that `serve/requests.py` does not check earlier. vLLM has no hook for checking
`extra_args`; unchecked, a bad value would be found in the scheduler and end the engine. What
`process_inputs` makes of a prompt is checked, too, where the model has a layout of documents.

Obsolete when plugins can validate `extra_args` and tokenised prompts, as discussed in
vllm-project/vllm#17191.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from vllm_segreuse.compat.patching import wrap


def install() -> None:
    """Wrap the validation of sampling parameters and the processing of prompts, once."""
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(InputProcessor, "_validate_params", _validate_params)
    wrap(InputProcessor, "process_inputs", _process_inputs)


def _validate_params(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_segreuse.launch import names_connector
    from vllm_segreuse.serve.requests import check_extra_args

    def _validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.vllm_config.kv_transfer_config
        if names_connector(config):
            options = config.kv_connector_extra_config
            check_extra_args(
                getattr(params, "extra_args", None),
                similar=options.get("similarity") is not None,
                bound=options.get("namespaces") is not None,
                trust_programs=options.get("namespaces_trust_programs", False),
            )
        return original(self, params, *args, **kwargs)

    return _validate_params


def _process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        embeds = request.prompt_embeds is not None
        check_prompt(
            self,
            None if embeds else request.prompt_token_ids,
            request.sampling_params,
            IMAGES if request.mm_features else "parts to come" if request.resumable else None,
            request.lora_request is not None or request.cache_salt is not None,
        )
        return request

    return process_inputs


IMAGES = "images, audio or video"
"""What a prompt may come with."""

_RULES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def check_prompt(
    processor: Any,
    tokens: Sequence[int] | None,
    params: Any,
    unusual: str | None,
    is_apart: bool = False,
) -> None:
    """Checks a prompt by the layout of the model; see `PromptRules.check`.

    Args:
        processor: vLLM's input processor.

    Raises:
        BadOptionError: says what is wrong.
    """
    from vllm_segreuse.config import RequestError
    from vllm_segreuse.launch import names_connector
    from vllm_segreuse.serve.documents import PromptRules
    from vllm_segreuse.serve.requests import BadOptionError

    if not names_connector(processor.vllm_config.kv_transfer_config):
        return
    if processor not in _RULES:
        _RULES[processor] = PromptRules.of(processor.vllm_config)
    rules = _RULES[processor]
    if rules is None:
        return
    try:
        rules.check(tokens, params, unusual, is_apart)
    except RequestError as error:
        raise BadOptionError(error) from None
