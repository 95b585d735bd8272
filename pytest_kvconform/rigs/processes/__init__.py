"""Processes: fork them, watch them, end them, and leave nothing behind. This room knows nothing of vLLM.

| module | what it has |
|---|---|
| `zygote` | the zygote (fork server): imports once what children need, then forks children on demand |
| `child` | a child as its caller sees it: a connection, a log, an end with a deadline |
| `place` | where a zygote runs: how to connect to it, and to read what its children wrote |
| `guard` | the parent of the services of a run, which starts, watches and ends them |
| `author_hook` | a function of a connector's author, called in a child |
| `hangs` | how soon it is known that a child hangs |
| `marks` | names that the pytest processes of a run note for each other |
| `stacks`, `logs` | Python stacks and exceptions, read from the log of a child |
| `cores` | how long threads waited for a core, and deadlines that do not count this time |
| `linux` | facts from /proc: children, sessions, shared memory, threads, listening sockets; huge pages |
| `shared_memory` | files in /dev/shm that the processes of a run made |
| `ports` | TCP ports that stay free until an engine binds them |
| `gpus` | GPUs of this machine, leased to one process at a time by file locks |

The way of one case through this room:

1. `rigs/launch.py` starts `python -m ...processes.zygote`, with the name of a function that imports what
   children need. The zygote calls the function, freezes its heap, and listens on a Unix socket in the run's
   folder.
2. `ChildProcess(place, name, "module:function", argument, deadline)` asks the zygote for a fork. The
   child leads a session of its own, writes to a log of its own, and calls the function with a connection
   and the argument.
3. The caller sends and receives messages over the connection; each `receive` has a deadline. Time in
   which the child waited for a core does not count.
4. A child that died or hung has its Python stack in the log. `ChildProcess.stack` prefers a stack that
   passes through one of the functions the caller names, such as the hooks of a connector.
5. `child.leave` gives a child that shuts down time to end; the zygote looks after it. `ChildProcess.end` lets
   the zygote kill the child's session, reap it, and remove its shared memory.
6. The zygote ends when it is closed or when its standard input ends, which is when pytest's process is
   gone. It kills every descendant and removes the run's folder.

This room imports the standard library, filelock and platformdirs, `pytest_kvconform.result`, and no other
room.
"""
