"""Cases of tier "protocol" that are scripts: what is difficult for a connector, with bytes at stake."""
