"""One background process for all tests of this folder, and the cases about faults alone."""

from functools import partial

from tests.engine.judged import Jury
from tests.juries import fixtures

LEASE = '{"kv_connector_extra_config": {"num_threads": 0, "kv_lease_duration": 2}}'  # seconds; NixlConnector itself gets it from the suite
jury, judge = fixtures(
    lambda: Jury("tests.bytes_faults.faulty_connectors", "bytes", ("llama3_1_8b", "gpt_oss_20b"), "full"),
    lambda jury: partial(
        jury.judge,
        setup="b16",
        matrix="full",
        config=LEASE,
        only=lambda planned: planned.module == "bytes/transport_faults",
    ),
)
