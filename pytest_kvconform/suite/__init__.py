"""The cases: a folder per tier, a file per theme. Files that begin with an underscore hold no cases."""
