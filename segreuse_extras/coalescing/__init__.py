# SPDX-License-Identifier: Apache-2.0
"""Equal prompts at once: one is carried out, and the others take its KV."""
