"""What a run leaves behind: `document` writes the truth, `terminal`, `failure` and `markdown` show it."""
