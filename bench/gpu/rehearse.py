# SPDX-License-Identifier: Apache-2.0
"""Try the bundle without a GPU, on the Python, torch and Triton of the machine that it is for.

    python -m bench.gpu.rehearse --into /tmp/site        # where the archives were unpacked

That vLLM's libraries load into this torch, that what serves can be imported, that vLLM's compiler
works, that every hook of this package finds its target, and the pass its kernels: what would else
be found out in the first minutes on a GPU. A library of stubs stands in for the driver, a made-up
Hopper for the GPU. What kernels compute it cannot say. Each step has a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.gpu import pack, unpack

LIBRARIES = {
    pack.PARTS["core"][0]: ("_C", "rms_norm"),
    pack.PARTS["experts"][0]: ("_moe_C", "topk_softmax"),
    pack.PARTS["flash3"][0]: ("_vllm_fa3_C", "fwd"),
}
"""An operator of each, by its namespace."""

SERVING = (
    *("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"),
    *("vllm.v1.attention.backends.flash_attn", "vllm.v1.attention.backends.triton_attn"),
    *("vllm.model_executor.models.qwen3", "vllm.model_executor.models.qwen3_moe"),
    *("vllm.model_executor.models.llama", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"),
    *("vllm.entrypoints.openai.api_server", "vllm.entrypoints.llm", "vllm.benchmarks.serve"),
)
OURS = (
    "vllm_segreuse.connector",
    "vllm_segreuse.scheduling.scheduler",
    "vllm_segreuse.prefill.checks",
)


def pretend() -> None:
    """From here on vLLM of this process takes the machine for one with a Hopper."""
    import triton.backends.nvidia.driver as nvidia  # type: ignore[import-untyped]
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "a made-up Hopper"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    nvidia.CudaDriver.is_active = staticmethod(lambda: True)
    vllm.platforms._current_platform = Hopper()


def load_libraries(site: Path) -> str:
    """vLLM's libraries load, and register their operators."""
    import torch

    for library, (namespace, operator) in LIBRARIES.items():
        torch.ops.load_library(str(site / library))
        getattr(getattr(torch.ops, namespace), operator)
    names = torch._C._dispatch_get_all_op_names()
    known = {namespace for namespace, _ in LIBRARIES.values()}
    count = sum(name.split("::")[0] in known for name in names)
    return f"{count} operators in torch {torch.__version__}"


def import_serving(site: Path) -> str:
    """Runners, backends, models and the server can be imported, and the server has its routes."""
    pretend()
    for module in SERVING:
        importlib.import_module(module)
    return f"{len(SERVING)} modules, {len(routes())} routes"


def routes() -> list[Any]:
    """Those of vLLM's server; some of their modules are imported no sooner than they are added."""
    from vllm.entrypoints.launchers.app import build_app

    from segreuse_tools.server_arguments import server_parser

    args = server_parser("vllm-segreuse").parse_args([])
    return list(build_app(args, ("generate",), None).routes)


def find_hooks(site: Path) -> str:
    """This package can be imported, finds all of vLLM that it changes, and leaves torch alone."""
    pretend()
    import torch

    names = ("Stream", "Event", "current_stream", "set_stream", "stream")
    before = [getattr(torch.cuda, name) for name in names]
    for module in OURS:
        importlib.import_module(module)
    from vllm_segreuse import plugin

    plugin.register()
    plugin.enable()
    for name, found in zip(names, before, strict=True):
        if getattr(torch.cuda, name) is not found:
            raise RuntimeError(f"torch.cuda.{name} was replaced: vLLM's CPU worker was imported")
    return "installed"


