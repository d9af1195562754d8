"""The operator's I/O: watches with kopf, reads the world, carries out what ``core`` plans, writes status."""
