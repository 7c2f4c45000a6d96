# SPDX-License-Identifier: Apache-2.0
"""Audits of an engine of vLLM: its references, and its log."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from segreuse_extras.audit.audits import Audit, Audits
from segreuse_extras.audit.log import AuditLog, path_of
from segreuse_extras.audit.options import AuditOptions
from vllm_segreuse.engine.metrics import Counted
from vllm_segreuse.engine.priorities import LAST_PRIORITY
from vllm_segreuse.options.server import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

Write = Callable[[Audit, Mapping[str, Any]], None]


def start_audits(vllm_config: VllmConfig, options: AuditOptions, stats: Counted) -> Audits:
    """The audits of an engine.

    Raises:
        ConfigError: the log cannot be opened.
    """
    return Audits(
        options,
        stats,
        make_request=_reference,
        most_tokens=functools.partial(_most_tokens, vllm_config, options.tokens),
        write=_log(vllm_config, options, stats),
        chance=random.random,
    )


def _most_tokens(vllm_config: VllmConfig, wanted: int, num_prompt_tokens: int) -> int:
    """Tokens that are compared; the reference generates one more."""
    if vllm_config.speculative_config is not None:
        wanted = 1  # with drafts several tokens come from one step
    room: int = vllm_config.model_config.max_model_len - num_prompt_tokens - 1
    return max(0, min(wanted, room))


def _reference(request_id: str, audit: Audit, tokens: int) -> Request:
    """The audited prompt as a request of vLLM that neither finds anything nor leaves anything.

    It reads no cache, has no extra keys, and without a hasher its blocks get no names
    (`compat/block_pool.py`): those are the first that vLLM hands out again.
    """
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=request_id,
        prompt_token_ids=audit.prompt,
        sampling_params=SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=True,
        ),
        pooling_params=None,
        lora_request=audit.lora_request,
        priority=LAST_PRIORITY,
    )


def _log(vllm_config: VllmConfig, options: AuditOptions, stats: Counted) -> Write:
    if options.log is None or not options.share:
        return lambda audit, line: None
    path = path_of(options.log, vllm_config.parallel_config.data_parallel_index)
    try:
        on_error = functools.partial(stats.inc, "audit_log_errors_total")
        log = AuditLog(path, options.log_bytes, options.log_files, on_error)
    except OSError as error:
        raise ConfigError(f"audit.log: cannot open {str(path)!r}: {error}") from None
    if not options.log_text:
        return lambda audit, line: log.write(line)
    text = _Text(vllm_config)
    return lambda audit, line: log.write(
        {**line, "prompt": text.of(audit.prompt), "answer": text.of(audit.answer)}
    )


class _Text:
    """Turns tokens into text; the tokenizer is loaded when it is needed."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._model_config = vllm_config.model_config

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from vllm.tokenizers import cached_tokenizer_from_config

        return cached_tokenizer_from_config(self._model_config)

    def of(self, tokens: Any) -> str | list[int]:
        """The text; the tokens themselves where vLLM was told to load no tokenizer."""
        if self._model_config.skip_tokenizer_init:
            return list(tokens)
        return str(self._tokenizer.decode(list(tokens)))
