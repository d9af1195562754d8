"""Calls between the fleet's own processes: what agents and the weight store share."""
