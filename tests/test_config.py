# SPDX-License-Identifier: Apache-2.0
"""Options: every bad value is refused with the option, the value and the rule in the text."""

import hashlib
import json
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import ValidationError

from segreuse_extras.audit.options import AuditOptions
from segreuse_extras.similar.options import SimilarityOptions
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.config import RequestOptions, SegReuseConfig
from vllm_segreuse.options.parsing import (
    ParsedRequest,
    RequestError,
    bind_extra_keys,
    parse_documents,
    parse_extra_keys,
    parse_request,
)
from vllm_segreuse.options.server import MAX_PROVENANCE_DEPTH, ConfigError
from vllm_segreuse.options.values import short_repr
from vllm_segreuse.policies import POLICIES

CONFIG = SegReuseConfig()


def test_defaults_are_the_documented_ones() -> None:
    assert SegReuseConfig().model_dump() == {
        "policy": "focus",
        "recompute_ratio": None,
        "dense_layers": 0.15,
        "overflow_tokens": None,
        "max_drift": None,
        "min_reused_tokens": 128,
        "observe": False,
        "recompute_once": False,
        "weigh_turns": False,
        "heal_tokens": 0,
        "heal_after_s": 5.0,
        "state_bytes": 1 << 30,
        "explain": False,
        "similarity": None,
        "max_provenance_depth": 4,
        "max_step_tokens": None,
        "spread_tokens": None,
        "enabled": True,
        "frozen_share": 0.5,
        "frozen_pressure": 0.9,
        "frozen_returns": True,
        "knowledge_path": None,
        "knowledge_chunk_tokens": 2048,
        "knowledge_body_bytes": 16777216,
        "context": "any",
        "viewer_requests": 200,
        "viewer_text": False,
        "namespaces": None,
        "namespaces_trust_programs": False,
        "audit": AuditOptions().model_dump(),
        "tier": None,
        "beside": None,
    }
    assert set(RequestOptions.model_fields) < set(SegReuseConfig.model_fields)
    assert SegReuseConfig(policy="auto") == SegReuseConfig()


@pytest.mark.parametrize(
    ("key", "shown"),
    [("segreuse_polcy", "segreuse_polcy"), ("segreuse_\ud800", r"segreuse_\ud800")],
)
def test_06_an_unknown_option_of_a_request_is_named(key: str, shown: str) -> None:
    with pytest.raises(RequestError, match="unknown option") as caught:
        parse_request({key: 1}, CONFIG)
    assert caught.value.option == shown, "an answer can be sent with it"
    allowed = str(caught.value).partition("allowed are ")[2].split(", ")
    assert {"segreuse_documents", "segreuse_policy", "segreuse_observe"} <= {*allowed}


def test_06_the_name_of_an_unknown_option_is_cut() -> None:
    with pytest.raises(RequestError) as caught:
        parse_request({"segreuse_" + "a" * 10**6: 1}, CONFIG)
    assert len(caught.value.option) < 100
    assert len(str(caught.value)) < 1000


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        CONFIG.policy = "shift"  # type: ignore[misc]


def test_06_unknown_key_is_named_with_the_allowed_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        SegReuseConfig.from_options({"polcy": "shift"}, source="server.yaml")
    assert "server.yaml" in str(caught.value)
    assert "'polcy'" in str(caught.value)
    assert all(name in str(caught.value) for name in SegReuseConfig.model_fields)
    with pytest.raises(ValidationError, match=r"polcy.*allowed are"):
        SegReuseConfig(polcy="shift")  # type: ignore[call-arg]


