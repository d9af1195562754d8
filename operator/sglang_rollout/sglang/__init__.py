"""The vocabulary and the limits of SGLang and of its router, smg. The lowest layer: every process imports from here."""
