# SPDX-License-Identifier: Apache-2.0
"""When vLLM serves requests that the server itself makes."""

LAST_PRIORITY = 2**31 - 1
"""Behind those of all users, where vLLM schedules by priority: smaller ones are served first."""