BAD_OPTIONS = [
    ("policy", "cacheblend2"),
    ("policy", ["shift"]),
    ("policy", None),
    ("recompute_ratio", -0.01),
    ("recompute_ratio", 1.01),
    ("recompute_ratio", float("nan")),
    ("recompute_ratio", float("inf")),
    ("recompute_ratio", True),
    ("recompute_ratio", "0.1"),
    ("max_drift", -0.01),
    ("max_drift", float("nan")),
    ("max_drift", float("inf")),
    ("max_drift", 2**63),
    ("max_drift", 10**400),
    ("max_drift", True),
    ("max_drift", "4"),
    ("dense_layers", -1),
    ("dense_layers", 1.0),
    ("dense_layers", 0.0),
    ("dense_layers", 2.5),
    ("dense_layers", True),
    ("dense_layers", 10**30),
    ("overflow_tokens", -1),
    ("overflow_tokens", 1.5),
    ("overflow_tokens", False),
    ("overflow_tokens", 10**5000),
    ("min_reused_tokens", 0),
    ("min_reused_tokens", None),
]


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS, ids=short_repr)
def test_06_bad_value_is_refused_for_the_server_and_for_a_request(
    option: str, value: object
) -> None:
    with pytest.raises(ConfigError) as server:
        SegReuseConfig.from_options({option: value})
    with pytest.raises(RequestError) as request:
        parse_request({f"segreuse_{option}": value}, CONFIG)
    assert request.value.option == f"segreuse_{option}"
    for text in (str(server.value), str(request.value)):
        assert f"{option}={short_repr(value)} must be" in text
        assert len(text) < 300


@pytest.mark.parametrize("option", RequestOptions.model_fields)
@pytest.mark.parametrize("bits", [31, 63, 64, 1000])
@pytest.mark.parametrize("less", [0, 1])
def test_06_a_number_that_is_taken_can_be_sent_to_the_engine(
    option: str, bits: int, less: int
) -> None:
    extra_args = {f"segreuse_{option}": 2**bits - less}
    try:
        parse_request(extra_args, CONFIG)
    except RequestError:
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(extra_args)) == extra_args


RANGES: dict[str, tuple[int, int]] = {
    "min_reused_tokens": (1, 2**31 - 1),
    "overflow_tokens": (0, 2**31 - 1),
    "dense_layers": (0, 4096),
    "max_provenance_depth": (0, 127),
    "max_step_tokens": (1, 2**31 - 1),
    "spread_tokens": (0, 2**31 - 1),
    "knowledge_chunk_tokens": (1, 2**31 - 1),
    "knowledge_body_bytes": (1024, 2**31 - 1),
}
NULLABLE = {"overflow_tokens", "max_step_tokens", "spread_tokens"}


@pytest.mark.parametrize("option", RANGES)
def test_whole_numbers_are_taken_within_their_range_only(option: str) -> None:
    low, high = RANGES[option]
    for value in (low, high):
        assert getattr(SegReuseConfig.from_options({option: value}), option) == value
    for bad in (low - 1, high + 1, 10**30, True, low + 1.5, float("nan"), str(low), [low]):
        with pytest.raises(ConfigError) as caught:
            SegReuseConfig.from_options({option: bad})
        assert str(caught.value).startswith(f"segreuse: {option}={short_repr(bad)} must be")
        assert f"{low} to {high}" in str(caught.value)
    if option in NULLABLE:
        assert getattr(SegReuseConfig.from_options({option: None}), option) is None
    else:
        with pytest.raises(ConfigError, match=option):
            SegReuseConfig.from_options({option: None})


@pytest.mark.parametrize("option", ["recompute_ratio", "frozen_share", "frozen_pressure"])
def test_shares_are_taken_from_0_to_1(option: str) -> None:
    for value in (1, 1.0, 0.5, 5e-324):
        taken = getattr(SegReuseConfig.from_options({option: value}), option)
        assert (taken, type(taken)) == (value, float)
    bad_ones: list[object] = [-5e-324, 1.0000001, float("nan"), float("inf"), True, "0.5"]
    if option == "recompute_ratio":
        assert SegReuseConfig.from_options({option: None}).recompute_ratio is None
    else:
        bad_ones.append(None)
    if option == "frozen_pressure":
        bad_ones.append(0)
    else:
        assert getattr(SegReuseConfig.from_options({option: 0}), option) == 0.0
    for bad in bad_ones:
        with pytest.raises(ConfigError, match=rf"{option}=.* must be a number"):
            SegReuseConfig.from_options({option: bad})


