"""Stand-in for the library of Mooncake Transfer Engine, for machines without it."""
