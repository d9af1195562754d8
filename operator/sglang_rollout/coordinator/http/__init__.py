"""HTTP routes of the coordinator: bodies become requests to the state machine, answers become replies."""