@pytest.mark.parametrize("option", ["frozen_returns", "namespaces_trust_programs"])
def test_switches_are_true_or_false(option: str) -> None:
    for value in (True, False):
        assert getattr(SegReuseConfig.from_options({option: value}), option) is value
    for bad in (1, 0, None, "true", "no"):
        with pytest.raises(ConfigError, match=f"{option}=.* must be true or false"):
            SegReuseConfig.from_options({option: bad})


def test_a_flag_of_a_request_may_have_become_a_number() -> None:
    for value in (True, 1, False, 0):
        options = parse_request({"segreuse_observe": value}, CONFIG).options
        assert options.observe is bool(value)
    for bad in (2, -1, 1.0, None, "true"):
        with pytest.raises(RequestError, match=r"segreuse_observe=.* must be true or false"):
            parse_request({"segreuse_observe": bad}, CONFIG)


def test_the_switch_has_a_third_state() -> None:
    for value in (True, False, "observe"):
        assert SegReuseConfig.from_options({"enabled": value}).enabled == value
    for bad in (1, 0, None, "true", "Observe", ["observe"]):
        with pytest.raises(ConfigError, match=r'enabled=.* must be true, false or "observe"'):
            SegReuseConfig.from_options({"enabled": bad})


def test_dense_layers_is_a_number_of_layers_or_a_share_of_them() -> None:
    for value in (5e-324, 0.15, 0.9999999):
        assert SegReuseConfig.from_options({"dense_layers": value}).dense_layers == value


@pytest.mark.parametrize(
    ("spread_tokens", "tokens"), [(None, 1024), (300, 300), (0, None), (5000, 5000)]
)
def test_a_step_takes_half_of_what_vllm_batches_or_what_is_said(
    spread_tokens: int | None, tokens: int | None
) -> None:
    config = SegReuseConfig(spread_tokens=spread_tokens)
    assert config.spread_work(2048, num_layers=10) == (tokens and tokens * 10)


def test_a_path_is_text_of_some_length() -> None:
    assert SegReuseConfig.from_options({"knowledge_path": "kb.db"}).knowledge_path == "kb.db"
    for bad in ("", "a\0b", 5, ["kb.db"]):
        with pytest.raises(ConfigError, match="knowledge_path"):
            SegReuseConfig.from_options({"knowledge_path": bad})


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_what_they_are_called(policy: str) -> None:
    assert SegReuseConfig.from_options({"policy": policy}).policy == policy
    assert parse_request({"segreuse_policy": policy}, CONFIG).options.policy == policy


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("policy", "shift"),
        ("recompute_ratio", 0),
        ("recompute_ratio", 1),
        ("dense_layers", 0),
        ("dense_layers", 3),
        ("dense_layers", 0.5),
        ("overflow_tokens", 0),
        ("overflow_tokens", None),
        ("min_reused_tokens", 1),
    ],
)
def test_good_value_is_kept(option: str, value: object) -> None:
    assert getattr(SegReuseConfig.from_options({option: value}), option) == value
    assert getattr(parse_request({f"segreuse_{option}": value}, CONFIG).options, option) == value


def test_request_options_lie_over_the_servers() -> None:
    server = SegReuseConfig(policy="shift", recompute_ratio=0.3, dense_layers=2)
    parsed = parse_request({"segreuse_recompute_ratio": 0.5, "extra_keys": "a"}, server)
    assert parsed == ParsedRequest(
        ("a",), RequestOptions(policy="shift", recompute_ratio=0.5, dense_layers=2)
    )
    assert parse_request(None, server).options == server.request_defaults()
    assert parse_request({}, server).extra_keys is None


SIMILAR = SegReuseConfig(similarity={"threshold": 0.7})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1, 0, True, False])
def test_a_request_asks_for_similar_segments_or_not(value: object) -> None:
    parsed = parse_request({"segreuse_similarity": value}, SIMILAR)
    assert parsed.options.similarity is bool(value)


@pytest.mark.parametrize(
    ("given", "by_default"),
    [(None, False), ({}, True), ({"by_default": True}, True), ({"by_default": False}, False)],
)
def test_the_server_says_who_reuses_similar_segments(given: Any, by_default: bool) -> None:
    server = SegReuseConfig.from_options({"similarity": given})
    for options in (
        server.request_defaults(),
        parse_request({"segreuse_policy": "shift"}, server).options,
        parse_request(None, server).options,
    ):
        assert options.similarity is by_default
    assert SegReuseConfig.from_options(server.model_dump()) == server


