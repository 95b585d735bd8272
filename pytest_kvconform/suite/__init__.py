"""The cases: a folder for each tier, a file for each theme.

Files whose names begin with an underscore hold no cases.
"""
