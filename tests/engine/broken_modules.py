"""Modules that cannot be tested, and the sentence that tells why.

The tests write them to a folder of their own.
"""

from __future__ import annotations

CLASS = """
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
class C(NixlPullConnector):
"""

# name of the module -> (source, pattern of the sentence)
BROKEN: dict[str, tuple[str, str]] = {
    "needs_a_package": (
        "import nothing_like_it",
        r"importing needs_a_package failed: no module named 'nothing_like_it' \(needs_a_package\.py:1\)",
    ),
    "does_not_parse": ("class C(:", r"importing does_not_parse failed: SyntaxError: .*"),
    "raises": (
        "x = 1\nx / 0",
        r"importing raises failed: ZeroDivisionError: division by zero \(raises\.py:2\)",
    ),
    "exits": (
        "import sys\nsys.exit('no licence')",
        r"importing exits failed: SystemExit: no licence \(exits\.py:2\)",
    ),
    "ends": ("import os\nos._exit(7)", r"importing ends:C ended the process.*"),
    "crashes": (
        "import faulthandler\nfaulthandler._sigsegv()",
        r"importing crashes:C ended the process \(signal 11\)",
    ),
    "has_no_class": ("class D: pass", r"module has_no_class has no class 'C'.*"),
    "has_a_function": ("def C(): pass", r"has_a_function:C is no subclass of vLLM's KVConnectorBase_V1"),
    "has_another_class": (
        "class C: pass",
        r"has_another_class:C is no subclass of vLLM's KVConnectorBase_V1",
    ),
    "is_abstract": (
        (
            "from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1\nclass "
            "C(KVConnectorBase_V1): pass"
        ),
        r"C does not implement build_connector_meta, .*wait_for_save",
    ),
    "has_the_old_constructor": (
        f"{CLASS}    def __init__(self, vllm_config, role): pass",
        r"vLLM's factory refuses it: Connector C uses deprecated 2-argument constructor signature\..*",
    ),
    "prints_and_raises": (
        "import os\nos.write(1, bytes(range(256)))\nraise RuntimeError('first line\\nsecond line')",
        r"importing prints_and_raises failed: RuntimeError: first line \(prints_and_raises\.py:3\)",
    ),
}
