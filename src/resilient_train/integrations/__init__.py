"""Trainers of other libraries, whose loops own their step. Each module needs the library of its name."""
