"""Two turns of a conversation: what right connectors do, and mistakes that cases about turns find."""
