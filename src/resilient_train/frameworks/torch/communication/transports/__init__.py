"""How groups of one communication library are built, watched and broken."""
