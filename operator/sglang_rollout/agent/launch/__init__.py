"""The part of the agent that starts and ends engines of several pods together. One-pod engines never use it."""
