# SPDX-License-Identifier: Apache-2.0
"""What a server would reuse of a request, and why not the rest: how it is asked, and in words.

The viewer's pages and `vllm-segreuse explain` (`segreuse_tools/explain/`) show it.
"""
