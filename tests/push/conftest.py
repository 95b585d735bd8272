"""One zygote for the tests of this folder that are about bytes."""

from tests.helpers.fixtures import fixtures_of
from tests.wrong_connectors.catalogue import named

case_runner, run_cases = fixtures_of(named("push"))
