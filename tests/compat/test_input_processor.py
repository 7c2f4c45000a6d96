# SPDX-License-Identifier: Apache-2.0
"""A bad option raises in the caller's process, and only where segment reuse is on."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import PoolingParams, SamplingParams

import vllm_segreuse
from vllm_segreuse.compat.input_processor import _validate_params
from vllm_segreuse.serve.requests import check_params


def validate(params: Any, kv_transfer_config: Any) -> Any:
    self = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=kv_transfer_config))
    return _validate_params(lambda *args: ("vllm's answer", args[1:]), check_params)(
        self, params, ("generate",)
    )


ON = vllm_segreuse.kv_transfer_config()


def test_bad_option_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="extra_keys=5"):
        validate(SamplingParams(extra_args={"extra_keys": 5}), ON)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(extra_args={"extra_keys": ["a"]}), PoolingParams()],
)
def test_good_requests_get_vllms_own_answer(params: Any) -> None:
    assert validate(params, ON) == ("vllm's answer", (params, ("generate",)))


def test_engine_without_segment_reuse_takes_anything() -> None:
    params = SamplingParams(extra_args={"extra_keys": 5})
    assert validate(params, None) == ("vllm's answer", (params, ("generate",)))


def test_similar_segments_are_asked_for_where_the_engine_finds_them() -> None:
    params = SamplingParams(extra_args={"segreuse_similarity": 1})
    for options in ({"similarity": {}}, {"similarity": {"by_default": False}}):
        assert validate(params, vllm_segreuse.kv_transfer_config(**options))
    for options in ({}, {"similarity": None}):
        with pytest.raises(ValueError, match="the server has no option `similarity`"):
            validate(params, vllm_segreuse.kv_transfer_config(**options))


RIGHTS = {"0" * 64: ("handbook",)}


def test_programs_use_names_that_are_bound_only_if_their_operator_says_so() -> None:
    params = SamplingParams(extra_args={"extra_keys": ["handbook"]})
    for options in ({"namespaces": RIGHTS}, {"namespaces": {}}):
        bound = vllm_segreuse.kv_transfer_config(**options)
        with pytest.raises(ValueError, match="namespaces_trust_programs"):
            validate(params, bound)
        assert validate(SamplingParams(), bound)
        trusting = vllm_segreuse.kv_transfer_config(**options, namespaces_trust_programs=True)
        assert validate(params, trusting)
    assert validate(params, vllm_segreuse.kv_transfer_config(namespaces=None))


def test_where_they_may_only_good_names_are_taken() -> None:
    config = vllm_segreuse.kv_transfer_config(namespaces=RIGHTS, namespaces_trust_programs=True)
    for keys in (["\x01" + "0" * 64, "handbook"], [], 5):
        with pytest.raises(ValueError, match="extra_keys"):
            validate(SamplingParams(extra_args={"extra_keys": keys}), config)
