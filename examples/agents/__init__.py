# SPDX-License-Identifier: Apache-2.0
"""A ReAct agent with two tools, in the text format and with LangChain; see README.md beside this
file."""
