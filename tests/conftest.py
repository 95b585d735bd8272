pytest_plugins = ["pytester"]  # only a conftest that pytest loads at its start may name plugins
