"""The wrong connectors of the tests, by theme, and the right ones beside them: classes alone.

`table` has their records, `test_catalogue.py` the one test of all of them.
"""