def test_06_similar_segments_need_the_servers_index() -> None:
    assert parse_request({"segreuse_similarity": 0}, CONFIG).options.similarity is False
    with pytest.raises(RequestError, match="the server has no option `similarity`") as caught:
        parse_request({"segreuse_similarity": 1}, CONFIG)
    assert caught.value.option == "segreuse_similarity"


@pytest.mark.parametrize("value", ["on", 2, None, {}, 0.5])
def test_06_a_bad_request_for_similar_segments_is_refused(value: object) -> None:
    with pytest.raises(RequestError, match=r"segreuse_similarity=.* must be true or false"):
        parse_request({"segreuse_similarity": value}, SIMILAR)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (True, "similarity=True must be a mapping of options of its own, or null"),
        ({"treshold": 0.5}, "unknown option 'treshold'; allowed are anchors, by_default"),
        ({"threshold": 0}, "similarity.threshold=0 must be a number above 0 and up to 1"),
        ({"min_run_tokens": 0}, "similarity.min_run_tokens=0 must be an integer from 1 to 1024"),
        ({"anchors": "a"}, "similarity.anchors='a' must be a list of texts"),
        ({"anchors": [""]}, "must be a list of texts, none of them empty"),
        ({"volatile": ["("]}, "must be regular expressions: '(' is none"),
        ({"volatile": ["a{99999999999999}"]}, "'a{99999999999999}' is none, the repetition number"),
        ({"volatile": ["(" * 5000 + ")" * 5000]}, "must be regular expressions: '((("),
        ({"w_exact": {8: 16, "8": 64}}, "a layer is there twice"),
        ({"w_exact": {"08": 16, "8": 16}}, "a layer is there twice"),
        ({"permutations": 10**6}, "similarity.permutations=1000000 must be an integer"),
        ({"halo_tokens": 65}, "similarity.halo_tokens=65 must be an integer from 0 to 64"),
        (
            {"halo_tokens": 8, "max_boundary_drift": -0.1},
            "max_boundary_drift=-0.1 must be a number from 0 on, or null for no test",
        ),
        ({"max_boundary_drift": 0.1}, "has max_boundary_drift and no halo_tokens"),
        ({"window_tokens": 11}, "set window_tokens to 12 at least, or shingle_tokens to 5 at most"),
        ({"shingle_tokens": 49}, "has window_tokens=96 and shingle_tokens=49, so that no window"),
        ({"context_tokens": 5}, "has context_tokens=5 and shingle_tokens=6, so that no left"),
        *(
            ({"w_exact": given}, 'must map layers from 1 on, or "all", to a number of tokens')
            for given in (
                *(8, {}, {0: 4}, {"first": 4}, {True: 4}, {1.5: 4}, {-1: 4}, {1000: 4}),
                *({8: -1}, {8: 4097}, {8: "full"}, {8: True}, {8: None}, {8: 0.5}),
                *({8: 16, 16: 15}, {16: 4, 8: 5}, {8: 5, "all": 4}, {8: "full_prefix", 16: 64}),
            )
        ),
    ],
)
def test_bad_options_of_similarity_are_refused(given: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SegReuseConfig.from_options({"similarity": given})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("min_run_tokens", "halo_tokens", "least"), [(8, 0, 8), (8, 4, 8), (8, 8, 9), (1, 16, 17)]
)
def test_a_run_of_similar_text_is_longer_than_its_halo(
    min_run_tokens: int, halo_tokens: int, least: int
) -> None:
    options = SimilarityOptions(min_run_tokens=min_run_tokens, halo_tokens=halo_tokens)
    assert options.least_run_tokens == least


def test_a_table_of_contexts_at_its_limits() -> None:
    for given in ({1: 0, 999: 4096}, {"1": 0, "999": "full_prefix"}, {5: 7, 6: 7, "all": 7}):
        server = SegReuseConfig.from_options({"similarity": {"w_exact": given}})
        assert server.similarity is not None
        assert server.similarity.w_exact == {str(key): value for key, value in given.items()}


