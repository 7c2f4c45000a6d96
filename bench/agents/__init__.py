# SPDX-License-Identifier: Apache-2.0
"""`python -m bench agents`: episodes of a ReAct agent with two tools; see `command`."""
