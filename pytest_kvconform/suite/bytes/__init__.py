"""Cases that compare every byte of every rank's pool, with the geometry of real models and no model."""
