"""Controllers of other projects, built from their Go modules and run on the lab cluster, for tests of fleets beside them."""
