"""One zygote for all tests of this folder, and the cases about faults alone."""

from functools import partial

from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import fixtures

MODULES = ("bytes/transport_faults", "bytes/each_transfer")
# Seconds. The suite gives NixlConnector itself a lease.
LEASE = '{"kv_connector_extra_config": {"num_threads": 0, "kv_lease_duration": 2}}'
FAMILIES = ("llama3_1_8b", "gpt_oss_20b", "kimi_linear_48b")
case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.wrong_connectors.faults.transfers", "bytes", FAMILIES, "full"),
    lambda case_runner: partial(
        case_runner.run,
        setup="b16",
        matrix="full",
        config=LEASE,
        only=lambda planned: planned.module in MODULES,
    ),
)
