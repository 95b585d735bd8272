# Only a conftest that pytest loads at its start may name plugins.
pytest_plugins = ["pytester", "tests.small_suite.runs"]
