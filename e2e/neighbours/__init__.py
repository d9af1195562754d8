"""Controllers of other projects that fleets live beside, built from their Go modules and run on the lab cluster."""
