# SPDX-License-Identifier: Apache-2.0
"""On CPUs the model computes on as many cores as without the plugin."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.utils import cpu_resource_utils
from vllm.utils.cpu_resource_utils import LogicalCPUInfo
from vllm.utils.ompmultiprocessing import OMPProcessManager

from vllm_segreuse import kv_transfer_config
from vllm_segreuse.compat import omp_processes
from vllm_segreuse.config.launch import names_connector

NIXL = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")


def cores(connector: KVTransferConfig | None) -> list[int]:
    """Where the only rank computes."""
    parallel = SimpleNamespace(
        local_world_size=1,
        data_parallel_rank_local=None,
        _api_process_count=1,
        assigned_physical_gpu_ids=None,
    )
    config: Any = SimpleNamespace(parallel_config=parallel, kv_transfer_config=connector)
    manager = OMPProcessManager(config)
    assert config.kv_transfer_config is connector, "it stays configured"
    [mine] = manager.cpu_lists
    return list(mine)


@pytest.mark.parametrize(("num_cores", "of_another"), [(2, [0, 1]), (8, [*range(6)])])
def test_our_connector_takes_no_core(
    num_cores: int, of_another: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = [LogicalCPUInfo(id=i, physical_core=i, numa_node=0) for i in range(num_cores)]
    monkeypatch.setattr(cpu_resource_utils, "get_allowed_cpu_list", lambda: machine)
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda *ids: [0])
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    monkeypatch.setattr(OMPProcessManager, "__init__", OMPProcessManager.__init__)
    omp_processes.install(names_connector)
    once = OMPProcessManager.__init__
    omp_processes.install(names_connector)
    assert OMPProcessManager.__init__ is once
    ours = kv_transfer_config(similarity={})
    assert cores(ours) == cores(None) == [*range(num_cores - 1)]
    assert cores(NIXL) == of_another, "vLLM's own rule is as it was"