def test_a_table_of_contexts_is_ordered_by_layer() -> None:
    server = SegReuseConfig.from_options(
        {"similarity": {"w_exact": {"all": "full_prefix", 16: 64, "8": 64}}}
    )
    assert server.similarity is not None
    assert server.similarity.w_exact == {"8": 64, "16": 64, "all": "full_prefix"}
    assert list(server.similarity.w_exact) == ["8", "16", "all"]
    assert server.cuts == (8, 16)
    assert SegReuseConfig.from_options(json.loads(json.dumps(server.model_dump()))) == server
    assert SegReuseConfig(similarity={"w_exact": {"all": 3}}).cuts == ()  # type: ignore[arg-type]
    assert SIMILAR.cuts == SegReuseConfig().cuts == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fallback": {"recompute_ration": 0.5}}, "audit.fallback: unknown option 'recompute_rati"),
        ({"fallback": {1: 2}}, "audit.fallback={1: 2} must be full, or a mapping of options"),
        ({"log": "a" * 300}, "must be a file in a folder that exists, or null: File name too long"),
        ({"log": "a" * 300 + "/b"}, "must be a file in a folder that exists, or null: File name"),
    ],
)
def test_bad_options_of_audits_are_refused(given: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SegReuseConfig.from_options({"audit": given})
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: 2026-99-99", "month must be in 1..12"),
        ("max_step_tokens: " + "1" * 5000, "Exceeds the limit"),
        ("similarity: " + "[" * 3000, "maximum recursion depth exceeded"),
        ("observe: !!bool maybe", "'maybe'"),
        ("policy: !!timestamp x", "is not YAML"),
        ("policy: [", "while parsing"),
        ("policy: shift\npolicy: exact", "'policy' is given twice"),
        ("namespaces:\n  aa: [x]\n  aa: [y]", "'aa' is given twice"),
    ],
)
def test_a_file_that_is_no_yaml_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"server\.yaml' is not YAML: ") as caught:
        SegReuseConfig.from_yaml(file)
    assert message in str(caught.value)


def test_06_unknown_request_option_is_named_with_the_allowed_ones() -> None:
    with pytest.raises(RequestError) as caught:
        parse_request({"segreuse_ratio": 0.1}, CONFIG)
    assert "'segreuse_ratio'" in str(caught.value)
    assert all(f"segreuse_{name}" in str(caught.value) for name in RequestOptions.model_fields)


def test_server_only_options_are_no_request_options() -> None:
    with pytest.raises(RequestError, match="segreuse_enabled"):
        parse_request({"segreuse_enabled": False}, CONFIG)


def test_keys_of_others_are_left_alone() -> None:
    parsed = parse_request({"kv_transfer_params": {"x": object()}, "top_a": -1}, CONFIG)
    assert parsed == ParsedRequest(None, CONFIG.request_defaults())


