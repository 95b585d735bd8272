"""Engines by name, and scripts that drive them: one loop for every rig whose engines are processes.

| module | what it is |
|---|---|
| `engine` | `Engine`: one engine process as a script sees it. No call of it blocks |
| `loop` | the loop that advances engines and scripts side by side; `play` runs one script to its end |
| `turns` | parts of scripts in which engines step by turns: until requests end, until blocks are free |

A script is a generator. It yields where it waits, and then every other script and every engine goes on.
Engines step by themselves, or they are paused and step when a script says so: then what happens in which
order is the same in every run.
"""
