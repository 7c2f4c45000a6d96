# SPDX-License-Identifier: Apache-2.0
"""A pass asks the device once, at its end: on a GPU every question stops the host until that has
caught up.

Questions are counted on the CPU, where device and host are one, while the pass is told that they
are not.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.e2e.engine import NAMESPACE, Engine, Prompts, engine
from vllm_segreuse.kernels import arguments, cpu

CPU_KERNELS = (cpu.__file__, arguments.__file__)

# What waits for a GPU: the host gets a number, or the size of a result depends on the data.
METHODS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")
OPERATORS = (
    *("_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "masked_select"),
    *("equal", "is_nonzero"),
)
RECOMPUTING = NAMESPACE | {
    "segreuse_policy": "sparsex",
    "segreuse_min_reused_tokens": 16,
    "segreuse_recompute_ratio": 0.2,
}
OPTIONS = {
    "shift": NAMESPACE | {"segreuse_policy": "shift"},
    "sparsex": RECOMPUTING | {"segreuse_dense_layers": 0},
    "hybrid": RECOMPUTING | {"segreuse_dense_layers": 1},
    "dense": RECOMPUTING | {"segreuse_dense_layers": 4, "segreuse_recompute_ratio": 0.0},
    "cacheblend": RECOMPUTING | {"segreuse_policy": "cacheblend"},
    "epic": NAMESPACE | {"segreuse_policy": "epic"},
    "prophet": RECOMPUTING | {"segreuse_policy": "prophet"},
    "peaks": RECOMPUTING | {"segreuse_policy": "peaks"},
    "focus": RECOMPUTING | {"segreuse_policy": "focus"},
    "exact": NAMESPACE | {"segreuse_policy": "exact"},
}


class Questions(TorchDispatchMode):
    """Names of the questions asked inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in OPERATORS or masks:
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[str]]:
    """The questions asked inside the block, those of methods included."""
    with pytest.MonkeyPatch.context() as patch, Questions() as questions:
        for name in METHODS:
            original = getattr(torch.Tensor, name)

            def asking(*args: Any, _name: str = name, _original: Any = original) -> Any:
                before = len(questions.asked)
                result = _original(*args)
                here = inspect.currentframe()
                assert here is not None
                assert here.f_back is not None
                # Its arguments are looked at on a CPU only.
                of_cpu_kernel = here.f_back.f_code.co_filename in CPU_KERNELS
                questions.asked[before:] = [] if of_cpu_kernel else [_name]  # however it is done
                return result

            patch.setattr(torch.Tensor, name, asking)
        to = torch.Tensor.to

        def moving(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # The device of the pass comes as an object; who names the CPU means the host.
            if "cpu" in (*args, kwargs.get("device")):
                questions.asked.append("to")
            return to(tensor, *args, **kwargs)

        patch.setattr(torch.Tensor, "to", moving)
        yield questions.asked


@pytest.fixture(scope="module")
def reusing() -> Iterator[Engine]:
    at_once = {"spread_tokens": 0}
    with engine("qwen3", at_once, max_model_len=1024, max_num_batched_tokens=256) as running:
        yield running


@pytest.fixture
def passes(reusing: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The questions of each pass from here on."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from vllm_segreuse.prefill import tokens

    backlog = get_kv_transfer_group().worker_side.backlog
    take, found = backlog.take, []

    def counting(plans: Any) -> Any:
        with counted() as asked:
            report = take(plans)
        found.append(asked)
        return report

    monkeypatch.setattr(backlog, "take", counting)
    for check in ("moves", "places", "positions", "blocks", "tables"):
        # They read values on a CPU only (`tests/kernels/test_arguments.py`).
        monkeypatch.setattr(cpu, f"check_{check}", lambda *_: None)
    monkeypatch.setattr(tokens, "host_reads", lambda device: False)
    return found


def evict(running: Engine, tokens: list[int], block: int) -> None:
    """A full block of a cached prompt is cached no more."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    hasher = running.llm.llm_engine.engine_core.engine_core.request_block_hasher
    hashes = Request("", tokens, SamplingParams(), None, block_hasher=hasher).block_hashes
    found = running.pool.get_cached_block(hashes[block], [0])
    running.pool.evict_blocks({found[0].block_id})


@pytest.mark.parametrize("policy", OPTIONS)
def test_a_pass_asks_once(reusing: Engine, passes: list[list[str]], policy: str) -> None:
    reusing.reset()
    text = Prompts(reusing.vocab_size, seed=5)
    documents = [text.tokens(170), text.tokens(200)]
    reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
    prompts = [text.around(*documents), text.around(documents[1], documents[0])]
    if policy == "exact":
        prompts = [documents[1] + text.tokens(90) for _ in range(2)]
        evict(reusing, documents[1], block=1)
    passes.clear()
    answers = reusing.ask(*prompts, options=OPTIONS[policy], max_tokens=2)
    assert all(answer.report["bypass_reason"] is None for answer in answers)
    assert all((answer.report["exact_tokens"] > 0) == (policy == "exact") for answer in answers)
    assert passes
    # How many tokens `peaks` chooses is the device's to say.
    expected = ["index", "tolist"] if policy == "peaks" else ["tolist"]
    assert all(asked == expected for asked in passes), passes


def test_questions_are_noticed() -> None:
    """The count would see each kind."""
    tensor = torch.arange(4)
    kinds: list[Callable[[], Any]] = [
        lambda: tensor.tolist(),
        lambda: bool(tensor.any()),
        lambda: int(tensor[2]),
        lambda: tensor.nonzero(),
        lambda: tensor[tensor > 1],
        lambda: tensor.unique(),
        lambda: tensor.cpu(),
        lambda: tensor.to("cpu"),
        lambda: tensor.to(device="cpu", dtype=torch.float32),
        lambda: torch.equal(tensor, tensor),
    ]
    for kind in kinds:
        with counted() as asked:
            kind()
        assert len(asked) == 1
