"""Checkpoints on storage: written, committed by a rename, verified, retired, read. The format: docs/reference."""
