"""One zygote for all tests of this folder, and the cases about faults alone."""

from tests.helpers.fixtures import fixtures_of
from tests.wrong_connectors.catalogue import named
from tests.wrong_connectors.table.faults import MODULES

case_runner, run_cases = fixtures_of(named("faults"), only=lambda planned: planned.module in MODULES)
