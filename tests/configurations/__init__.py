"""What the connector of each rig is handed is what vLLM builds of the model, field by field."""

FOLDER = "RECORDER_FOLDER"  # environment variable: where recorder.py writes
PLAIN = "RECORDER_PLAIN"  # environment variable: if it is set, the connector of recorder.py moves nothing
