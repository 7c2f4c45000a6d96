# SPDX-License-Identifier: Apache-2.0
"""Whether KV may be reused that was computed behind text which is not in the prompt."""
