# SPDX-License-Identifier: Apache-2.0
"""The region is as large as it may be, the same memory in all processes of an engine, and leaves no
file behind."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.features.tier import region as module
from vllm_segreuse.features.tier.options import TierOptions
from vllm_segreuse.features.tier.region import (
    HostRegion,
    RegionShape,
    open_region,
    path_of,
    region_name,
    region_shape,
)
from vllm_segreuse.model.cells import StoredPage

SHAPE = RegionShape(rows=20, cell_bytes=8192, ranks=2)


@pytest.fixture
def name() -> Iterator[str]:
    found = f"test_{uuid.uuid4().hex}"
    yield found
    assert not os.path.exists(path_of(found)), "left behind"


def kv_cache(block_bytes: int, num_blocks: int = 7) -> Any:
    tensor = SimpleNamespace(size=block_bytes * num_blocks)
    return SimpleNamespace(kv_cache_tensors=[tensor, tensor], num_blocks=num_blocks)


@pytest.mark.parametrize(
    ("block_bytes", "cell_bytes"), [(4096, 4096), (4097, 8192), (100, 4096), (1 << 20, 1 << 20)]
)
def test_rows_fill_what_they_may(block_bytes: int, cell_bytes: int) -> None:
    shape = region_shape(kv_cache(block_bytes), ranks=2, host_gib=0.125)
    assert shape == RegionShape((1 << 27) // (2 * cell_bytes), cell_bytes, 2)
    assert shape.row_bytes == 2 * cell_bytes
    assert shape.num_bytes <= 1 << 27 < shape.num_bytes + shape.row_bytes


def test_a_region_of_few_rows_is_refused() -> None:
    assert region_shape(kv_cache(1 << 20), 1, 16 / 1024).rows == 16
    with pytest.raises(RefusedError) as caught:
        region_shape(kv_cache(3 << 19), 2, 47.5 / 1024)
    assert str(caught.value) == (
        "segment reuse cannot start: tier.host_gib is 0.0463867, which holds 15 KV blocks of "
        "3.0 MiB; give it room for 16 at least"
    )


def test_processes_see_the_same_memory_and_the_last_removes_its_name(name: str) -> None:
    stored = [StoredPage(2000, torch.bfloat16), StoredPage(1200, torch.float32)]
    workers = [HostRegion(name, SHAPE, rank) for rank in range(2)]
    assert os.path.exists(path_of(name))
    views = [worker.views(stored) for worker in workers]
    scheduler = HostRegion(name, SHAPE, None)
    assert not os.path.exists(path_of(name))
    for rank, (first, second) in enumerate(views):
        assert (first.shape, second.shape) == ((20, 1000), (20, 300))
        assert (first.dtype, second.dtype) == (torch.bfloat16, torch.float32)
        first[:], second[:] = rank + 1, rank + 10
        assert (first.stride(0), second.stride(0)) == (8192, 4096), "elements of a row"
    row = bytes(np.asarray(scheduler.create_kv_memoryview())[7])
    for rank in range(2):
        cell = torch.frombuffer(bytearray(row[8192 * rank : 8192 * (rank + 1)]), dtype=torch.int8)
        assert (cell[:2000].view(torch.bfloat16) == rank + 1).all()
        assert (cell[2000:3200].view(torch.float32) == rank + 10).all()
        assert not cell[3200:].any()
        assert torch.equal(workers[rank].cells()[7], cell)
    del first, second, views
    for region in (*workers, scheduler):
        region.cleanup()


def test_a_process_that_gives_its_region_back_maps_nothing_of_it(name: str) -> None:
    def is_mapped() -> bool:
        return path_of(name) in Path("/proc/self/maps").read_text()

    worker = HostRegion(name, SHAPE, 0)
    assert is_mapped()
    worker.cleanup()
    assert not is_mapped()


def test_who_has_no_region_of_workers_is_refused(name: str) -> None:
    with pytest.raises(RefusedError, match="not on this machine"):
        HostRegion(name, SHAPE, None)


def test_pages_that_do_not_fit_are_refused(name: str) -> None:
    worker = HostRegion(name, SHAPE, 0)
    with pytest.raises(RefusedError, match=r"8200 bytes, of which vLLM's .* has 8192"):
        worker.views([StoredPage(4100, torch.float32)] * 2)
    worker.cleanup()


@pytest.mark.parametrize(
    ("shape", "available", "why"),
    [
        (SHAPE, SHAPE.num_bytes - 1, "0.0 GiB of memory are available"),
        (RegionShape(1 << 34, 8192, 2), 1 << 60, "/dev/shm"),
    ],
)
def test_what_cannot_be_had_is_refused(
    name: str, shape: RegionShape, available: int, why: str
) -> None:
    with pytest.raises(RefusedError, match=why) as refused:
        HostRegion(name, shape, 0, available)
    assert str(refused.value).endswith("lower tier.host_gib")


def test_a_region_may_take_all_that_is_available(name: str) -> None:
    HostRegion(name, SHAPE, 0, SHAPE.num_bytes).cleanup()
    with pytest.raises(RefusedError) as caught:
        HostRegion(name, RegionShape(1 << 10, 1 << 20, 2), 0, 3 << 29)
    assert str(caught.value) == (
        "segment reuse cannot start: the host tier's 2.0 GiB cannot be had (1.5 GiB of memory are "
        "available); lower tier.host_gib"
    )


def test_memory_that_cannot_be_touched_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise OSError(14, "Bad address")

    monkeypatch.setattr(
        "vllm.v1.kv_offload.cpu.shared_offload_region._madvise_populate_write", fail
    )
    with pytest.raises(RefusedError, match="Bad address"):
        HostRegion(name, SHAPE, 0)


@pytest.mark.parametrize("end", ["sys.exit(3)", "child"])
def test_a_worker_that_ends_before_the_scheduler_came_removes_the_name(
    name: str, end: str, tmp_path: Path
) -> None:
    opened = f"HostRegion({name!r}, RegionShape(20, 4096, 1), 0)"
    lines = ["import multiprocessing, os, sys", f"from {module.__name__} import *", ""]
    if end == "child":
        lines += ["def run():", f"    region = {opened}", "    sys.exit(3)", ""]
        lines += ["if __name__ == '__main__':"]
        lines += ["    child = multiprocessing.get_context('fork').Process(target=run)"]
        lines += ["    child.start(); child.join()"]
    else:
        lines += [f"region = {opened}", f"assert os.path.exists({path_of(name)!r})", end]
    script = tmp_path / "worker.py"
    script.write_text("\n".join(lines))
    subprocess.run([sys.executable, str(script)], check=False, capture_output=True)
    assert not os.path.exists(path_of(name))


def test_engines_have_regions_of_their_own() -> None:
    def config(engine_id: str, instance_id: str) -> Any:
        transfer = SimpleNamespace(engine_id=engine_id)
        return SimpleNamespace(kv_transfer_config=transfer, instance_id=instance_id)

    names = {region_name(config(a, b)) for a in ("x_dp0", "x_dp1") for b in ("1", "2")}
    assert len(names) == 4


def test_a_region_is_made_of_the_engines_configuration(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "region_name", lambda config: name)
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
    region = open_region(config, kv_cache(5000), TierOptions(host_gib=1 / 1024), 1)
    assert region.shape == RegionShape(64, 8192, 2)
    assert region.rank == 1
    region.cleanup()
