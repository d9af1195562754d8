"""The agent's half of transport Staged: copies of versions in the memory of the pod, and their load into the engine."""
