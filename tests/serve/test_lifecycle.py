# SPDX-License-Identifier: Apache-2.0
"""What is there while a server serves, and that it ends with it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.features.knowledge import origin
from vllm_segreuse.serve import lifecycle

RIGHTS = {"0" * 64: ("handbook",)}


class Service:
    """Stands for the service of knowledge bases."""

    def __init__(self) -> None:
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


def make_client(
    engines: int = 1, servers: int = 1, own_engines: int | None = None, **options: Any
) -> Any:
    parallel = SimpleNamespace(data_parallel_size=engines, _api_process_count=servers)
    kv = SimpleNamespace(kv_connector_extra_config=options)
    model = SimpleNamespace(hf_config=SimpleNamespace())
    config = SimpleNamespace(kv_transfer_config=kv, parallel_config=parallel, model_config=model)
    own = range(engines if own_engines is None else own_engines)
    core = SimpleNamespace(core_engines=list(own))
    return SimpleNamespace(vllm_config=config, engine_core=core)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Services that were started, with their arguments."""
    found: list[Any] = []

    async def start(engine: Any, vllm_config: Any, config: Any, *, in_background: bool) -> Service:
        service = Service()
        found.append((service, engine, vllm_config, config, in_background))
        return service

    monkeypatch.setattr(lifecycle, "start_service", start)
    monkeypatch.setattr(lifecycle, "ServedEngine", lambda client: ("engine of", client))
    monkeypatch.setattr(lifecycle, "ParallelEngines", lambda client, n: (n, "engines of", client))
    return found


def serve(client: Any, admin: FastAPI | None, look: Any = lambda app: None) -> FastAPI:
    async def run() -> FastAPI:
        app = FastAPI()
        app.state.engine_client = client
        async with lifecycle.serving(app, admin):
            look(app)
        return app

    return asyncio.run(run())


def test_rights_are_known_while_it_serves() -> None:
    for namespaces in (RIGHTS, {}, None):

        def look(app: FastAPI, namespaces: Any = namespaces) -> None:
            assert app.state.segreuse_namespaces == namespaces
            assert not origin.may_name(True), "requests of unknown origin are no program's"

        serve(make_client(namespaces=namespaces), None, look)
        assert origin.may_name(True)


def test_an_error_ends_it_too() -> None:
    def fails(app: FastAPI) -> None:
        raise OSError("port taken")

    with pytest.raises(OSError, match="port taken"):
        serve(make_client(), None, fails)
    assert origin.may_name(True)


def test_the_administrators_application_gets_what_it_needs(started: list[Any]) -> None:
    client, admin = make_client(knowledge_body_bytes=2048), FastAPI()

    def look(app: FastAPI) -> None:
        ((service, engine, vllm_config, config, in_background),) = started
        assert admin.state.engine_client is client
        assert admin.state.max_body_bytes == 2048
        assert admin.state.service is service
        assert not service.is_closed
        assert (engine, vllm_config) == (("engine of", client), client.vllm_config)
        assert config == SegReuseConfig(knowledge_body_bytes=2048)
        assert in_background

    serve(client, admin, look)
    assert started[0][0].is_closed


def test_its_service_is_closed_after_an_error(started: list[Any]) -> None:
    def fails(app: FastAPI) -> None:
        raise OSError("port taken")

    with pytest.raises(OSError, match="port taken"):
        serve(make_client(), FastAPI(), fails)
    assert started[0][0].is_closed


def test_all_engines_of_one_server_share_knowledge_bases(started: list[Any]) -> None:
    client = make_client(engines=3)
    serve(client, FastAPI())
    assert started[0][1] == (3, "engines of", client)


@pytest.mark.parametrize(
    "several",
    [{"servers": 2}, {"engines": 2, "servers": 2}, {"engines": 2, "own_engines": 1}],
    ids=["servers", "engines and servers", "servers with an engine each"],
)
def test_with_several_servers_there_are_no_knowledge_bases(
    started: list[Any], several: dict[str, int]
) -> None:
    admin = FastAPI()
    serve(make_client(**several), admin)
    assert admin.state.service is None
    assert admin.state.engine_client is not None
    assert started == []


def test_a_server_that_only_renders_has_no_engine(started: list[Any]) -> None:
    serve(None, FastAPI())
    assert started == []
