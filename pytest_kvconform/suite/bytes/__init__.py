"""Cases on the byte rig: real geometries, real worker halves, and every byte of every pool compared."""
