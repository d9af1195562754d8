"""The vocabulary and the limits of SGLang and of its router, smg, and a client of one SGLang server. The lowest layer."""
