# SPDX-License-Identifier: Apache-2.0
"""Options of the server and of one request, and the one place where they are checked.

`ServerOptions` is what the operator sets, and `RequestOptions` what one request ends up with after
its own options were laid over the server's. Features bring options of their own: `config/` joins
them. Neither torch nor vLLM is imported: the API server, the scheduler and offline callers all
check with the same code.
"""
