# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse explain`: asks a server what it would reuse of a request, and why not the rest."""
