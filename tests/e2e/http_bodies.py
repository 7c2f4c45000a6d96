# SPDX-License-Identifier: Apache-2.0
"""Bodies for every inference route that are sound but for what they say to segment reuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from vllm_segreuse.config import RequestOptions
from vllm_segreuse.policies import POLICIES

MOST_TOKENS = 4
"""What an answer may take, where the body says so."""

ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
SOUND_KEYS = st.sampled_from(["docs", ["docs"], ["docs", "other"], ["ä", "\uff41"], "x" * 256])
KEYS = SOUND_KEYS | st.text(max_size=300) | st.lists(st.text(max_size=9), max_size=18) | ANYTHING
SOUND_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "segreuse_policy": st.sampled_from([*POLICIES]),
    "segreuse_recompute_ratio": st.floats(0, 1),
    "segreuse_max_drift": st.sampled_from([0, 0.05, 1e9]),
    "segreuse_dense_layers": st.integers(0, 4096) | st.floats(0.01, 0.99),
    "segreuse_overflow_tokens": st.integers(0, 2**31 - 1),
    "segreuse_min_reused_tokens": st.integers(1, 200),
    "segreuse_observe": st.booleans(),
    "segreuse_explain": st.booleans(),
    "segreuse_recompute_once": st.booleans(),
    "segreuse_weigh_turns": st.booleans(),
    "segreuse_context": st.sampled_from(["any", "same"]),
    "segreuse_similarity": st.just(False),  # true needs an option of the server
}
assert SOUND_OPTIONS.keys() == {f"segreuse_{name}" for name in RequestOptions.model_fields}
MISSPELT = st.sampled_from(["segreuse_freeze", "segreuse_", "segreuse_polcy", "segreuse_Policy"])

# vLLM's own that change how a request runs.
BESIDE: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "stream": st.booleans(),
    "temperature": st.sampled_from([0, 1.0]),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "logprobs": st.integers(0, 3),
    "prompt_logprobs": st.integers(0, 2),
    "echo": st.booleans(),
    "stop": st.sampled_from(["a", ["e", "t"]]),
    "min_tokens": st.integers(0, MOST_TOKENS),
    "ignore_eos": st.booleans(),
    "use_beam_search": st.booleans(),
    "cache_salt": st.text(min_size=1, max_size=9),
    "priority": st.integers(-3, 3),
    "truncate_prompt_tokens": st.integers(1, 300),
    "add_special_tokens": st.booleans(),
    "structured_outputs": st.sampled_from([{"choice": ["yes", "no"]}, {"regex": "[ab]+"}]),
    "response_format": st.just({"type": "json_object"}),
    "kv_transfer_params": st.dictionaries(
        st.sampled_from(["segreuse", "do_remote_prefill", "remote_block_ids"]), ANYTHING
    ),
    "request_id": st.text(max_size=9),
    "return_token_ids": st.booleans(),
}


def bodies(prompts: list[str]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """A route and a body that is sound but for what is said to segment reuse."""
    return st.builds(
        _body,
        st.sampled_from(sorted(SOUND)),
        st.sampled_from(prompts),
        st.fixed_dictionaries({}, optional={"extra_keys": KEYS}),
        st.fixed_dictionaries(
            {},
            optional={
                "extra_keys": KEYS,
                **{name: sound | ANYTHING for name, sound in SOUND_OPTIONS.items()},
            },
        )
        | st.dictionaries(MISSPELT | st.text(max_size=9), ANYTHING, max_size=2)
        | st.none()
        | ANYTHING,
        st.fixed_dictionaries({}, optional=BESIDE),
    )


def _body(
    path: str, prompt: str, ours: dict[str, Any], xargs: Any, beside: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    body = {"model": "m", **beside, **ours, **SOUND[path](prompt)}
    if "sampling_params" in body:
        body["sampling_params"]["extra_args"] = xargs
    elif xargs is not None:
        body["vllm_xargs"] = xargs
    return path, body


def _user(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


SOUND: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/completions": lambda p: {"prompt": p, "max_tokens": MOST_TOKENS},
    "/v1/chat/completions": lambda p: {"messages": _user(p), "max_tokens": MOST_TOKENS},
    "/v1/chat/completions/batch": lambda p: {
        "messages": [_user(p), _user(p)],
        "max_tokens": MOST_TOKENS,
    },
    "/v1/responses": lambda p: {"input": p, "max_output_tokens": MOST_TOKENS},
    "/v1/messages": lambda p: {"messages": _user(p), "max_tokens": MOST_TOKENS},
    "/inference/v1/generate": lambda p: {
        "token_ids": list(p.encode()),
        "sampling_params": {"max_tokens": MOST_TOKENS},
    },
}
"""Bodies by route, from a prompt; `bodies` lays the rest beside them."""
