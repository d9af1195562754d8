"""The HTTP routes of the coordinator: request bodies become requests to the state machine, answers become replies."""
