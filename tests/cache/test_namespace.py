# SPDX-License-Identifier: Apache-2.0
"""Different requests never share a namespace key; ids are reused only when nobody is left."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_segreuse.cache.namespace import HeldNamespaces, NamespaceTable, namespace_key

# Few, short strings, with digits and tags, so that careless joining would collide.
text = st.text(alphabet="abKSLM\x00\x01", max_size=3)
fields = st.tuples(
    st.lists(text, max_size=3).map(tuple),
    st.none() | text,
    st.none() | st.tuples(text, text),
    st.lists(text, max_size=3).map(tuple),
)


@given(fields, fields)
def test_05_keys_are_equal_exactly_if_every_field_is(one, other):
    assert (namespace_key(*one) == namespace_key(*other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((("a", "bc"), None, None, ()), (("ab", "c"), None, None, ())),
        ((("a", "b"), None, None, ()), (("b", "a"), None, None, ())),
        ((("a",), None, None, ()), (("a", ""), None, None, ())),
        ((("a",), None, None, ()), (("a",), "", None, ())),
        ((("a",), "x", None, ()), (("a",), None, ("x", ""), ())),
        ((("a",), None, ("x", "1"), ()), (("a",), None, ("x", "2"), ())),
        ((("a",), None, None, ("x",)), (("a", "x"), None, None, ())),
    ],
)
def test_05_09_lookalikes_differ(one, other):
    assert namespace_key(*one) != namespace_key(*other)


def test_04_composed_and_decomposed_spellings_are_distinct():
    spellings = [unicodedata.normalize(form, "é") for form in ("NFC", "NFD")]
    assert len({namespace_key((s,), None, None, ()) for s in spellings}) == 2


def test_03_a_lone_surrogate_is_an_error():
    with pytest.raises(ValueError, match="surrogates"):
        namespace_key(("\ud800",), None, None, ())


def test_interning_gives_one_small_id_per_key():
    table = NamespaceTable(lambda namespace: False)
    assert [table.intern(key) for key in (b"a", b"b", b"a")] == [0, 1, 0]
    assert table.find(b"b") == 1
    assert table.find(b"c") is None
    assert len(table) == 2


def test_each_of_many_namespaces_keeps_its_digest() -> None:
    table = NamespaceTable(lambda namespace: True)
    given = [table.digest(table.intern(b"%d" % number)) for number in range(200)]
    assert len({0, *given}) == 201
    assert table.digests[:200].tolist() == given


def test_an_id_lives_until_its_last_reference():
    table = NamespaceTable(lambda namespace: False)
    first = table.intern(b"a")
    table.acquire(first)
    table.release(first)
    assert table.find(b"a") == first
    table.release(first)
    assert table.find(b"a") is None
    assert table.intern(b"b") == first


def test_an_id_is_not_reused_while_blocks_of_it_are_indexed():
    indexed = {0}
    table = NamespaceTable(lambda namespace: namespace in indexed)
    first = table.intern(b"a")
    table.release(first)
    assert table.find(b"a") == first
    assert table.intern(b"b") != first


def test_without_an_index_to_ask_no_id_is_reused():
    table = NamespaceTable()
    table.release(table.intern(b"a"))
    assert table.intern(b"b") == 1


def test_idle_namespaces_are_collected_once_their_blocks_are_gone():
    indexed: set[int] = set()
    table = NamespaceTable(lambda namespace: namespace in indexed)
    largest = 0
    for i in range(20_000):
        namespace = table.intern(str(i).encode())
        indexed.add(namespace)
        table.release(namespace)
        indexed.discard(table.find(str(i - 100).encode()))  # evicted, and nobody says so
        largest = max(largest, len(table), namespace)
    assert largest < 2500


def test_a_sweep_spares_those_who_run_and_those_whose_blocks_live():
    indexed = set(range(10_000))
    table = NamespaceTable(lambda namespace: namespace in indexed)
    running, resting = table.intern(b"running"), table.intern(b"resting")
    table.release(resting)
    for i in range(3000):
        table.release(table.intern(str(i).encode()))
    indexed.clear()
    indexed.add(resting)  # all others have been evicted, also what the running one had
    for i in range(3000, 6000):
        assert table.intern(str(i).encode()) not in (running, resting)
    assert (table.find(b"running"), table.find(b"resting")) == (running, resting)
    assert table.find(b"0") is None


def test_misuse_is_reported():
    table = NamespaceTable(lambda namespace: namespace == 0)
    with pytest.raises(ValueError, match="namespace 5 is not in use"):
        table.acquire(5)
    namespace = table.intern(b"a")
    table.release(namespace)
    with pytest.raises(ValueError, match="namespace -1 is not in use"):
        table.release(-1)
    forgotten = table.intern(b"b")
    table.release(forgotten)
    with pytest.raises(ValueError, match=f"namespace {forgotten} is not in use"):
        table.acquire(forgotten)
    with pytest.raises(ValueError, match="released more often"):
        table.release(namespace)


def test_a_holder_gives_back_what_it_has_and_no_more():
    table = NamespaceTable(lambda namespace: False)
    first, second = table.intern(b"a"), table.intern(b"b")
    held = HeldNamespaces(table)
    for namespace in (first, first, second):
        held.acquire(namespace)
    held.release(second)
    assert held.counts() == {first: 2}
    with pytest.raises(ValueError, match=f"namespace {second} is not held"):
        held.release(second)
    held.release_all()
    held.release_all()
    assert (held.counts(), table.find(b"a"), table.find(b"b")) == ({}, first, second)
    table.release(first)
    table.release(second)
    assert len(table) == 0


@pytest.mark.parametrize("all_at_once", [False, True])
def test_what_may_be_given_back_already_is_not_given_back_again(all_at_once):
    def fail(namespace):
        raise RuntimeError("broken")

    table = NamespaceTable(fail)
    held = HeldNamespaces(table)
    namespace = table.intern(b"a")
    held.acquire(namespace)
    table.release(namespace)  # the other holder's
    with pytest.raises(RuntimeError, match="broken"):
        held.release_all() if all_at_once else held.release(namespace)
    assert not held.counts()
    assert table.intern(b"a") == namespace  # by somebody else, from whom nothing is taken
    held.release_all()
    with pytest.raises(RuntimeError, match="broken"):
        table.release(namespace)
