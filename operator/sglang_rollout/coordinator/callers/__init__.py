"""Identity of callers of the fleet's URL, and the decision who may call."""
