"""A plugin: the day of this process, and of its workers, is FAKEKV_TODAY, though midnight passes."""

import datetime
import os

from pytest_kvconform import declaration

DAY = datetime.date.fromisoformat(os.environ["FAKEKV_TODAY"])
declaration.today = lambda: DAY
