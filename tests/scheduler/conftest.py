"""One zygote for all tests of this folder."""

from tests.helpers.fixtures import fixtures_of
from tests.wrong_connectors.catalogue import named

case_runner, run_cases = fixtures_of(named("finished"))
