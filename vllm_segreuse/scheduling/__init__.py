# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's process does with a request beside searching for its segments."""
