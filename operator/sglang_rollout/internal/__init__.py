"""Calls between the fleet's own processes: what the HTTP servers of agents and of the weight store share."""
