# SPDX-License-Identifier: Apache-2.0
"""`vllm.v1.engine.input_processor.InputProcessor`: a request's own options, checked by its caller.

Every request passes `_validate_params` in the process that submits it: offline callers, and the
endpoints that `serve/requests.py` does not check earlier. vLLM has no hook for checking
`extra_args`; unchecked, a bad value would be found in the scheduler and end the engine.

Obsolete when plugins can validate `extra_args`, as discussed in vllm-project/vllm#17191.
"""

from collections.abc import Callable
from typing import Any

from vllm_segreuse.compat.patching import wrap

CHECKED = ("0.32", "0.33")


def install() -> None:
    """Wrap the validation of sampling parameters, once."""
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(InputProcessor, "_validate_params", _validate_params)


def _validate_params(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_segreuse.launch import names_connector
    from vllm_segreuse.serve.requests import check_extra_args

    def _validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.vllm_config.kv_transfer_config
        if names_connector(config):
            options = config.kv_connector_extra_config
            check_extra_args(
                getattr(params, "extra_args", None),
                similar=options.get("similarity") is not None,
                bound=options.get("namespaces") is not None,
                trust_programs=options.get("namespaces_trust_programs", False),
            )
        return original(self, params, *args, **kwargs)

    return _validate_params
