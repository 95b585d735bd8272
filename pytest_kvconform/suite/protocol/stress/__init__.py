"""Cases of tier "protocol" on live engines: what is difficult for a connector, with bytes at stake."""
