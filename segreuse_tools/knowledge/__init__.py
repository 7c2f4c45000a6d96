# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases of a running server: its client, and the files that become documents."""

TOKEN_ENV = "VLLM_SEGREUSE_ADMIN_TOKEN"
"""Variable that holds the admin token, for the server and for programs that use its client."""

URL_ENV = "VLLM_SEGREUSE_URL"
"""Variable that holds the root of the server, for `vllm-segreuse kb`."""