def prefer_kernels(site: Path) -> str:
    """During a pass norms, rotations and activations run vLLM's kernels; before and after it what
    vLLM compiles."""
    pretend()
    import torch
    import vllm.model_executor.layers.layernorm  # noqa: F401 (registers kernels, as in any model)
    from vllm import ir
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from vllm_segreuse.model.fast_ops import FastOps

    torch.ops.load_library(str(site / pack.PARTS["core"][0]))
    compiled = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    with set_current_vllm_config(VllmConfig(compilation_config=compiled)):
        model = torch.nn.ModuleList([get_rope(64, 2048, True, plain), SiluAndMul()])

    def running() -> list[str]:
        norms = (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)
        return [
            *(op._forward_method.__name__ for op in model),
            *((op.get_priority() or ["native"])[0] for op in norms),
        ]

    before = running()
    with FastOps(model).preferred():
        during = running()
    found = (before, during, running())
    native, kernels = ["forward_native"] * 2, ["forward_cuda"] * 2
    both = [*native, "native", "native"]
    if found != (both, [*kernels, "vllm_c", "vllm_c"], both):
        raise RuntimeError(f"before, during and after a pass run {found}")
    return ", ".join(dict.fromkeys(during))


def compile_model(site: Path) -> str:
    """vLLM's compiler makes the same of a small model as torch does, for two batch sizes."""
    pretend()
    import torch
    from vllm.compilation.counter import compilation_counter
    from vllm.compilation.decorators import support_torch_compile
    from vllm.config import (
        CompilationConfig,
        CompilationMode,
        CUDAGraphMode,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.forward_context import set_forward_context

    class Small(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            self.linear = torch.nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x)) + positions[:, None]

    how = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.NONE)
    config = VllmConfig(compilation_config=how)
    with set_current_vllm_config(config), set_forward_context(None, config), torch.no_grad():
        dynamic = {"x": 0, "positions": 0}
        compiled = support_torch_compile(Small, dynamic_arg_dims=dynamic)
        model: Any = compiled(vllm_config=config)
        for count in (8, 5):
            x, positions = torch.randn(count, 32), torch.arange(count)
            expected = torch.relu(model.linear(x)) + positions[:, None]
            torch.testing.assert_close(model(x, positions), expected)
    graphs = compilation_counter.num_backend_compilations
    if not graphs:
        raise RuntimeError("nothing was compiled")
    return f"{graphs} graph, as torch computes it"


STEPS: dict[str, Callable[[Path], str]] = {
    "libraries": load_libraries,
    "serving": import_serving,
    "compiler": compile_model,
    "hooks": find_hooks,
    "kernels of the pass": prefer_kernels,
}


def make_driver(folder: Path, libraries: Iterable[Path]) -> None:
    """A `libcuda.so.1` that has what the libraries ask of the driver, and no device."""
    asked = {name for path in libraries for name in pack.symbols(path, "--undefined-only")}
    functions = sorted(name for name in asked if name[:2] == "cu" and name[2:3].isupper())
    source = folder / "driver.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in functions))
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*command, str(folder / "libcuda.so.1"), str(source)], check=True)


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if every step works; says in one sentence what does not."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.rehearse", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--into", type=Path, required=True, help="folder of the unpacked archives")
    parser.add_argument("--step", choices=STEPS, help="this one only, in this process")
    args = parser.parse_args(argv)
    if args.step:
        print(STEPS[args.step](args.into))
        return 0
    missing = [library for library in LIBRARIES if not (args.into / library).exists()]
    if missing:
        print(f"{args.into} lacks {missing[0]}: unpack all archives there", file=sys.stderr)
        return 1
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        make_driver(Path(scratch), [args.into / library for library in LIBRARIES])
        environment = {
            "LD_LIBRARY_PATH": os.pathsep.join([scratch, os.environ.get("LD_LIBRARY_PATH", "")]),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        }
        command = ["-m", "bench.gpu.rehearse", "--into", str(args.into), "--step"]
        for step in STEPS:
            works, said = unpack.tried([*command, step], args.into, **environment)
            print(f"{step}: {said}" if works else f"{step}: does not work: {said}", flush=True)
            failed += not works
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
