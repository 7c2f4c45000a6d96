# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse explain`: what a server would reuse of a request, as a table or a page."""
