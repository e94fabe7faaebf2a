"""How bytes move: one module for each transport, all behind the same protocol."""
