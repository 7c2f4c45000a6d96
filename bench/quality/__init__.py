# SPDX-License-Identifier: Apache-2.0
"""The quality lab: tasks, the model that learnt them, and what each policy makes of its answers."""
