"""Attacks on a fleet, and callers that must keep working."""