@pytest.mark.parametrize(
    "value",
    [
        [],
        (),
        "",
        [""],
        5,
        1.5,
        float("nan"),
        True,
        {"a": "b"},
        [["a"]],
        ["a", 5],
        ["a", None],
        [float("nan")],
        ["k"] * 17,
        ["k"] * 10**6,
        "x" * 257,
        "x" * 2**20,
        "é" * 129,
        "nul\0",
        "line\nbreak",
        "c1\x85",
        "del\x7f",
        "\ud800",
        b"bytes",
    ],
    ids=short_repr,
)
def test_01_02_03_bad_extra_keys_are_refused(value: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request({"extra_keys": value}, CONFIG)
    assert caught.value.option == "extra_keys"
    assert str(caught.value).startswith("extra_keys")
    assert len(str(caught.value)) < 300
    str(caught.value).encode()  # lone surrogates are escaped: the text can be sent


def test_extra_keys_at_their_limits() -> None:
    keys = ["é" * 128] * 16
    assert parse_request({"extra_keys": keys}, CONFIG).extra_keys == tuple(keys)
    bound = bind_extra_keys(tuple(keys), "mallory", {})
    assert parse_request({"extra_keys": list(bound)}, CONFIG, trusted=True).extra_keys == bound
    for too_much in ([*keys, "a"], [keys[0] + "a"], [*bound, "a"]):
        with pytest.raises(RequestError):
            parse_request({"extra_keys": too_much}, CONFIG, trusted=True)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a" * 46, "'" + "a" * 46 + "'"),
        ("a" * 47, "'" + "a" * 21 + "..." + "a" * 22 + "'"),
        ([1, 2, 3], "[1, 2, 3]"),
        ([1, 2, 3, 4], "[1, 2, 3, ...]"),
        ((1, 2, 3, 4), "(1, 2, 3, ...)"),
        ({1, 2, 3, 4}, "{1, 2, 3, ...}"),
        ({1: 2, 3: 4, 5: 6, 7: 8}, "{1: 2, 3: 4, 5: 6, ...}"),
        ([[1]], "[[1]]"),
        ([[[1]]], "[[[...]]]"),
        (10**18 - 1, "9" * 18),
        (1 - 10**18, "-" + "9" * 18),
        (10**18, "an integer beyond 64 bits"),
        (-(10**18), "an integer beyond 64 bits"),
        (1 << 50_000, "an integer beyond 64 bits"),
        (b"a" * 100, "b'" + "a" * 20 + "..." + "a" * 22 + "'"),
    ],
    ids=short_repr,
)
def test_values_are_shown_cut(value: object, shown: str) -> None:
    assert short_repr(value) == shown


def test_documents_that_a_request_names_at_their_limits() -> None:
    names = ["é" * 512] * 64
    assert parse_documents(names) == tuple(names)
    assert parse_documents("a") == parse_documents(["a"]) == ("a",)
    assert parse_documents(None) == ()
    for wrong, text in (
        ([*names, "a"], "(65 names) must be a list of 1 to 64 strings"),
        ([], "segreuse_documents=[] (0 names) must be a list of 1 to 64 strings"),
        (5, "segreuse_documents=5 must be a list of 1 to 64 strings"),
        ([5], "segreuse_documents: the name 5 must be a string"),
        ([""], "segreuse_documents: the name '' must be 1 to 1024 bytes of UTF-8"),
        ([names[0] + "a"], "must be 1 to 1024 bytes of UTF-8"),
        (["a", "b\n"], "the name 'b\\n' must hold no control characters and no lone surrogates"),
    ):
        with pytest.raises(RequestError) as caught:
            parse_documents(wrong)
        assert str(caught.value).endswith(text)
        assert caught.value.option == "segreuse_documents"


def test_a_string_means_a_list_of_it() -> None:
    assert (
        parse_request({"extra_keys": "tenant"}, CONFIG).extra_keys
        == parse_request({"extra_keys": ["tenant"]}, CONFIG).extra_keys
        == ("tenant",)
    )


def test_04_05_composite_keys_and_spellings_stay_distinct() -> None:
    def keys(value: object) -> tuple[str, ...] | None:
        return parse_request({"extra_keys": value}, CONFIG).extra_keys

    assert keys(["a", "bc"]) != keys(["ab", "c"])
    nfc, nfd = unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")
    assert keys(nfc) == (nfc,)
    assert keys(nfd) == (nfd,)


def test_absent_or_null_extra_keys_mean_none() -> None:
    assert parse_request({"extra_keys": None}, CONFIG).extra_keys is None


