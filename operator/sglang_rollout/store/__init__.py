"""The weight store: receives the versions of trainers, and keeps them for the agents to copy."""
