# SPDX-License-Identifier: Apache-2.0
"""Many engines behind a router, on paper: a trace of ids through a simulation.

traffic      a trace as the requests of many tenants, which share some of their text
caches       what an engine holds of whole components, in GPU and host memory
routers      which engine a request goes to
simulation   queues, work, transfers, the loss of an engine
footprint    bytes of the real index and of a real router's state
plan         which fleets are simulated, and the rows that come out
command      `python -m bench fleet`

Lengths, order and repeats are the trace's. Everything else is stated where it is assumed.
"""