def test_yaml(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("policy: shift\ndense_layers: 2\n")
    assert SegReuseConfig.from_yaml(path) == SegReuseConfig(policy="shift", dense_layers=2)
    path.write_text("# nothing set\n")
    assert SegReuseConfig.from_yaml(path) == SegReuseConfig()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- policy", "no mapping"),
        ("policy: [", "not YAML"),
        ("polcy: shift", "unknown option 'polcy'"),
        ("recompute_ratio: .nan", "recompute_ratio=nan must be"),
        ("dense_layers: yes", "dense_layers=True must be"),
        ("1: 2", "unknown option 1"),
    ],
)
def test_bad_yaml_names_the_file_and_the_fault(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        SegReuseConfig.from_yaml(path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


def test_missing_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no_such\.yaml"):
        SegReuseConfig.from_yaml(tmp_path / "no_such.yaml")


@pytest.mark.parametrize(
    ("environment", "enabled", "starts"),
    [
        (None, True, True),
        ("1", True, False),
        ("true", True, False),
        ("0", True, True),
        ("", True, True),
        ("FALSE", True, True),
        (None, False, False),
        ("0", False, False),
        (None, "observe", "observe"),
        ("1", "observe", False),
    ],
)
def test_kill_switch_at_start(
    monkeypatch: pytest.MonkeyPatch, environment: str | None, enabled: Any, starts: Any
) -> None:
    monkeypatch.delenv("VLLM_SEGREUSE_DISABLE", raising=False)
    if environment is not None:
        monkeypatch.setenv("VLLM_SEGREUSE_DISABLE", environment)
    assert SegReuseConfig(enabled=enabled).starts_enabled is starts


# Rights to namespaces.

ALICE = hashlib.sha256(b"alice's key").hexdigest()
RIGHTS = {ALICE: ("handbook", "wiki"), hashlib.sha256(b"operator").hexdigest(): ("*",)}


@pytest.mark.parametrize(
    ("api_key", "keys", "shared"),
    [
        ("alice's key", ("wiki",), True),
        ("alice's key", ("handbook",), True),
        ("alice's key", ("handbook", "chapter 1"), True),
        ("alice's key", ("payroll",), False),
        ("alice's key", ("chapter 1", "handbook"), False),
        ("operator", ("payroll",), True),
        ("mallory", ("handbook",), False),
        ("", ("handbook",), False),
    ],
)
def test_extra_keys_mean_what_the_api_key_may_share(
    api_key: str, keys: tuple[str, ...], shared: bool
) -> None:
    bound = bind_extra_keys(keys, api_key, RIGHTS)
    assert (bound == keys) is shared
    assert bound[-len(keys) :] == keys
    assert parse_extra_keys(bound, trusted=True) == bound


def test_under_other_names_a_caller_is_alone_but_with_itself() -> None:
    mallory, eve = (bind_extra_keys(("handbook",), key, RIGHTS) for key in ("mallory", "eve"))
    assert len({mallory, eve, ("handbook",)}) == 3
    assert mallory == bind_extra_keys(("handbook",), "mallory", RIGHTS)


def test_03_clients_cannot_write_bound_keys_or_orders_to_freeze() -> None:
    bound = list(bind_extra_keys(("handbook",), "mallory", RIGHTS))
    with pytest.raises(RequestError):
        parse_request({"extra_keys": bound}, CONFIG)
    order = {"extra_keys": "a", "segreuse_freeze": "entry:0:1:0"}
    with pytest.raises(RequestError, match="segreuse_freeze"):
        parse_request(order, CONFIG)
    assert parse_request(order, CONFIG, trusted=True).freeze == "entry:0:1:0"


@pytest.mark.parametrize(
    "value",
    [
        "x",
        {"alice": ["a"]},
        {ALICE: "handbook"},
        {ALICE: [1]},
        {ALICE: [""]},
        {1: []},
        {ALICE.upper(): ["a"]},
        {ALICE + "0": ["a"]},
        {ALICE[1:]: ["a"]},
        {ALICE: ["a"], "bob": ["a"]},
    ],
)
def test_bad_rights_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="namespaces"):
        SegReuseConfig.from_options({"namespaces": value})


# What options may say, and what can be done with it.


def test_the_index_stores_every_depth_that_may_be_asked_for() -> None:
    assert RANGES["max_provenance_depth"][1] == MAX_PROVENANCE_DEPTH
    index = SegmentIndex(num_blocks=2, block_size=2)
    tokens = np.arange(4, dtype=np.int32)
    blocks = np.arange(2, dtype=np.int32)
    depths = np.asarray([0, MAX_PROVENANCE_DEPTH], np.int32)
    index.insert(0, blocks, tokens, 0, depths=depths)
    assert index.nodes["depth"][:2].tolist() == [0, MAX_PROVENANCE_DEPTH]
    with pytest.raises(ValueError, match="depth 128"):
        index.insert(0, blocks, tokens, 0, depths=depths + 1)
