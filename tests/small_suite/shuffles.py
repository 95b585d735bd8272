"""A plugin that shuffles cases, as pytest-randomly and others do."""

import random

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    random.Random(3).shuffle(items)
