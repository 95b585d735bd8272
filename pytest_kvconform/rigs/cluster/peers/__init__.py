"""Scenarios between peers: several byte engines at once, for what happens between P and D beside the bytes.

One P and one D that work do not show what a connector does when a peer is unreachable, silent, stopped or
restarted, when a lease ends, or when one rank reports something else than the others. A scenario does: it is
a script on several engines, and cases judge what it returns. The scenarios that the selected cases of a cell
observe run side by side, once, so that each deadline of the connector costs its time only once, and one case
alone does not start the engines of the others.

The way of a scenario:

1. A case calls `bench.peers.observe(cell, name)`. The first call of a cell (bench.py) starts the engines of
   all scenarios that its cases declare (`@case`), as scenarios.py and rank_scenarios.py list them, and of
   those that these need; those of `ON_THEIR_OWN` when a case asks.
2. The loop of the cluster lets every engine step by itself, and advances one scenario after the other.
3. A scenario uses scenario_engines.py: P computes a prompt (`prefill`), D loads it (`decode`), and each part
   waits with `yield`. hostile_clients.py listens and never answers, or sends malformed messages.
4. In each engine process (bytes/faulty/peer.py) history.py keeps what each rank reported to vLLM, and every
   byte that D loaded is compared.
5. The scenario returns a `ScenarioObservation`. Requests that went wrong are in it; nothing is judged here.
"""
