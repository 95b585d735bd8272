"""What stands in for a GPU on a CPU: `--kv-stand-in`. With it, a fake connector, which stands in for a second
one in MultiConnector.

MooncakeConnector asks torch for the number of the device, and gets 0. Its bytes need no device.

vLLM's OffloadingConnector and SimpleCPUOffloadConnector copy blocks between the memory of a GPU and of its
host. All that is replaced is the last call, which copies a list of (source, destination, bytes), and the
streams and events that order such calls. Which bytes of which block go where, and which call waits for which,
is computed by vLLM's own code.

| module | what it has |
|---|---|
| `device` | streams, events and the copy, as CUDA defines them, on host memory |
| `install` | puts them in the place of CUDA's, in the modules of vLLM that copy |
| `fake_connector` | the connector that is beside the subject in MultiConnector |

The copies are as late as CUDA's may be: a copy is made when somebody waits for it, or some steps later. So a
connector that gives blocks away before their copy is made shows.
"""
