# SPDX-License-Identifier: Apache-2.0
"""Of documents nothing gets into logs or temporary files, whatever becomes of them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from segreuse_tools.knowledge.extract import Extractor, find_sources
from tests.knowledge.fake_engine import FakeEngine
from tests.knowledge.test_service import FULL, Refusing, documents, serving, until
from vllm_segreuse.features.knowledge.errors import UnavailableError
from vllm_segreuse.features.knowledge.schemas import CreateBase

SECRET = "the password is swordfish"


def test_no_log_at_any_level_has_the_text_or_the_tokens_of_a_document(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither while all goes well, nor when computing, releasing or writing fails."""
    caplog.set_level(logging.DEBUG)
    path = str(tmp_path / "manifest")
    engine = FakeEngine()

    async def all_that_happens() -> None:
        async with serving(engine, path=path) as service:
            await service.create_base(CreateBase(name="base"))
            await service.add("base", documents(a=SECRET, b=SECRET + "!", c="other text"))
            await service.add("base", documents(a=SECRET + "?"))
            engine.answer = RuntimeError("of the engine")
            await service.add("base", documents(d=SECRET + "."))
            engine.answer = None
            for method, ends in (("put", False), ("delete", True)):
                failing = Refusing(service.store, method, FULL)
                with pytest.raises(UnavailableError):
                    await (
                        service.delete("base", "a")
                        if ends
                        else service.add("base", documents(e=SECRET + ","))
                    )
                failing.is_failing = False
            unfreezing = Refusing(engine, "unfreeze", RuntimeError("of the engine"))
            await service.delete("base", "a")
            await until(lambda: asyncio.sleep(0, unfreezing.calls > 2))
            unfreezing.is_failing = False
            await service.delete_base("base")

    asyncio.run(all_that_happens())
    assert "of the engine" in caplog.text
    assert "swordfish" not in caplog.text
    tokens = engine.encode("swordfish")
    for separator in (", ", " ", ","):
        assert separator.join(map(str, tokens)) not in caplog.text


def test_the_command_makes_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are parsed in another process, which gets the file and answers with its text."""
    folder, temporary = tmp_path / "documents", tmp_path / "temporary"
    for made in (folder, temporary):
        made.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    (folder / "a.txt").write_text(SECRET)
    (folder / "b.html").write_text(f"<p>{SECRET}</p>")
    monkeypatch.chdir(temporary)
    with Extractor() as extractor:
        for source in find_sources([folder]):
            (text,) = extractor.read(source)
            assert text.text.strip() == SECRET
            assert [*temporary.iterdir()] == []
    assert [*temporary.iterdir()] == []
