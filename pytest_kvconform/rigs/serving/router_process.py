"""vllm-router in a child of the zygote."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection


def serve(connection: Connection, arguments: tuple[str, ...]) -> None:
    """Run vllm-router's own command line. The connection carries nothing: its end is this process's end."""
    from vllm_router.launch_router import main

    os.environ["RUST_BACKTRACE"] = "0"
    sys.argv = ["vllm-router", *arguments]
    main()
